"""The Cutter: where it cuts, what it packs, and that every file reads back."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from random import Random

import pytest

from imaged.conversion.cutter import CHUNK_MAX, PIECE_MAX, Cutter
from imaged.erofs.tree import Inode
from imaged.errors import FormatError
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.memory_store import MemoryStore


def data_of(seed: int, size: int) -> bytes:
    return Random(seed).randbytes(size)


def cut_file(cutter: Cutter, data: bytes, directory: bytes = b"d", step: int = 1 << 20) -> Inode:
    inode = Inode(mode=stat.S_IFREG | 0o644)
    cutter.begin(inode, directory)
    for at in range(0, len(data), step):
        cutter.write(data[at : at + step])
    cutter.end()
    return inode


def cut(store: MemoryStore, files: Iterable[tuple[bytes, bytes]]) -> list[Inode]:
    cutter = Cutter(store)
    inodes = [cut_file(cutter, data, directory) for directory, data in files]
    cutter.finish()
    return inodes


def content(store: MemoryStore, inode: Inode) -> bytes:
    parts = []
    for extent in inode.extents:
        size = extent.block_count * BLOCK_BYTES
        if extent.chunk is None:
            parts.append(bytes(size))
        else:
            start = extent.first_block * BLOCK_BYTES
            parts.append(store.get(extent.chunk)[start : start + size].ljust(size, b"\0"))
    return b"".join(parts)[: inode.size_bytes]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 131071, 131072, 131073, 1 << 20])
@pytest.mark.parametrize("step", [1000, 4096, 65536, 262144])
def test_sizes_and_write_steps(size: int, step: int) -> None:
    store = MemoryStore()
    cutter = Cutter(store)
    data = data_of(size, size)
    inode = cut_file(cutter, data, step=step)
    cutter.finish()
    assert inode.size_bytes == size
    assert sum(extent.block_count for extent in inode.extents) == -(-size // BLOCK_BYTES)
    assert content(store, inode) == data
    assert all(len(chunk) <= CHUNK_MAX for chunk in store.chunks.values())
    assert sum(map(len, store.chunks.values())) == size, "no padding after the last file of a chunk"


def test_a_large_file_is_cut_at_its_own_start() -> None:
    store = MemoryStore()
    data = data_of(1, 3 * CHUNK_MAX + 10)
    small, large = cut(store, [(b"d", b"small"), (b"d", data)])
    assert [store.get(extent.chunk) for extent in large.extents if extent.chunk] == [
        data[at : at + PIECE_MAX] for at in range(0, len(data), PIECE_MAX)
    ]
    assert small.extents[0].chunk not in [extent.chunk for extent in large.extents]


def test_a_file_that_is_just_small_enough_is_one_chunk() -> None:
    store = MemoryStore()
    data = data_of(1, CHUNK_MAX - 1)
    (inode,) = cut(store, [(b"d", data)])
    assert [store.get(extent.chunk) for extent in inode.extents if extent.chunk] == [data]


def test_small_files_share_a_chunk_at_block_boundaries() -> None:
    store = MemoryStore()
    inodes = cut(store, [(b"d", b"a" * 10), (b"d", b"b" * 5000), (b"d", b"c" * 4096), (b"d", b"d" * 7)])
    assert len(store.chunks) == 1
    assert [(inode.extents[0].first_block, inode.extents[0].block_count) for inode in inodes] == [
        (0, 1),
        (1, 2),
        (3, 1),
        (4, 1),
    ]
    assert (
        next(iter(store.chunks.values()))
        == b"".join((b"a" * 10).ljust(4096, b"\0") for _ in (0,))
        + (b"b" * 5000).ljust(8192, b"\0")
        + b"c" * 4096
        + b"d" * 7
    )


def test_extents_come_when_the_pack_is_cut() -> None:
    store = MemoryStore()
    cutter = Cutter(store)
    first = cut_file(cutter, b"x" * 60000)
    assert (first.size_bytes, first.extents) == (60000, [])
    second = cut_file(cutter, b"y" * 10000)
    assert first.extents == [Extent(15, next(iter(store.chunks)))]
    cutter.finish()
    assert content(store, second) == b"y" * 10000


def test_packs_are_cut_when_the_next_file_does_not_fit() -> None:
    store = MemoryStore()
    inodes = cut(store, [(b"d", data_of(number, 30000)) for number in range(5)])
    assert len(store.chunks) == 3
    assert [inode.extents[0].first_block for inode in inodes] == [0, 8, 0, 8, 0]


def test_directory_change_cuts_a_pack_that_has_the_minimum() -> None:
    store = MemoryStore()
    shared = [(b"usr/share", data_of(number, 8000)) for number in range(20)]
    one = cut(store, [(b"bin", data_of(99, 40000)), *shared])
    before = set(store.chunks)
    two = cut(store, [(b"sbin", data_of(98, 33000)), *shared])
    assert len(set(store.chunks) - before) == 1, "the equal directory made equal chunks"
    assert [inode.extents for inode in one[1:]] == [inode.extents for inode in two[1:]]


def test_many_directories_of_one_small_file_share_chunks() -> None:
    store = MemoryStore()
    cut(store, [(b"d%d" % number, data_of(number, 100)) for number in range(2000)])
    assert len(store.chunks) <= 2000 * 2 / 16 + 1


def test_zeros_are_never_stored() -> None:
    store = MemoryStore()
    tail = data_of(1, 100)
    small, large = cut(store, [(b"d", bytes(5000)), (b"d", bytes(2 * CHUNK_MAX) + tail + bytes(CHUNK_MAX))])
    assert small.extents == [Extent(2, None)]
    assert large.extents[0] == Extent(2 * CHUNK_MAX // BLOCK_BYTES, None)
    assert content(store, large) == bytes(2 * CHUNK_MAX) + tail + bytes(CHUNK_MAX)
    assert [chunk.strip(b"\0") for chunk in store.chunks.values()] == [tail]


@pytest.mark.parametrize("hole", [0, 1, 512, 4096, 65000, 65536, 70000, 200000, 1 << 20])
@pytest.mark.parametrize("head", [b"", b"x" * 700, b"x" * 65535, b"x" * 65536, b"x" * 100000])
def test_a_hole_is_as_if_zeros_were_written(hole: int, head: bytes) -> None:
    written, skipped = MemoryStore(), MemoryStore()
    (expected,) = cut(written, [(b"d", head + bytes(hole) + b"tail")])
    cutter = Cutter(skipped)
    inode = Inode(mode=stat.S_IFREG)
    cutter.begin(inode, b"d")
    cutter.write(head)
    cutter.hole(hole)
    cutter.write(b"tail")
    cutter.end()
    cutter.finish()
    assert (inode.extents, inode.size_bytes, skipped.chunks) == (expected.extents, expected.size_bytes, written.chunks)


def test_a_huge_hole_takes_no_time_and_one_extent() -> None:
    store = MemoryStore()
    cutter = Cutter(store)
    inode = Inode(mode=stat.S_IFREG)
    cutter.begin(inode, b"var/log")
    cutter.hole(150 << 30)
    cutter.hole(150 << 30)
    cutter.write(b"last")
    cutter.end()
    cutter.finish()
    assert inode.size_bytes == (300 << 30) + 4
    assert [extent.block_count for extent in inode.extents] == [(300 << 30) // BLOCK_BYTES, 1]


def test_a_reused_buffer_is_copied() -> None:
    store = MemoryStore()
    cutter = Cutter(store)
    inode = Inode(mode=stat.S_IFREG)
    buffer = bytearray(b"a" * 100)
    cutter.begin(inode, b"d")
    cutter.write(memoryview(buffer))
    buffer[:] = b"b" * 100
    cutter.write(b"")
    cutter.write(memoryview(buffer))
    cutter.end()
    cutter.finish()
    assert content(store, inode) == b"a" * 100 + b"b" * 100


def test_empty_writes_leave_nothing_behind() -> None:
    store = MemoryStore()
    cutter = Cutter(store)
    empty = Inode(mode=stat.S_IFREG)
    cutter.begin(empty, b"d")
    cutter.write(b"")
    cutter.end()
    cutter.finish()
    cutter.finish()
    assert (empty.size_bytes, empty.extents, store.chunks) == (0, [], {})


def test_memory_is_bounded_while_a_file_streams() -> None:
    store = MemoryStore()
    cutter = Cutter(store)
    inode = Inode(mode=stat.S_IFREG)
    cutter.begin(inode, b"d")
    for _ in range(1000):
        cutter.write(b"q" * 10000)
        assert sum(map(len, cutter._parts)) < CHUNK_MAX
    cutter.end()
    assert len(store.chunks) == 2, "equal pieces are one chunk"


def test_wrong_use_is_refused() -> None:
    cutter = Cutter(MemoryStore())
    cutter.begin(Inode(mode=stat.S_IFREG), b"")
    with pytest.raises(RuntimeError):
        cutter.begin(Inode(mode=stat.S_IFREG), b"")
    with pytest.raises(RuntimeError):
        cutter.finish()
    cutter.end()
    with pytest.raises(RuntimeError):
        cutter.end()
    with pytest.raises(FormatError, match="chunk size"):
        Cutter(MemoryStore(), chunk_bytes=5000)
    for piece_bytes in (0, 5000, CHUNK_MAX + BLOCK_BYTES):
        with pytest.raises(FormatError, match="size of a piece"):
            Cutter(MemoryStore(), piece_bytes=piece_bytes)


def test_an_insertion_into_a_large_directory_changes_few_chunks() -> None:
    files = [(b"info", data_of(number, 3000 + number)) for number in range(500)]
    store = MemoryStore()
    cut(store, files)
    before = set(store.chunks)
    cut(store, [*files[:100], (b"info", data_of(-1, 5000)), *files[100:]])
    assert len(set(store.chunks) - before) <= 8 < len(before) / 5


def test_the_cuts_never_change_unnoticed() -> None:
    """Other cuts read the same, but share nothing with the chunks that stores hold already."""
    store = MemoryStore()
    files = [(b"d%d" % (number // 40), data_of(number, number * 37)) for number in range(400)]
    cut(store, [*files, (b"lib", data_of(-1, 300_000))])
    chunks = ChunkId.of(b"".join(store.chunks))
    assert str(chunks) == "ce64909a239f7db787789c7b2ba892288674616be7ab72d1f3c91794952a4b43"
