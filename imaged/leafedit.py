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


class LeafParts:
    """A leaf (None: a hole of `block_count` blocks) taken apart, to be edited once."""

    __slots__ = ("block_count", "chunks", "counts", "ends", "leaf", "places")

    def __init__(self, leaf: Leaf | None, block_count: int) -> None:
        self.leaf, self.block_count = leaf, block_count
        self.ends = [] if leaf is None else [*leaf.starts[1:], leaf.block_count]
        self.counts = [end - start for start, end in zip(leaf.starts, self.ends, strict=True)] if leaf else []
        self.chunks: list[ChunkId] = [] if leaf is None else leaf.chunks()
        self.places = {chunk: place for place, chunk in enumerate(self.chunks)}


def edit_leaf(old: LeafParts, edits: Iterable[Edit]) -> bytes | None:
    """The leaf that is `old` but for the edits, which ascend and do not overlap; None when there is no data in it.
    Neighbours that are one entry are merged."""
    editing = _Editing(old)
    done = 0
    for start, count, chunk, first_block in edits:
        editing.keep(done, start)
        editing.add(count, HOLE if chunk is None else editing.number(chunk), first_block)
        done = start + count
    editing.keep(done, old.block_count)
    return pack_entries(old.chunks, editing.counts, editing.indexes, editing.first_blocks)


class _Editing:
    """The entries of the new leaf. `indexes` are places in the chunks of the old one, and those that come to them."""

    def __init__(self, old: LeafParts) -> None:
        self._old = old
        self.counts: list[int] = []
        self.indexes: list[int] = []
        self.first_blocks: list[int] = []

    def number(self, chunk: ChunkId) -> int:
        old = self._old
        place = old.places.setdefault(chunk, len(old.chunks))
        if place == len(old.chunks):
            old.chunks.append(chunk)
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
        old = self._old.leaf
        if old is None:
            self.add(end - start, HOLE, 0)
            return
        first, last = old.find(start), old.find(end - 1)
        self._part(old, first, start, min(end, self._old.ends[first]))
        if last == first:
            return
        # Only at the ends can neighbours be one entry: in a leaf none are.
        self.counts += self._old.counts[first + 1 : last]
        self.indexes += old.indexes[first + 1 : last]
        self.first_blocks += old.first_blocks[first + 1 : last]
        self._part(old, last, old.starts[last], end)

    def _part(self, old: Leaf, entry: int, start: int, end: int) -> None:
        index = old.indexes[entry]
        first_block = 0 if index == HOLE else old.first_blocks[entry] + start - old.starts[entry]
        self.add(end - start, index, first_block)
