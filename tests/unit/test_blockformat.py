"""Root and leaf bytes: exact layout, and refusal of everything that is not the one canonical form."""

from __future__ import annotations

import struct

import pytest

from imaged.blockformat import (
    IMAGE_LIMIT_BYTES,
    LEAF_BLOCKS,
    LEAF_BYTES,
    LEAF_COUNT_LIMIT,
    LEAF_LIMIT_BLOCKS,
    Leaf,
    Root,
    leaf_blocks_for,
    mergeable,
    pack_leaf,
)
from imaged.errors import FormatError
from imaged.extent import Extent
from imaged.frame import CHUNK_LIMIT_BYTES
from imaged.ids import ChunkId

A, B = ChunkId.of(b"a"), ChunkId.of(b"b")
HOLE = 0xFFFF


def raw_leaf(table: list[bytes], entries: list[tuple[int, int, int]]) -> bytes:
    """A leaf written with struct alone: entries are (count, table index, first block)."""
    count = len(entries)
    columns = list(zip(*entries, strict=True)) or [(), (), ()]
    return (
        struct.pack("<4sHH", b"pvL1", len(table), count)
        + b"".join(table)
        + struct.pack(f"<{count}H", *columns[0])
        + struct.pack(f"<{count}H", *columns[1])
        + bytes(columns[2])
    )


def raw_root(size: int, leaves: list[bytes], *, block: int = 4096, leaf_blocks: int = 512) -> bytes:
    return struct.pack("<4sIQII", b"pvR1", block, size, leaf_blocks, len(leaves)) + b"".join(leaves)


def test_leaf_bytes_are_the_documented_ones() -> None:
    extents = [Extent(2, A, 3), Extent(5, None), Extent(1, B), Extent(1, A, 5)]
    raw = pack_leaf(extents)
    assert raw == raw_leaf([A, B], [(2, 0, 3), (5, HOLE, 0), (1, 1, 0), (1, 0, 5)])
    leaf = Leaf.parse(raw)
    assert leaf.extents() == extents
    assert leaf.block_count == 9
    assert leaf.chunks() == [A, B]
    assert [leaf.find(block) for block in range(9)] == [0, 0, 1, 1, 1, 1, 1, 2, 3]


def test_root_bytes_are_the_documented_ones() -> None:
    root = Root(2 * LEAF_BYTES + 5, (A, None, B))
    raw = raw_root(2 * LEAF_BYTES + 5, [A, bytes(32), B])
    assert root.pack() == raw
    assert Root.parse(raw) == root
    assert [root.blocks_of(index) for index in range(3)] == [LEAF_BLOCKS, LEAF_BLOCKS, 1]


@pytest.mark.parametrize("leaf_blocks", [256, 512, 1024, 2048, 4096])
def test_a_root_says_how_much_a_leaf_maps(leaf_blocks: int) -> None:
    size = 2 * leaf_blocks * 4096
    root = Root(size, (A, B), leaf_blocks)
    assert root.pack() == raw_root(size, [A, B], leaf_blocks=leaf_blocks)
    assert Root.parse(root.pack()) == root


def test_leaves_grow_before_the_root_does() -> None:
    gib = 1 << 30
    sizes = (0, 8 * gib, 8 * gib + 1, 16 * gib + 1, 32 * gib + 1, IMAGE_LIMIT_BYTES)
    assert [leaf_blocks_for(size) for size in sizes] == [512, 512, 1024, 2048, 4096, 4096]
    assert len(Root(8 * gib, (A,) * 4096).pack()) == 24 + 32 * 4096


def test_empty_image_has_a_root_of_no_leaves() -> None:
    assert Root.parse(Root(0, ()).pack()) == Root(0, ())


def test_leaf_of_holes_is_no_leaf() -> None:
    assert pack_leaf([Extent(LEAF_BLOCKS, None)]) is None


