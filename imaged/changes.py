"""What a block image has that the one before it, of the same disk or memory, had not: by the leaves that differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from imaged.blockformat import Leaf
from imaged.blockimage import BlockImage
from imaged.ids import BLOCK_BYTES, ChunkId


class Place(NamedTuple):
    """An entry of a leaf: `length` bytes of the image from `offset` on, which are in this chunk."""

    leaf: ChunkId
    chunk: ChunkId
    offset: int
    length: int


def changes(image: BlockImage, before: BlockImage) -> Iterator[Place]:
    """The places of `image` with chunks that `before` does not have thereabouts, in disk order; of an image of another
    size or leaf size nothing is known. Errors as from reading leaves."""
    if (image.size_bytes, image.root.leaf_bytes) != (before.size_bytes, before.root.leaf_bytes):
        return
    pairs = enumerate(zip(image.root.leaves, before.root.leaves, strict=True))
    indexes = [index for index, (leaf, old) in pairs if leaf is not None and leaf != old]
    for index, leaf, old in zip(indexes, image.leaves(indexes), before.leaves(indexes), strict=True):
        held = frozenset(old.chunks()) if old is not None else frozenset()
        leaf_id = image.root.leaves[index]
        if leaf is not None and leaf_id is not None:
            yield from (
                place for place in places(leaf_id, leaf, index * image.root.leaf_bytes) if place.chunk not in held
            )


def places(leaf_id: ChunkId, leaf: Leaf, offset: int) -> Iterator[Place]:
    """Each entry of a leaf that begins at this offset of its image, but holes."""
    chunks = leaf.chunks()
    ends = [*leaf.starts[1:], leaf.block_count]
    for start, end, number in zip(leaf.starts, ends, leaf.indexes, strict=True):
        if number < len(chunks):
            yield Place(leaf_id, chunks[number], offset + start * BLOCK_BYTES, (end - start) * BLOCK_BYTES)
