"""Build a block image by appending extents; and write plain bytes as one."""

from __future__ import annotations

from imaged.blockformat import (
    CHUNK_LIMIT_BLOCKS,
    LEAF_BLOCKS,
    LEAF_COUNT_LIMIT,
    LEAF_LIMIT_BLOCKS,
    Root,
    block_count,
    mergeable,
    pack_leaf,
)
from imaged.chunks import ChunkWriter
from imaged.errors import FormatError
from imaged.extent import Extent
from imaged.frame import CHUNK_LIMIT_BYTES, ZSTD_LEVEL
from imaged.ids import BLOCK_BYTES, ChunkId

_ZEROS = bytes(CHUNK_LIMIT_BYTES)


def is_zero(data: bytes | memoryview) -> bool:
    """Whether these bytes (no more than a chunk's) are all zero: one memcmp, which ends at the first difference."""
    return _ZEROS.startswith(data)


class BlockImageBuilder:
    """Collects the map of one image and stores a leaf each time its range is full. For one thread.

    `leaf_blocks` is `leaf_blocks_for` the size that the image will have, about.
    """

    def __init__(self, store: ChunkWriter, *, leaf_blocks: int = LEAF_BLOCKS) -> None:
        self._store = store
        self._leaf_blocks = leaf_blocks
        self._leaves: list[ChunkId | None] = []
        self._entries: list[Extent] = []
        self._room = leaf_blocks
        self.position_blocks = 0

    def append(self, extent: Extent) -> int:
        """Add an extent at the end and return the block it begins at.

        The chunk itself is not read, so that it is long enough is the caller's promise; readers check it.
        FormatError for an extent that no chunk can hold and for an image of more leaves than a root has room for.
        """
        start, count, first, chunk = self.position_blocks, extent.block_count, extent.first_block, extent.chunk
        if count < 1 or first < 0 or (first > 0 if chunk is None else first + count > CHUNK_LIMIT_BLOCKS):
            expected = f"1 or more blocks, in a chunk of at most {CHUNK_LIMIT_BLOCKS}"
            raise FormatError("extent", expected=expected, found=f"{count} blocks from block {first} on")
        limit_blocks = LEAF_COUNT_LIMIT * self._leaf_blocks
        if start + count > limit_blocks:
            found = f"{(start + count) * BLOCK_BYTES} bytes"
            raise FormatError("block image size", expected=f"at most {limit_blocks * BLOCK_BYTES} bytes", found=found)
        self.position_blocks = start + count
        while count > self._room:
            part = self._room
            self._push(Extent(part, chunk, first))
            count -= part
            first += part if chunk is not None else 0
        self._push(extent if count == extent.block_count else Extent(count, chunk, first))
        return start

    def finish(self, size_bytes: int | None = None) -> ChunkId:
        """Store the last leaf and the root, and return the image's id.

        `size_bytes` makes the last block short; it must lie in that block. The builder is used up.
        """
        size_bytes = self.position_blocks * BLOCK_BYTES if size_bytes is None else size_bytes
        if block_count(size_bytes) != self.position_blocks:
            expected = f"a size that ends in block {self.position_blocks - 1}"
            raise FormatError("block image size", expected=expected, found=f"{size_bytes} bytes")
        if self._entries:
            self._cut_leaf()
        return self._store.put(Root(size_bytes, tuple(self._leaves), self._leaf_blocks).pack())

    def _push(self, extent: Extent) -> None:
        """Add an extent that fits into this leaf."""
        entries = self._entries
        if entries and mergeable(entries[-1], extent):
            last = entries[-1]
            entries[-1] = Extent(last.block_count + extent.block_count, last.chunk, last.first_block)
        else:
            entries.append(extent)
        self._room -= extent.block_count
        if self._room == 0:
            self._cut_leaf()

    def _cut_leaf(self) -> None:
        raw = pack_leaf(self._entries)
        self._leaves.append(None if raw is None else self._store.put(raw))
        self._entries = []
        self._room = self._leaf_blocks


def write_blob(
    store: ChunkWriter, data: bytes, chunk_bytes: int = CHUNK_LIMIT_BYTES, *, level: int = ZSTD_LEVEL
) -> ChunkId:
    """Store plain bytes as a block image and return its id; `imaged.blockimage.read_blob` gives them back.

    `chunk_bytes` is a whole number of blocks. The last chunk is as short as the data. `level` is as for `put`.
    Whoever reads a blob reads all of it, so its leaves are the largest.
    """
    if chunk_bytes % BLOCK_BYTES or not 0 < chunk_bytes <= CHUNK_LIMIT_BYTES:
        expected = f"a multiple of {BLOCK_BYTES} up to {CHUNK_LIMIT_BYTES}"
        raise FormatError("chunk size", expected=expected, found=f"{chunk_bytes} bytes")
    builder = BlockImageBuilder(store, leaf_blocks=LEAF_LIMIT_BLOCKS)
    for at in range(0, len(data), chunk_bytes):
        piece = data[at : at + chunk_bytes]
        builder.append(Extent(block_count(len(piece)), None if is_zero(piece) else store.put(piece, level=level)))
    return builder.finish(len(data))
