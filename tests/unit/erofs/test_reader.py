from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from imaged.blockbuilder import BlockImageBuilder
from imaged.erofs import format as erofs
from imaged.erofs import layout, reader, writer
from imaged.erofs.tree import Inode, walk
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES
from tests.support import trees
from tests.support.memory_store import MemoryStore


def image_of(root: Inode, store: MemoryStore) -> tuple[bytearray, layout.Placement, erofs.Superblock]:
    placement = layout.place(root, BlockImageBuilder(store))
    image = bytearray(writer.metadata_image(root, placement))
    return image, placement, erofs.Superblock.parse(image[:BLOCK_BYTES])


def small() -> tuple[bytearray, erofs.Superblock, reader.FoundInode, reader.FoundInode]:
    """An image of one file with an attribute of 4 bytes, and its two inodes."""
    store = MemoryStore()
    inode = trees.file(store, b"x" * 5000)
    inode.xattrs = {b"user.a": b"123"}
    image, _, superblock = image_of(trees.directory({b"f": inode}), store)
    root, found = reader.inodes(image, superblock.root_nid)
    return image, superblock, root, found


def test_every_inode_is_found_once() -> None:
    store = MemoryStore()
    root = trees.sample(store, many=3000)
    image, placement, superblock = image_of(root, store)
    found = list(reader.inodes(image, superblock.root_nid))
    assert len({inode.nid for inode in found}) == len(found) == superblock.inodes
    modes = sorted(inode.mode for inode in {id(inode): inode for _, inode in walk(root)}.values())
    assert sorted(inode.mode for inode in found) == modes
    chunked = [inode for inode in found if inode.layout == erofs.CHUNK_BASED]
    assert sorted(inode.size_bytes for inode in chunked) == sorted(inode.size_bytes for inode in placement.runs)


def test_move_to_primary_changes_the_indexes_alone() -> None:
    store = MemoryStore()
    parts = {5 * BLOCK_BYTES: b"a" * 5000, 30 << 20: b"b" * 70_000}
    root = trees.directory({b"s": trees.sparse_file(store, parts, (40 << 20) + 5), b"f": trees.file(store, b"1")})
    image, placement, superblock = image_of(root, store)
    assert superblock.device is not None
    before = bytes(image)
    reader.move_to_primary(image, superblock.root_nid, superblock.device)
    starts = [start for run in placement.runs.values() for start in run.starts]
    moved = [start if start == erofs.HOLE else start + superblock.device.mapped_block for start in starts]
    for wanted in (moved[:1], moved[1:]):
        assert b"".join(struct.pack("<HHI", 0, 0, start) for start in wanted) in image
    assert sum(map(int.__ne__, before, image)) <= 8 * len(starts)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda image, root, file: struct.pack_into("<HHI", image, file, 0, 2, 0), id="device"),
        pytest.param(lambda image, root, file: struct.pack_into("<HHI", image, file, 0, 0, 0), id="primary"),
        pytest.param(lambda image, root, file: struct.pack_into("<HHI", image, file, 0, 1, 2), id="behind the end"),
    ],
)
def test_a_wrong_index_is_refused(change: Callable[[bytearray, int, int], None]) -> None:
    image, superblock, root, found = small()
    assert superblock.device is not None
    change(image, root.tail_offset, erofs.align_index(found.tail_offset))
    with pytest.raises(FormatError, match="below 2"):
        reader.move_to_primary(image, superblock.root_nid, superblock.device)


@pytest.mark.parametrize(
    ("offset", "raw", "reason"),
    [
        (0, b"\3\0", "data layout"),
        (0, b"\0\0", "a file in chunks"),
        (8, b"\xff" * 8, "chunk indexes inside"),
        (16, b"\2\0\0\0", "a file in chunks"),
        (16, b"\x61\0\0\0", "a file in chunks"),
    ],
)
def test_a_wrong_file_is_refused(offset: int, raw: bytes, reason: str) -> None:
    image, superblock, _, found = small()
    assert superblock.device is not None
    start = found.nid * erofs.NID_BYTES + offset
    image[start : start + len(raw)] = raw
    with pytest.raises(FormatError, match=reason):
        reader.move_to_primary(image, superblock.root_nid, superblock.device)


@pytest.mark.parametrize(
    ("offset", "raw", "reason"),
    [
        (0, b"\xff\xff\xff\xff\xff\xff\xff\xff", "an inode inside"),
        (0, b"\1\0\0\0\0\0\0\0", "an inode inside"),
        (8, b"\0\0", "names behind the entries"),
        (8, b"\x0d\0", "names behind the entries"),
        (8, b"\xfc\0", "names behind the entries"),
        (20, b"\0\0", "a name behind the last"),
        (20, b"\xff\xff", "a name behind the last"),
    ],
)
def test_a_wrong_directory_is_refused(offset: int, raw: bytes, reason: str) -> None:
    image, superblock, root, _ = small()
    start = root.tail_offset + offset
    # The first two entries are dots, whose numbers are not followed: make the first a name.
    image[start : start + len(raw)] = raw
    if offset == 0:
        names = root.tail_offset + struct.unpack_from("<H", image, root.tail_offset + 8)[0]
        image[names : names + 1] = b"z"
    with pytest.raises(FormatError, match=reason):
        list(reader.inodes(image, superblock.root_nid))


def test_damage_is_found_or_harmless() -> None:
    """Any changed byte: FormatError or an answer, nothing else, and no endless walk."""
    rng = random.Random(11)
    pristine, superblock, _, _ = small()
    assert superblock.device is not None
    for _ in range(3000):
        image = bytearray(pristine)
        image[rng.randrange(erofs.METADATA_OFFSET, erofs.METADATA_OFFSET + 300)] = rng.randrange(256)
        try:
            reader.move_to_primary(image, superblock.root_nid, superblock.device)
        except FormatError:
            continue
