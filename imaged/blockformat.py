"""Bytes of a block image: the root, and the leaf that maps 2 MiB of the disk; see docs/formats/blockimage.md.

Root                                          Leaf
offset  size  field                           offset  size  field
     0     4  magic "pvR1"                         0     4  magic "pvL1"
     4     4  block size, 4096                     4     2  t: chunk ids in the table
     8     8  size_bytes of the image              6     2  n: entries
    16     4  blocks in a leaf, mostly 512         8  32 t  chunk ids, unique, in order of first use
    20     4  n: leaves                            -   2 n  block count of each entry, 1 to 4096
    24  32 n  leaf ids, zero for a hole            -   2 n  table index of each entry, 65535 for a hole
                                                   -     n  first block inside the chunk of each entry

Little endian. There is exactly one way to write a given map, so equal ranges have equal leaf ids: entries that could be
one entry are refused, as is a table in another order and a leaf that is all hole.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from imaged.errors import FormatError
from imaged.extent import Extent
from imaged.frame import CHUNK_LIMIT_BYTES
from imaged.ids import BLOCK_BYTES, ChunkId

LEAF_BYTES = 2 << 20
"""Every leaf but the last maps this much of the disk; more in an image that would have many leaves (`leaf_blocks_for`).

What a process reads is scattered, so leaves of small ranges are fewer bytes on the wire; the root, which everybody
needs whole, grows. With bench/chunk_size.py on a Debian root, root and leaves of a cold start of `python3 -c 'import
numpy'` come to 187 KB for 16 MiB, 133 for 4, 101 for 2, 86 for 1; the root of 8 GiB has 16, 64, 128 and 256 KB.
"""
LEAF_BLOCKS = LEAF_BYTES // BLOCK_BYTES
LEAF_LEAST_BLOCKS, LEAF_LIMIT_BLOCKS = 256, 4096
"""What a root may say: powers of two from 1 MiB to 16 MiB."""
CHUNK_LIMIT_BLOCKS = CHUNK_LIMIT_BYTES // BLOCK_BYTES
NO_LEAF = bytes(ChunkId.SIZE_BYTES)
"""In place of a leaf id: the whole range is a hole."""
ROOT_MAGIC, LEAF_MAGIC = b"pvR1", b"pvL1"

_ROOT = struct.Struct("<4sIQII")
_LEAF = struct.Struct("<4sHH")
_ID = ChunkId.SIZE_BYTES
HOLE = 0xFFFF
"""Index of an entry without a chunk."""

LEAF_COUNT_LIMIT = (CHUNK_LIMIT_BYTES - _ROOT.size) // _ID
"""The root is one chunk, so this many leaves fit: 512 GiB less 16 MiB, with the largest."""
IMAGE_LIMIT_BYTES = LEAF_COUNT_LIMIT * LEAF_LIMIT_BLOCKS * BLOCK_BYTES
_LEAF_COUNT_WANTED = 4096


def block_count(size_bytes: int) -> int:
    """Blocks that size_bytes take, the last one perhaps short."""
    return -(-size_bytes // BLOCK_BYTES)


def leaf_blocks_for(size_bytes: int) -> int:
    """Blocks of each leaf of an image of about this size: LEAF_BLOCKS, more where the root would pass 128 KiB.

    Images that share their beginning share leaves only if they agree on this; so it depends on the size alone, and
    that of most images makes no difference.
    """
    blocks = LEAF_BLOCKS
    while blocks < LEAF_LIMIT_BLOCKS and block_count(size_bytes) > blocks * _LEAF_COUNT_WANTED:
        blocks *= 2
    return blocks


@dataclass(frozen=True, slots=True)
class Root:
    """The size of an image, the id of each leaf, None where the range is a hole, and how many blocks a leaf maps."""

    size_bytes: int
    leaves: tuple[ChunkId | None, ...]
    leaf_blocks: int = LEAF_BLOCKS

    @property
    def leaf_bytes(self) -> int:
        return self.leaf_blocks * BLOCK_BYTES

    def pack(self) -> bytes:
        """FormatError when the image is too long for one root."""
        if len(self.leaves) > LEAF_COUNT_LIMIT:
            expected = f"at most {LEAF_COUNT_LIMIT * self.leaf_bytes} bytes"
            raise FormatError("block image size", expected=expected, found=f"{self.size_bytes} bytes")
        header = _ROOT.pack(ROOT_MAGIC, BLOCK_BYTES, self.size_bytes, self.leaf_blocks, len(self.leaves))
        return header + b"".join(NO_LEAF if leaf is None else leaf for leaf in self.leaves)

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """FormatError when the bytes are not exactly one root."""
        if len(raw) < _ROOT.size or raw[:4] != ROOT_MAGIC:
            expected = f"magic {ROOT_MAGIC!r} and a header of {_ROOT.size} bytes"
            raise FormatError("block image root", expected=expected, found=f"{raw[:4]!r}, {len(raw)} bytes")
        _, block_bytes, size_bytes, leaf_blocks, leaf_count = _ROOT.unpack_from(raw)
        fits = LEAF_LEAST_BLOCKS <= leaf_blocks <= LEAF_LIMIT_BLOCKS and leaf_blocks.bit_count() == 1
        if block_bytes != BLOCK_BYTES or not fits:
            least, most = LEAF_LEAST_BLOCKS, LEAF_LIMIT_BLOCKS
            expected = f"blocks of {BLOCK_BYTES} bytes, a power of two from {least} to {most} in a leaf"
            raise FormatError("block image root", expected=expected, found=f"{block_bytes}, {leaf_blocks}")
        wanted = -(-size_bytes // (leaf_blocks * BLOCK_BYTES))
        if leaf_count != wanted:
            expected = f"{wanted} leaves for {size_bytes} bytes"
            raise FormatError("block image root", expected=expected, found=f"{leaf_count}")
        if len(raw) != _ROOT.size + leaf_count * _ID:
            expected = f"{_ROOT.size + leaf_count * _ID} bytes for {leaf_count} leaves"
            raise FormatError("block image root", expected=expected, found=f"{len(raw)} bytes")
        ids = (raw[at : at + _ID] for at in range(_ROOT.size, len(raw), _ID))
        return cls(size_bytes, tuple(None if leaf == NO_LEAF else ChunkId(leaf) for leaf in ids), leaf_blocks)

    def blocks_of(self, index: int) -> int:
        """Blocks that leaf `index` maps: `leaf_blocks`, fewer for the last one."""
        return min(self.leaf_blocks, block_count(self.size_bytes) - index * self.leaf_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A parsed leaf. Ids are cut from the raw bytes when asked for: a cached leaf costs about its length in memory.

    `starts[i]` is the block of the leaf at which entry i begins.
    """

    raw: bytes
    block_count: int
    table_count: int
    starts: array[int]
    indexes: array[int]
    first_blocks: bytes

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """FormatError when the bytes are not exactly one leaf in canonical form."""
        if len(raw) < _LEAF.size or raw[:4] != LEAF_MAGIC:
            raise FormatError("leaf", expected=f"magic {LEAF_MAGIC!r}", found=f"{raw[:4]!r}, {len(raw)} bytes")
        _, table_count, entry_count = _LEAF.unpack_from(raw)
        counts_at = _LEAF.size + table_count * _ID
        indexes_at = counts_at + 2 * entry_count
        first_at = indexes_at + 2 * entry_count
        if len(raw) != first_at + entry_count:
            expected = f"{first_at + entry_count} bytes for {table_count} chunks and {entry_count} entries"
            raise FormatError("leaf", expected=expected, found=f"{len(raw)} bytes")
        table = {raw[at : at + _ID] for at in range(_LEAF.size, counts_at, _ID)}
        if len(table) != table_count or NO_LEAF in table or table_count == 0:
            expected = "one or more different chunk ids"
            raise FormatError("leaf", expected=expected, found=f"{len(table)} different of {table_count}")
        indexes, first_blocks = _u16(raw[indexes_at:first_at]), raw[first_at:]
        starts, total = _check_entries(table_count, _u16(raw[counts_at:indexes_at]), indexes, first_blocks)
        return cls(raw, total, table_count, starts, indexes, first_blocks)

    def chunk(self, number: int) -> ChunkId:
        """The id at `number` in the table."""
        at = _LEAF.size + number * _ID
        return ChunkId(self.raw[at : at + _ID])

    def chunks(self) -> list[ChunkId]:
        """The whole table, in order of first use."""
        return ChunkId.several(self.raw[_LEAF.size : _LEAF.size + self.table_count * _ID])

    def find(self, block: int) -> int:
        """The number of the entry that holds a block of the leaf."""
        return bisect_right(self.starts, block) - 1

    def end(self, entry: int) -> int:
        """The first block of the leaf after an entry."""
        return self.starts[entry + 1] if entry + 1 < len(self.starts) else self.block_count

    def extent(self, entry: int) -> Extent:
        """One entry as an extent."""
        count, index = self.end(entry) - self.starts[entry], self.indexes[entry]
        return Extent(count, None) if index == HOLE else Extent(count, self.chunk(index), self.first_blocks[entry])

    def extents(self) -> list[Extent]:
        """All entries; `pack_leaf` of them gives `raw` again."""
        return [self.extent(entry) for entry in range(len(self.starts))]


