"""A block image that differs from another in some blocks: only what differs is stored. See docs/formats/capture.md.

The image is cut by a fixed grid of cells, so that equal memory of siblings makes equal chunks. The changed blocks of a
cell become one chunk, without the zero ones, which become holes; the entries around them keep pointing into the
parent's chunks. Leaves without a change are the parent's, whatever their number: they are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from imaged.blockbuilder import is_zero
from imaged.blockformat import Leaf, Root, block_count, leaf_blocks_for, mergeable, pack_leaf
from imaged.chunks import ChunkReader, ChunkReadWriter, ChunkWriter
from imaged.errors import FormatError
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId

CELL_BLOCKS = 16
CELL_BYTES = CELL_BLOCKS * BLOCK_BYTES
"""64 KiB: a restored idle guest that parks again stores 118 KB, with cells of 32 KiB 134, of 16 KiB 162. Its restore
elsewhere reads 4.4 MB in 231 chunks, with 32 KiB 3.6 MB in 332."""

Change = tuple[int, bytes | int]
"""Offset, and the bytes that are there now, or how many zero bytes are: whole blocks, but the last of the image may be
short."""
_Run = tuple[int, memoryview | int]
_Edit = tuple[int, Extent]
"""The block of the leaf that an extent begins at, and the extent."""


def derive(
    store: ChunkReadWriter,
    parent: ChunkId | None,
    size_bytes: int,
    changes: Iterable[Change],
    *,
    reader: ChunkReader | None = None,
) -> ChunkId:
    """Store the image of `size_bytes` that is `parent` (None: all zeros) but for `changes`, and return its id.

    The changes ascend and do not overlap; how they are cut into runs makes no difference. They are taken one by one, so
    they need not fit into memory. Nothing is compared with the parent: blocks that are given make chunks, also where
    they are what it has.

    `reader` gives root and leaves of the parent where they may have to be fetched, else the store does. The parent's
    size must be the same: FormatError. ValueError for changes that break these rules.
    """
    source = store if reader is None else reader
    if parent is None:
        leaf_blocks = leaf_blocks_for(size_bytes)
        leaf_count = -(-size_bytes // (leaf_blocks * BLOCK_BYTES))
        root = Root(size_bytes, (None,) * leaf_count, leaf_blocks)
    else:
        root = Root.parse(source.get(parent))
        if root.size_bytes != size_bytes:
            what = f"parent image {parent}"
            raise FormatError(what, expected=f"{size_bytes} bytes", found=f"{root.size_bytes} bytes")
    leaves = list(root.leaves)
    cells = _cells(changes, size_bytes, root.leaf_bytes)
    for index, group in groupby(cells, key=lambda cell: cell[0][0] // root.leaf_bytes):
        edits = [edit for cell in group for edit in _store_cell(store, cell, index * root.leaf_bytes)]
        raw = pack_leaf(_edited(_old_extents(source, root, index), edits))
        leaves[index] = None if raw is None else store.put(raw)
    return store.put(Root(size_bytes, tuple(leaves), root.leaf_blocks).pack())


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


def _store_cell(store: ChunkWriter, cell: Sequence[_Run], leaf_start: int) -> Iterator[_Edit]:
    """Store the changed blocks of a cell that are not zero as one chunk, and tell what stands where."""
    kept: list[memoryview] = []
    runs: list[tuple[int, int, bool]] = []
    for offset, data in cell:
        first = (offset - leaf_start) // BLOCK_BYTES
        if isinstance(data, int):
            runs.append((first, block_count(data), True))
            continue
        for number, at in enumerate(range(0, len(data), BLOCK_BYTES), first):
            block = data[at : at + BLOCK_BYTES]
            zero = is_zero(block)
            if not zero:
                kept.append(block)
            if runs and runs[-1][0] + runs[-1][1] == number and runs[-1][2] == zero:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, zero)
            else:
                runs.append((number, 1, zero))
    chunk = store.put(b"".join(kept)) if kept else None
    place = 0
    for number, count, zero in runs:
        yield number, Extent(count, None) if zero else Extent(count, chunk, place)
        place += 0 if zero else count


def _old_extents(source: ChunkReader, root: Root, index: int) -> list[Extent]:
    """What a leaf of the parent maps; FormatError when it is not as long as its range."""
    blocks, leaf_id = root.blocks_of(index), root.leaves[index]
    if leaf_id is None:
        return [Extent(blocks, None)]
    leaf = Leaf.parse(source.get(leaf_id))
    if leaf.block_count != blocks:
        raise FormatError(f"leaf {leaf_id}", expected=f"{blocks} blocks", found=f"{leaf.block_count}")
    return leaf.extents()


def _edited(old: Iterable[Extent], edits: Sequence[_Edit]) -> list[Extent]:
    """The extents of a leaf with the edits, which ascend, in their place; neighbours that are one extent merged."""
    merged: list[Extent] = []
    start = done = number = 0
    for extent in old:
        end = start + extent.block_count
        while done < end:
            if number < len(edits) and edits[number][0] == done:
                part = edits[number][1]
                number += 1
            else:
                stop = min(end, edits[number][0]) if number < len(edits) else end
                first = 0 if extent.chunk is None else extent.first_block + done - start
                part = Extent(stop - done, extent.chunk, first)
            done += part.block_count
            if merged and mergeable(merged[-1], part):
                last = merged.pop()
                part = Extent(last.block_count + part.block_count, last.chunk, last.first_block)
            merged.append(part)
        start = end
    return merged
