"""Memory of virtual machines as FUSE files, on the real kernel: mapped as QEMU maps it, shared, prefetched, checked."""

from __future__ import annotations

import errno
import mmap
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fuse import node, vmlease
from fuse.errors import NodeError
from fuse.opened import OpenSnapshot
from fuse.warm import warm
from imaged.blockbuilder import BlockImageBuilder
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.snapshot import STATE_LIMIT_BYTES
from imaged.snapshots import publish
from tests.support.node import node_directories, wait_for
from tests.support.parked import Parked, add_snapshot, damage, lose
from tests.support.synthetic import Synthetic, add_image

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
CELL = 64 << 10


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    with node_directories(tmp_path) as made:
        yield made


@pytest.fixture
def image(config: Config) -> Synthetic:
    with ChunkStore.open(config.store) as store:
        return add_image(store, "app:1")


@pytest.fixture
def parked(config: Config, image: Synthetic) -> Parked:
    with ChunkStore.open(config.store) as store:
        return add_snapshot(store, "web", image.id, disk=b"disk" * 5120)


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")


class Mapped:
    """A private mapping of a memory file, opened as QEMU opens it."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.bytes = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)

    def __enter__(self) -> mmap.mmap:
        return self.bytes

    def __exit__(self, *_: object) -> None:
        self.bytes.close()


# What is opened


def test_a_snapshot_is_opened_by_name_and_id_and_its_files_hold_it(config: Config, parked: Parked) -> None:
    for name in ("web", str(parked.id), str(parked.id)[:10]):
        opened = node.open_snapshot(config, name)
        assert opened.record == parked.record
        assert opened.id == str(parked.id)
        assert opened.memory_path.read_bytes() == parked.memory
        assert opened.state_path.read_bytes() == parked.state
        assert opened.disk_path is not None
        assert opened.disk_path.read_bytes() == b"disk" * 5120
        assert opened.image.metadata_path.stat().st_size == 300_000
    assert list(node.Node(config).status()["snapshots"]) == [str(parked.id)]
    assert not any(config.images.iterdir()), "nothing is mounted"


def test_what_is_not_there_is_said(config: Config, parked: Parked) -> None:
    with pytest.raises(NodeError, match="no snapshot nobody"):
        node.open_snapshot(config, "nobody")


@pytest.mark.parametrize("part", ["state", "memory", "disk"])
def test_a_missing_part_is_named_with_its_snapshot(config: Config, parked: Parked, part: str) -> None:
    lost = getattr(parked.record, part)
    with ChunkStore.open(config.store) as store:
        lose(store, lost)
    with pytest.raises(NodeError, match=f"snapshot web: chunk {lost}"):
        node.open_snapshot(config, "web")


def test_an_image_without_a_name_is_enough(config: Config, parked: Parked) -> None:
    with ChunkStore.open(config.store) as store:
        store.refs.delete("app:1")
    opened = node.open_snapshot(config, "web")
    assert opened.image.id == str(parked.record.image)
    assert opened.memory_path.read_bytes() == parked.memory


# Mapped as QEMU does


def test_private_mappings_of_many_processes_see_the_same_and_keep_their_own(config: Config, parked: Parked) -> None:
    path = node.open_snapshot(config, "web").memory_path
    with Mapped(path) as first, Mapped(path) as second:
        first[3 * CELL : 3 * CELL + 5] = b"first"
        second[3 * CELL : 3 * CELL + 5] = b"other"
        assert first[3 * CELL : 3 * CELL + 5] == b"first"
        assert second[3 * CELL + 5 :] == parked.memory[3 * CELL + 5 :]
        assert path.read_bytes() == parked.memory


@pytest.mark.alone
def test_a_memory_that_is_mapped_by_many_is_read_once(config: Config, parked: Parked) -> None:
    path = node.open_snapshot(config, "web").memory_path
    drop_caches()

    def touch(seed: int) -> bool:
        order = list(range(0, len(parked.memory), BLOCK_BYTES))
        random.Random(seed).shuffle(order)
        with Mapped(path) as memory:
            return all(memory[at : at + BLOCK_BYTES] == parked.memory[at : at + BLOCK_BYTES] for at in order)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(touch, range(8)))
    use = node.Node(config).status()["snapshots"][str(parked.id)]
    assert use["reads"] <= len(parked.memory) // BLOCK_BYTES


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_RDWR | os.O_APPEND])
def test_memory_is_not_opened_in_another_way(config: Config, parked: Parked, flags: int) -> None:
    path = node.open_snapshot(config, "web").memory_path
    with pytest.raises(OSError, match="Read-only") as raised:
        os.open(path, flags)
    assert raised.value.errno == errno.EROFS
    assert path.read_bytes() == parked.memory


def test_what_is_no_memory_is_not_opened_for_writing(config: Config, parked: Parked) -> None:
    opened = node.open_snapshot(config, "web")
    for path in (opened.state_path, opened.disk_path, opened.image.data_path):
        assert path is not None
        with pytest.raises(OSError, match="Read-only"):
            os.open(path, os.O_RDWR)


def test_nothing_that_is_tried_on_an_open_memory_changes_it(config: Config, parked: Parked) -> None:
    path = node.open_snapshot(config, "web").memory_path
    fd = os.open(path, os.O_RDWR)
    tries: list[Callable[[], object]] = [
        lambda: os.pwrite(fd, b"x" * 100, 3 * CELL),
        lambda: os.ftruncate(fd, 0),
        lambda: os.truncate(path, 0),
        lambda: os.posix_fallocate(fd, 0, 2 * len(parked.memory)),
        lambda: os.fchmod(fd, 0o777),
        lambda: os.chown(path, 1, 1),
        path.unlink,
        lambda: path.rename(path.with_name("other")),
        lambda: os.link(path, path.with_name("other")),
        lambda: path.with_name("other").mkdir(),
        lambda: path.with_name("other").symlink_to("x"),
        lambda: os.utime(path, (1, 1)),
        lambda: os.setxattr(path, "user.x", b"1"),
        lambda: subprocess.run(["fallocate", "-p", "-o", "0", "-l", "65536", path], check=True, capture_output=True),
    ]
    try:
        before = path.stat()
        for attempt in tries:
            with pytest.raises((OSError, subprocess.CalledProcessError)):
                attempt()
        assert path.stat() == before
        assert path.read_bytes() == parked.memory
    finally:
        os.close(fd)


def test_a_page_changed_through_a_shared_mapping_is_not_kept(config: Config, parked: Parked) -> None:
    """Only root can do that, and nothing of ours does; FUSE can not refuse it."""
    path = node.open_snapshot(config, "web").memory_path
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as shared:
            shared[3 * CELL : 3 * CELL + 5] = b"wrong"
            with pytest.raises(OSError, match=r"Read-only|Input/output"):
                shared.flush()
    finally:
        os.close(fd)
    wait_for(lambda: path.read_bytes() == parked.memory)


# What comes first


def test_the_first_machine_is_recorded_and_the_next_finds_its_memory_warm(config: Config, parked: Parked) -> None:
    opened = node.open_snapshot(config, "web")
    assert opened.working_set == ()
    node.check_snapshot(config, "web")
    with Mapped(opened.memory_path) as memory:
        for cell in (71, 3, 6, 7):
            at = cell * CELL + CELL // 2  # the kernel reads what is around
            assert memory[at : at + 10] == parked.memory[at : at + 10]
    assert node.stop(config)
    again = node.open_snapshot(config, "web")
    assert again.working_set == ((71 * CELL, CELL), (3 * CELL, CELL), (6 * CELL, 2 * CELL))
    node.check_snapshot(config, again.id)
    warm(again.memory_path, again.working_set)
    wait_for(lambda: reads(config, again) > 0)


def reads(config: Config, opened: OpenSnapshot) -> int:
    count = node.Node(config).status()["snapshots"][opened.id]["reads"]
    assert isinstance(count, int)
    return count


def test_a_child_begins_with_what_its_parent_touched_and_what_it_changed(
    config: Config, image: Synthetic, parked: Parked
) -> None:
    opened = node.open_snapshot(config, "web")
    with Mapped(opened.memory_path) as memory:
        assert memory[71 * CELL : 71 * CELL + 10] == parked.memory[71 * CELL : 71 * CELL + 10]
    changed = bytearray(parked.memory)
    changed[9 << 20 : (9 << 20) + BLOCK_BYTES] = b"\2" * BLOCK_BYTES
    with ChunkStore.open(config.store) as store:
        child = add_snapshot(store, "child", image.id, memory=bytes(changed), parent=parked, seed=2)
    again = node.open_snapshot(config, "child")
    assert (9 << 20, BLOCK_BYTES) in again.working_set
    assert any(offset <= 71 * CELL < offset + length for offset, length in again.working_set)
    assert again.memory_path.read_bytes() == child.memory
    node.check_snapshot(config, "child")


# What can not be had


@pytest.mark.parametrize("harm", [lose, damage])
def test_a_chunk_that_can_not_be_had_is_named_before_the_machine_goes_on(
    config: Config, parked: Parked, harm: Callable[[ChunkStore, ChunkId], None]
) -> None:
    with ChunkStore.open(config.store) as store:
        bad = BlockImage.open(store, parked.record.memory).way(71 * CELL, 1)[-1]
        harm(store, bad)
    opened = node.open_snapshot(config, "web")
    if harm is damage:  # it is there, and not known to be touched: who reads it finds out
        node.check_snapshot(config, "web")
        with pytest.raises(OSError, match="Input/output"):
            opened.memory_path.read_bytes()
    for _ in range(2):
        with pytest.raises(NodeError, match=f"snapshot web: chunk {bad}"):
            node.check_snapshot(config, "web")


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_an_image_of_another_size_than_the_record_says_is_not_opened(config: Config, parked: Parked, what: str) -> None:
    """QEMU would map a part of the memory, and notice nothing."""
    record = parked.record
    machine = replace(record.machine, memory_bytes=record.machine.memory_bytes - (1 << 20))
    changed = replace(record, machine=machine) if what == "memory" else replace(record, disk_bytes=24_576)
    with ChunkStore.open(config.store) as store:
        publish(store, "odd", changed)
    with pytest.raises(NodeError, match=f"snapshot odd: snapshot record, {what}: expected .* bytes, found an image"):
        node.open_snapshot(config, "odd")


def test_device_state_that_is_much_too_large_is_not_read(config: Config, parked: Parked) -> None:
    with ChunkStore.open(config.store) as store:
        builder = BlockImageBuilder(store)
        builder.append(Extent(STATE_LIMIT_BYTES // BLOCK_BYTES + 1, None))
        publish(store, "odd", replace(parked.record, state=builder.finish()))
    with pytest.raises(NodeError, match=f"at most {STATE_LIMIT_BYTES} bytes"):
        node.open_snapshot(config, "odd")


# Leases


def test_stop_refuses_while_a_machine_lives(config: Config, parked: Parked) -> None:
    lease = vmlease.take(config, "web-1")
    opened = node.open_snapshot(config, "web")
    assert node.Node(config).status()["vms"] == ["web-1"]
    with pytest.raises(NodeError, match="VM web-1") as raised:
        node.stop(config)
    assert "pvisor vm park web-1" in raised.value.hint
    assert opened.memory_path.read_bytes() == parked.memory
    os.close(lease)
    assert node.stop(config)