def pack_leaf(extents: Sequence[Extent]) -> bytes | None:
    """The leaf of these extents, which are merged already (`mergeable`); None when there is no data in them."""
    table: dict[ChunkId, int] = {}
    indexes = [HOLE if extent.chunk is None else table.setdefault(extent.chunk, len(table)) for extent in extents]
    counts = [extent.block_count for extent in extents]
    return _pack(list(table), counts, indexes, [extent.first_block for extent in extents])


def pack_entries(
    chunks: Sequence[ChunkId], counts: Sequence[int], indexes: Iterable[int], first_blocks: Iterable[int]
) -> bytes | None:
    """As `pack_leaf`, of merged entries as they are in a leaf; the table may be in any order and have too many."""
    order: dict[int, int] = {}
    ordered = [HOLE if index == HOLE else order.setdefault(index, len(order)) for index in indexes]
    return _pack([chunks[index] for index in order], counts, ordered, first_blocks)


def _pack(
    table: Sequence[ChunkId], counts: Sequence[int], indexes: Sequence[int], first_blocks: Iterable[int]
) -> bytes | None:
    if not table:
        return None
    columns = array("H", counts), array("H", indexes)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    header = _LEAF.pack(LEAF_MAGIC, len(table), len(counts))
    return b"".join((header, *table, *(column.tobytes() for column in columns), bytes(first_blocks)))