def test_largest_root_is_one_chunk() -> None:
    largest = Root(IMAGE_LIMIT_BYTES, (A,) * LEAF_COUNT_LIMIT, LEAF_LIMIT_BLOCKS)
    raw = largest.pack()
    assert len(raw) <= CHUNK_LIMIT_BYTES < len(raw) + 32
    assert Root.parse(raw) == largest
    with pytest.raises(FormatError, match="at most"):
        Root(IMAGE_LIMIT_BYTES + 1, (A,) * (LEAF_COUNT_LIMIT + 1), LEAF_LIMIT_BLOCKS).pack()


def test_largest_leaf_is_one_chunk() -> None:
    extents = [Extent(1, ChunkId.of(b"%d" % number), number % 256) for number in range(LEAF_LIMIT_BLOCKS)]
    raw = pack_leaf(extents)
    assert raw is not None
    assert len(raw) < CHUNK_LIMIT_BYTES
    assert Leaf.parse(raw).extents() == extents


@pytest.mark.parametrize(
    "left, right, merged",
    [
        (Extent(1, None), Extent(4, None), True),
        (Extent(1, A, 2), Extent(4, A, 3), True),
        (Extent(1, A, 2), Extent(4, A, 4), False),
        (Extent(1, A, 2), Extent(4, B, 3), False),
        (Extent(1, A), Extent(1, None), False),
        (Extent(1, None), Extent(1, A), False),
    ],
)
def test_mergeable(left: Extent, right: Extent, merged: bool) -> None:
    assert mergeable(left, right) is merged


@pytest.mark.parametrize(
    "raw, match",
    [
        (b"", "magic"),
        (b"pvR1" + raw_leaf([A], [(1, 0, 0)])[4:], "magic"),
        (raw_leaf([A], [(1, 0, 0)])[:-1], "bytes for 1 chunks"),
        (raw_leaf([A], [(1, 0, 0)]) + b"\0", "bytes for 1 chunks"),
        (raw_leaf([], []), "one or more"),
        (raw_leaf([], [(4096, HOLE, 0)]), "one or more"),
        (raw_leaf([A, A], [(1, 0, 0), (1, 1, 0)]), "different"),
        (raw_leaf([bytes(32)], [(1, 0, 0)]), "different"),
        (raw_leaf([A], [(0, 0, 0)]), "1 to 4096 blocks"),
        (raw_leaf([A], [(4000, HOLE, 0), (97, 0, 0)]), "1 to 96 blocks"),
        (raw_leaf([A], [(1, 0, 0), (1, HOLE, 1)]), "merged holes"),
        (raw_leaf([A], [(1, 0, 0), (1, HOLE, 0), (1, HOLE, 0)]), "merged holes"),
        (raw_leaf([A], [(1, 1, 0)]), "index of at most 0"),
        (raw_leaf([A, B], [(1, 1, 0), (1, 0, 0)]), "index of at most 0"),
        (raw_leaf([A], [(1, 0, 0), (1, 1, 0)]), "index of at most 0"),
        (raw_leaf([A, B], [(1, 0, 0)]), "use all 2"),
        (raw_leaf([A], [(2, 0, 255)]), "at most 256 blocks"),
        (raw_leaf([A], [(1, 0, 0), (1, 0, 1)]), "merged run"),
    ],
)
def test_leaf_refuses(raw: bytes, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        Leaf.parse(raw)


@pytest.mark.parametrize(
    "raw, match",
    [
        (b"pvR1", "header"),
        (raw_leaf([A], [(1, 0, 0)]), "magic"),
        (raw_root(10, [A], block=512), "blocks of 4096"),
        (raw_root(10, [A], leaf_blocks=8192), "4096 in a leaf"),
        (raw_root(10, [A], leaf_blocks=128), "from 256 to 4096"),
        (raw_root(10, [A], leaf_blocks=513), "power of two"),
        (raw_root(LEAF_BYTES + 1, [A]), "2 leaves"),
        (raw_root(0, [A]), "0 leaves"),
        (raw_root(1 << 63, [A]), "leaves for"),
        (raw_root(10, [A])[:-1], "56 bytes for 1 leaves"),
        (raw_root(10, [A]) + b"\0", "56 bytes for 1 leaves"),
    ],
)
def test_root_refuses(raw: bytes, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        Root.parse(raw)
