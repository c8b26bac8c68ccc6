"""The leaves of the image that another is derived from: fetched, checked and taken apart, also before they are needed.

It takes as long as the rest of a small change. Who knows where changes will be may `read` there while something else
is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from imaged.blockformat import Leaf, Root, leaf_blocks_for
from imaged.chunks import ChunkReader
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.leafedit import LeafParts

_AHEAD_LIMIT = 512
"""Of some 10 KB each, for 1 GiB."""


class ParentLeaves:
    """Of the image `parent` (None: all zeros), which has `size_bytes`. For one thread at a time. FormatError when it
    has another size."""

    def __init__(self, source: ChunkReader, parent: ChunkId | None, size_bytes: int) -> None:
        self._source = source
        self._parts: dict[int, LeafParts] = {}
        self.root = _root(source, parent, size_bytes)

    def read(self, offsets: Iterable[int]) -> None:
        """Those in which these bytes of the image are, as far as there is room, so that `take` has them at once.
        ChunkError, FormatError."""
        for offset in offsets:
            index = offset // self.root.leaf_bytes
            if index not in self._parts and len(self._parts) < _AHEAD_LIMIT:
                self._parts[index] = self._read(index)

    def take(self, index: int) -> LeafParts:
        """A leaf, which is not kept for a second time. ChunkError; FormatError when it is not as long as its range."""
        parts = self._parts.pop(index, None)
        return self._read(index) if parts is None else parts

    def _read(self, index: int) -> LeafParts:
        leaf_id, blocks = self.root.leaves[index], self.root.blocks_of(index)
        if leaf_id is None:
            return LeafParts(None, blocks)
        leaf = Leaf.parse(self._source.get(leaf_id))
        if leaf.block_count != blocks:
            raise FormatError(f"leaf {leaf_id}", expected=f"{blocks} blocks", found=f"{leaf.block_count}")
        return LeafParts(leaf, blocks)


def _root(source: ChunkReader, parent: ChunkId | None, size_bytes: int) -> Root:
    if parent is None:
        leaf_blocks = leaf_blocks_for(size_bytes)
        leaf_count = -(-size_bytes // (leaf_blocks * BLOCK_BYTES))
        return Root(size_bytes, (None,) * leaf_count, leaf_blocks)
    root = Root.parse(source.get(parent))
    if root.size_bytes != size_bytes:
        what = f"parent image {parent}"
        raise FormatError(what, expected=f"{size_bytes} bytes", found=f"{root.size_bytes} bytes")
    return root