def mergeable(left: Extent, right: Extent) -> bool:
    """Whether two neighbours are one extent: both holes, or blocks of one chunk that follow each other."""
    if left.chunk is None or right.chunk is None:
        return left.chunk is right.chunk
    return left.chunk == right.chunk and left.first_block + left.block_count == right.first_block


def _u16(raw: bytes) -> array[int]:
    values = array("H", raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _check_entries(
    table_count: int, counts: array[int], indexes: array[int], first_blocks: bytes
) -> tuple[array[int], int]:
    """Where each entry starts, and the sum of all counts; FormatError for anything `pack_leaf` would not write."""
    starts = array("H")
    position = used = 0
    last_index, last_end = -1, 0
    for count, index, first in zip(counts, indexes, first_blocks, strict=True):
        if count == 0 or position + count > LEAF_LIMIT_BLOCKS:
            found = f"{count} at block {position}"
            raise FormatError("leaf entry", expected=f"1 to {LEAF_LIMIT_BLOCKS - position} blocks", found=found)
        if index == HOLE:
            if first != 0 or last_index == HOLE:
                raise FormatError("leaf entry", expected="merged holes", found=f"a hole at block {position}")
        else:
            if index > used or index >= table_count:
                expected = f"chunk index of at most {min(used, table_count - 1)}"
                raise FormatError("leaf entry", expected=expected, found=f"{index} at block {position}")
            if first + count > CHUNK_LIMIT_BLOCKS:
                expected = f"a chunk of at most {CHUNK_LIMIT_BLOCKS} blocks"
                raise FormatError("leaf entry", expected=expected, found=f"block {first + count - 1} of a chunk")
            if index == last_index and first == last_end:
                found = f"its continuation at block {position}"
                raise FormatError("leaf entry", expected="a merged run", found=found)
            used += index == used
        starts.append(position)
        position += count
        last_index, last_end = index, first + count
    if used != table_count:
        raise FormatError("leaf", expected=f"entries that use all {table_count} chunks", found=f"{used}")
    return starts, position
