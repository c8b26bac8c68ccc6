from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from imaged.blockbuilder import BlockImageBuilder
from imaged.blockimage import BlockImage
from imaged.erofs import layout, writer
from imaged.erofs.format import HOLE
from imaged.erofs.tree import Inode
from imaged.errors import FormatError, LayerError, UnsupportedImageError
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support import trees
from tests.support.memory_store import MemoryStore

PINNED = "5212a0fd58b4454696f0d86a6b88ae3954aeaa2e0615c97d3c5e1ea8089083d6"


def place(store: MemoryStore, root: Inode, order: Iterable[Inode] = ()) -> tuple[layout.Placement, BlockImage]:
    builder = BlockImageBuilder(store)
    placement = layout.place(root, builder, order)
    return placement, BlockImage.open(store, builder.finish())


def packed(store: MemoryStore, sizes: list[int], seed: int = 1) -> list[Inode]:
    """Small files that share one chunk, each at a block boundary."""
    chunk = store.put(random.Random(seed).randbytes(sum(sizes) * BLOCK_BYTES))
    files = []
    first = 0
    for size in sizes:
        inode = trees.file(store, b"")
        inode.size_bytes = size * BLOCK_BYTES
        inode.extents = [Extent(size, chunk, first)]
        files.append(inode)
        first += size
    return files


def start_of(placement: layout.Placement, inode: Inode) -> int:
    """The first block of a file in one piece."""
    (start,) = placement.runs[inode].starts
    return start


def bytes_of(placement: layout.Placement, image: BlockImage, inode: Inode) -> bytes:
    """The file as EROFS would read it from the device."""
    run = placement.runs[inode]
    chunk_bytes = BLOCK_BYTES << run.chunk_bits
    parts = []
    for index, start in enumerate(run.starts):
        length = min(chunk_bytes, inode.size_bytes - index * chunk_bytes)
        parts.append(bytes(length) if start == HOLE else image.read(start * BLOCK_BYTES, length))
    return b"".join(parts)


def test_every_file_is_one_run_with_its_bytes() -> None:
    store, rng = MemoryStore(), random.Random(3)
    contents = {b"%d" % size: rng.randbytes(size) for size in (1, 4095, 4096, 4097, 65536, 300_000)}
    contents[b"holes"] = rng.randbytes(65536) + bytes(131072) + rng.randbytes(100)
    root = trees.directory({name: trees.file(store, data) for name, data in contents.items()})
    placement, image = place(store, root)
    assert all(len(run.starts) == 1 for run in placement.runs.values())
    for name, data in contents.items():
        assert bytes_of(placement, image, root.children[name]) == data
    assert image.size_bytes == placement.data_blocks * BLOCK_BYTES


def test_empty_files_have_no_place_and_the_device_is_never_empty() -> None:
    store = MemoryStore()
    placement, image = place(store, trees.directory({b"empty": trees.file(store, b"")}))
    assert not placement.runs
    assert (placement.data_blocks, image.size_bytes) == (1, BLOCK_BYTES)


@pytest.mark.parametrize(("blocks", "bits"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (4096, 12), (4097, 13)])
def test_one_chunk_covers_a_file(blocks: int, bits: int) -> None:
    store = MemoryStore()
    inode = trees.file(store, b"x" * (blocks * BLOCK_BYTES))
    placement, _ = place(store, trees.directory({b"f": inode}))
    assert placement.runs[inode] == layout.Run(bits, (0,))


def test_equal_files_share_a_run() -> None:
    store = MemoryStore()
    first, second = trees.file(store, b"same"), trees.file(store, b"same")
    placement, _ = place(store, trees.directory({b"a": first, b"b": second, b"c": first}))
    assert placement.runs[first] == placement.runs[second]
    assert placement.data_blocks == 1


def test_files_of_a_packed_chunk_stay_together() -> None:
    store = MemoryStore()
    small = packed(store, [1, 2, 3, 1, 4])
    names = [b"z", b"m", b"a", b"q", b"c"]
    root = trees.directory({name: trees.directory({name: inode}) for name, inode in zip(names, small, strict=True)})
    root.children[b"b"] = trees.file(store, b"between")
    placement, image = place(store, root)
    assert [start_of(placement, inode) for inode in small] == [0, 1, 3, 6, 7]
    assert [piece.length for piece in image.pieces(0, 11 * BLOCK_BYTES)] == [11 * BLOCK_BYTES]


def test_a_large_hole_takes_no_room() -> None:
    store = MemoryStore()
    inode = trees.sparse_file(store, {0: b"a" * 5000, 100 << 30: b"b" * 70_000}, (300 << 30) + 5)
    placement, _ = place(store, trees.directory({b"lastlog": inode}))
    run = placement.runs[inode]
    assert len(run.starts) <= layout.CHUNK_COUNT_TARGET
    assert sum(start != HOLE for start in run.starts) == 2
    assert placement.data_blocks <= 2 << run.chunk_bits


def test_sparse_bytes() -> None:
    store = MemoryStore()
    inode = trees.sparse_file(store, {BLOCK_BYTES: b"a" * 5000, 24 << 20: b"b" * 70_000}, (48 << 20) + 5)
    placement, image = place(store, trees.directory({b"f": inode}))
    assert len(placement.runs[inode].starts) > 1
    assert bytes_of(placement, image, inode) == trees.content(store, inode)


