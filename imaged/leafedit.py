"""A leaf with some of its blocks replaced: what lies between the edits is copied as it is, in its arrays.

A derived image edits few blocks of each leaf it touches, and a leaf has some forty entries: making an object of each
took as long as compressing the changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from imaged.blockformat import HOLE, Leaf, pack_entries
from imaged.ids import ChunkId

Edit = tuple[int, int, ChunkId | None, int]
"""First block in the leaf, how many, and the chunk (None: a hole) and the block of it that they begin at."""


def edit_leaf(old: Leaf | None, block_count: int, edits: Iterable[Edit]) -> bytes | None:
    """The leaf of `block_count` blocks that is `old` (None: a hole) but for the edits, which ascend and do not overlap;
    None when there is no data in it. Neighbours that are one entry are merged."""
    editing = _Editing(old, block_count)
    done = 0
    for start, count, chunk, first_block in edits:
        editing.keep(done, start)
        editing.add(count, HOLE if chunk is None else editing.number(chunk), first_block)
        done = start + count
    editing.keep(done, block_count)
    return pack_entries(editing.chunks, editing.counts, editing.indexes, editing.first_blocks)


class _Editing:
    """The entries of the new leaf. `indexes` are places in `chunks`, which begins with the table of the old one."""

    def __init__(self, old: Leaf | None, block_count: int) -> None:
        self._old, self._block_count = old, block_count
        self._ends = [] if old is None else [*old.starts[1:], old.block_count]
        self._counts = [end - start for start, end in zip(old.starts, self._ends, strict=True)] if old else []
        self.chunks: list[ChunkId] = [] if old is None else old.chunks()
        self._places = {chunk: place for place, chunk in enumerate(self.chunks)}
        self.counts: list[int] = []
        self.indexes: list[int] = []
        self.first_blocks: list[int] = []

    def number(self, chunk: ChunkId) -> int:
        place = self._places.setdefault(chunk, len(self.chunks))
        if place == len(self.chunks):
            self.chunks.append(chunk)
        return place

    def add(self, count: int, index: int, first_block: int) -> None:
        """One entry, which may go on from the last one."""
        follows = index == HOLE or (self.counts and self.first_blocks[-1] + self.counts[-1] == first_block)
        if self.indexes and self.indexes[-1] == index and follows:
            self.counts[-1] += count
            return
        self.counts.append(count)
        self.indexes.append(index)
        self.first_blocks.append(first_block)

    def keep(self, start: int, end: int) -> None:
        """What the old leaf has from block `start` to before `end`."""
        if start == end:
            return
        old = self._old
        if old is None:
            self.add(end - start, HOLE, 0)
            return
        first, last = old.find(start), old.find(end - 1)
        self._part(old, first, start, min(end, self._ends[first]))
        if last == first:
            return
        # Only at the ends can neighbours be one entry: in a leaf none are.
        self.counts += self._counts[first + 1 : last]
        self.indexes += old.indexes[first + 1 : last]
        self.first_blocks += old.first_blocks[first + 1 : last]
        self._part(old, last, old.starts[last], end)

    def _part(self, old: Leaf, entry: int, start: int, end: int) -> None:
        index = old.indexes[entry]
        first_block = 0 if index == HOLE else old.first_blocks[entry] + start - old.starts[entry]
        self.add(end - start, index, first_block)
