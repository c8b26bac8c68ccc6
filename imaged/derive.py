"""A block image that differs from another in some blocks: only what differs is stored. See docs/formats/capture.md.

The image is cut by a fixed grid of cells, so that equal memory of siblings makes equal chunks. The changed blocks of a
cell become one chunk, without the zero ones, which become holes; the entries around them keep pointing into the
parent's chunks. Leaves without a change are the parent's, whatever their number: they are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from imaged.blockbuilder import is_zero
from imaged.blockformat import Root, block_count
from imaged.chunks import ChunkBatchWriter
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.leafedit import edit_leaf
from imaged.parentleaves import ParentLeaves

CELL_BLOCKS = 16
CELL_BYTES = CELL_BLOCKS * BLOCK_BYTES
"""64 KiB: a restored idle guest that parks again stores 118 KB, with cells of 32 KiB 134, of 16 KiB 162. Its restore
elsewhere reads 4.4 MB in 231 chunks, with 32 KiB 3.6 MB in 332."""

Change = tuple[int, bytes | memoryview | int]
"""Offset, and the bytes that are there now, or how many zero bytes are: whole blocks, but the last of the image may be
short."""
_Run = tuple[int, memoryview | int]
_PUT_AT_ONCE = 64
"""Chunks that are looked up together: one by one, looking up takes as long as hashing."""


def derive(
    store: ChunkBatchWriter,
    parent: ChunkId | None,
    size_bytes: int,
    changes: Iterable[Change],
    *,
    before: ParentLeaves | None = None,
) -> ChunkId:
    """Store the image of `size_bytes` that is `parent` (None: all zeros) but for `changes`, and return its id.

    The changes ascend and do not overlap; how they are cut into runs makes no difference. They are taken one by one, so
    they need not fit into memory. Nothing is compared with the parent: blocks that are given make chunks, also where
    they are what it has.

    `before` gives the leaves of this parent where they may have to be fetched, or are read ahead; else the store does.
    The parent's size must be the same: FormatError. ValueError for changes that break these rules.
    """
    leaves = ParentLeaves(store, parent, size_bytes) if before is None else before
    deriving = _Deriving(store, leaves)
    for cell in _cells(changes, size_bytes, leaves.root.leaf_bytes):
        deriving.take(cell)
    deriving.store()
    return store.put(Root(size_bytes, tuple(deriving.leaves), leaves.root.leaf_blocks).pack())


class _Deriving:
    """Cells that wait until there are some to be stored together, and the leaves they are in."""

    def __init__(self, store: ChunkBatchWriter, before: ParentLeaves) -> None:
        self._store, self._before, self._root = store, before, before.root
        self.leaves = list(before.root.leaves)
        self._index = -1
        self._data: list[bytes] = []
        self._edits: dict[int, list[tuple[int, int, int | None, int]]] = {}
        """By leaf: first block, how many, place in `_data` or None for zeros, and the block of that."""

    def take(self, cell: Sequence[_Run]) -> None:
        """The changes of a cell, which ascend: blocks that are not zero become one chunk."""
        index = cell[0][0] // self._root.leaf_bytes
        if index != self._index:
            if len(self._data) >= _PUT_AT_ONCE:
                self.store()
            self._index = index
        edits = self._edits.setdefault(index, [])
        number, place = len(self._data), 0
        kept: list[memoryview] = []
        for offset, data in cell:
            first = (offset - index * self._root.leaf_bytes) // BLOCK_BYTES
            if isinstance(data, int):
                edits.append((first, block_count(data), None, 0))
                continue
            for start, end, zero in _runs(data):
                count = block_count(end - start)
                at = first + start // BLOCK_BYTES
                if zero:
                    edits.append((at, count, None, 0))
                    continue
                edits.append((at, count, number, place))
                kept.append(data[start:end])
                place += count
        if kept:
            self._data.append(b"".join(kept))

    def store(self) -> None:
        """Put what was taken, and the leaves."""
        chunks = self._store.put_all(self._data)
        edited = {
            index: edit_leaf(
                self._before.take(index),
                [(first, count, None if at is None else chunks[at], block) for first, count, at, block in edits],
            )
            for index, edits in self._edits.items()
        }
        self._data, self._edits = [], {}
        stored = iter(self._store.put_all([raw for raw in edited.values() if raw is not None]))
        for index, raw in edited.items():
            self.leaves[index] = None if raw is None else next(stored)


def _runs(data: memoryview) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether all is zero) of the longest runs of blocks that are alike."""
    start, was_zero = 0, False
    for at in range(0, len(data), BLOCK_BYTES):
        zero = is_zero(data[at : at + BLOCK_BYTES])
        if zero != was_zero:
            if at > start:
                yield start, at, was_zero
            start, was_zero = at, zero
    yield start, len(data), was_zero


def _cells(changes: Iterable[Change], size_bytes: int, leaf_bytes: int) -> Iterator[list[_Run]]:
    """The changes cut by the grid, those of one cell together. Zeros are not cut by cells that have nothing else."""
    cell: list[_Run] = []
    number, end = -1, 0
    for offset, data in changes:
        length = data if isinstance(data, int) else len(data)
        if offset % BLOCK_BYTES or offset < end or length < 1 or offset + length > size_bytes:
            raise ValueError(f"a change of {length} bytes at {offset}, after one up to {end}, of {size_bytes}")
        if length % BLOCK_BYTES and offset + length != size_bytes:
            raise ValueError(f"a change of {length} bytes at {offset}: not whole blocks")
        start, end = offset, offset + length
        view = data if isinstance(data, int) else memoryview(data)
        while start < end:
            if start // CELL_BYTES != number:
                if cell:
                    yield cell
                number, cell = start // CELL_BYTES, []
            stop = (number + 1) * CELL_BYTES
            if isinstance(view, int) and not cell and end > stop:
                stop = end // CELL_BYTES * CELL_BYTES
                stop = min(stop, (start // leaf_bytes + 1) * leaf_bytes)
                yield [(start, stop - start)]
            else:
                stop = min(end, stop)
                cell.append((start, stop - start if isinstance(view, int) else view[start - offset : stop - offset]))
            start = stop
    if cell:
        yield cell