def test_a_file_that_is_a_hole_is_all_holes() -> None:
    store = MemoryStore()
    inode = trees.sparse_file(store, {}, 1 << 40)
    placement, _ = place(store, trees.directory({b"f": inode}))
    assert set(placement.runs[inode].starts) == {HOLE}


def test_small_holes_stay_in_the_run() -> None:
    store = MemoryStore()
    inode = trees.sparse_file(store, {0: b"a"}, 15 << 20)
    placement, _ = place(store, trees.directory({b"f": inode}))
    assert placement.runs[inode] == layout.Run(12, (0,))


def test_order_is_the_order_on_the_device() -> None:
    store = MemoryStore()
    files = {name: trees.file(store, name) for name in (b"a", b"b", b"c")}
    order = [files[b"c"], trees.directory(), files[b"a"]]
    placement, _ = place(store, trees.directory(files), order)
    assert [start_of(placement, files[name]) for name in (b"c", b"a", b"b")] == [0, 1, 2]


def test_images_with_the_same_lower_layers_share_leaves() -> None:
    """Even when the upper layer replaces a file and adds one that sorts first."""
    store, rng = MemoryStore(), random.Random(5)
    lower = {b"f%03d" % number: trees.file(store, rng.randbytes(1 << 19)) for number in range(200)}
    _, base = place(store, trees.directory(dict(lower)), lower.values())
    added, replaced = trees.file(store, b"added"), trees.file(store, rng.randbytes(1 << 20))
    upper_names = {**lower, b"a": added, b"f090": replaced}
    placement, upper = place(store, trees.directory(upper_names), [*lower.values(), added, replaced])
    assert len(set(base.leaf_ids()) & set(upper.leaf_ids())) >= len(base.leaf_ids()) - 2
    assert lower[b"f090"] not in placement.runs
    gone = next(iter(lower[b"f090"].extents)).chunk
    assert gone not in set(upper.chunk_ids())


def test_a_dead_file_whose_bytes_live_on_keeps_its_place() -> None:
    store = MemoryStore()
    dead, alive = trees.file(store, b"same"), trees.file(store, b"same")
    placement, image = place(store, trees.directory({b"x": alive}), [dead, alive])
    assert placement.runs == {alive: layout.Run(0, (0,))}
    assert image.read(0, 4) == b"same"


def test_warnings_name_what_is_lost() -> None:
    store = MemoryStore()
    inode = trees.file(store, b"x")
    inode.xattrs = {b"com.apple.x": b"", b"user.kept": b"", b"user.big": bytes(65_536)}
    placement, _ = place(store, trees.directory({b"a\xff": inode, b"b": inode}))
    assert len(placement.warnings) == 2
    assert all(r"a\\xff" in warning for warning in placement.warnings)
    assert "com.apple.x" in placement.warnings[0]
    assert "65536" in placement.warnings[1]


@pytest.mark.parametrize(
    "change",
    [
        {"major": 4096},
        {"minor": 1 << 20},
        {"major": -1},
        {"uid": 1 << 32},
        {"gid": -1},
        {"mtime_ns": (1 << 63) * 10**9},
        {"mtime_ns": -(1 << 63) * 10**9 - 1},
        {"size_bytes": 1 << 63},
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, int]) -> None:
    inode = trees.file(MemoryStore(), b"")
    for name, value in change.items():
        setattr(inode, name, value)
    with pytest.raises(LayerError, match="out of range") as caught:
        place(MemoryStore(), trees.directory({b"dir": trees.directory({b"bad": inode})}))
    assert "dir/bad" in caught.value.message


def test_extents_must_cover_the_file() -> None:
    store = MemoryStore()
    inode = trees.file(store, b"x" * 5000)
    inode.size_bytes = 9000
    with pytest.raises(FormatError, match="3 blocks"):
        place(store, trees.directory({b"f": inode}))


def test_metadata_is_deterministic() -> None:
    images = []
    for reverse in (False, True):
        store = MemoryStore()
        root = trees.sample(store, many=300)
        root.children = dict(sorted(root.children.items(), reverse=reverse))
        placement, _ = place(store, root)
        images.append(writer.metadata_image(root, placement))
    assert images[0] == images[1]
    assert len(images[0]) % BLOCK_BYTES == 0


def test_metadata_bytes_are_pinned() -> None:
    """A change of the layout must be meant: it gives every image a new id."""
    store = MemoryStore()
    names = {b"etc": trees.directory({b"passwd": trees.file(store, b"root:x:0:0::/:/bin/sh\n")})}
    names[b"bin"] = trees.symlink(b"usr/bin")
    root = trees.directory(names)
    root.children[b"etc"].children[b"passwd"].xattrs = {b"user.a": b"1"}
    placement, _ = place(store, root)
    assert str(ChunkId.of(writer.metadata_image(root, placement))) == PINNED


def test_content_changes_the_uuid() -> None:
    """Two trees that differ in file bytes alone are different file systems."""
    store = MemoryStore()
    uuids = []
    for data in (b"1", b"2"):
        root = trees.directory({b"f": trees.file(store, data)})
        placement, _ = place(store, root)
        uuids.append(writer.metadata_image(root, placement)[1024 + 48 : 1024 + 64])
    assert uuids[0] != uuids[1]


def test_too_many_blocks_are_refused() -> None:
    root = trees.directory()
    placement = layout.Placement({}, (1 << 32) - 1, b"", ())
    with pytest.raises(UnsupportedImageError, match="4294967295"):
        writer.metadata_image(root, placement)
