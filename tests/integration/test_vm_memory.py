"""Memory of a real process that maps a file privately, captured over its parent, generation after generation."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Self

import pytest

from fuse import node
from imaged.blockformat import Leaf, Root
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from tests.support.node import kill_daemon, node_directories
from vmm.errors import VmStateError
from vmm.memory import capture_memory
from vmm.pagemap import PAGE_BYTES, private_ranges

MIB = 1 << 20
_HOLDER = """
import json, mmap, os, sys
path, size = sys.argv[1], int(sys.argv[2])
with open(path, "rb") as stream:
    flags, access = mmap.MAP_PRIVATE | 0x4000, mmap.PROT_READ | mmap.PROT_WRITE  # MAP_NORESERVE
    memory = mmap.mmap(stream.fileno(), size, flags=flags, prot=access)
print("mapped", flush=True)
for line in sys.stdin:
    verb, *rest = json.loads(line)
    if verb == "write":
        at, text = rest
        memory[at:at + len(text) // 2] = bytes.fromhex(text)
    elif verb == "read":
        at, length = rest
        len(memory[at:at + length])
    elif verb == "swap":
        memory.madvise(21)  # MADV_PAGEOUT
    print("done", flush=True)
"""


class Holder:
    """A process that stands for QEMU: it has the file mapped, and writes where it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self._answer("mapped")

    @classmethod
    @contextmanager
    def of(cls, path: Path, size_bytes: int) -> Iterator[Self]:
        command = [sys.executable, "-c", _HOLDER, str(path), str(size_bytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def _answer(self, expected: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == expected

    def tell(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        self._answer("done")

    def write(self, at: int, data: bytes) -> None:
        self.tell("write", at, data.hex())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as store:
        yield store


def sparse(path: Path, size_bytes: int) -> Path:
    with open(path, "xb") as stream:
        stream.truncate(size_bytes)
    return path


def image_bytes(store: ChunkStore, image: ChunkId) -> bytes:
    found = BlockImage.open(store, image)
    return b"".join(found.read(at, 4 * MIB) for at in range(0, found.size_bytes, 4 * MIB))


def test_generations_of_memory(store: ChunkStore, tmp_path: Path) -> None:
    """Each process stands on the image captured from the one before, as a restored guest on the FUSE file."""
    size_bytes, random = 24 * MIB, Random(5)
    model = bytearray(size_bytes)
    parent: ChunkId | None = None
    path = sparse(tmp_path / "memory0", size_bytes)
    made: list[tuple[ChunkId, bytes]] = []
    for generation in range(1, 5):
        with Holder.of(path, size_bytes) as holder:
            holder.tell("read", 0, size_bytes)
            touched: set[int] = set()
            for _ in range(60):
                length = random.choice([1, 8, 4096, 5000, 70000])
                at = random.randrange(size_bytes - length)
                data = bytes(length) if random.random() < 0.2 else random.randbytes(length)
                holder.write(at, data)
                model[at : at + length] = data
                touched.update(range(at // PAGE_BYTES, (at + length - 1) // PAGE_BYTES + 1))
            captured = capture_memory(store, holder.pid, path, parent, size_bytes)
        assert captured.dirty_bytes == len(touched) * PAGE_BYTES
        assert image_bytes(store, captured.id) == model
        made.append((captured.id, bytes(model)))
        path = tmp_path / f"memory{generation}"
        path.write_bytes(model)
        parent = captured.id
    for image, expected in made:
        assert image_bytes(store, image) == expected


def test_generations_of_any_depth_stay_flat(store: ChunkStore, tmp_path: Path) -> None:
    """A guest writes much the same pages again and again: what its image is read by does not grow with every park."""
    size_bytes, random = 24 * MIB, Random(7)
    model = bytearray(size_bytes)
    model[MIB : 9 * MIB] = random.randbytes(8 * MIB)
    hot = sorted(random.sample(range(0, size_bytes, PAGE_BYTES), 100))
    parent: ChunkId | None = None
    path, leaf_bytes, chunk_counts = sparse(tmp_path / "memory0", size_bytes), [], []
    for generation in range(1, 8):
        with Holder.of(path, size_bytes) as holder:
            for at in range(MIB, 9 * MIB, MIB) if parent is None else hot:
                data = bytes(model[at : at + MIB]) if parent is None else random.randbytes(PAGE_BYTES)
                holder.write(at, data)
                model[at : at + len(data)] = data
            captured = capture_memory(store, holder.pid, path, parent, size_bytes)
        assert captured.dirty_bytes == (8 * MIB if parent is None else len(hot) * PAGE_BYTES)
        leaves = [leaf for leaf in Root.parse(store.get(captured.id)).leaves if leaf is not None]
        leaf_bytes.append(sum(len(store.get(leaf)) for leaf in leaves))
        store.flush()
        chunk_counts.append(store.df().chunks)
        path = tmp_path / f"memory{generation}"
        path.write_bytes(model)
        parent = captured.id
    assert parent is not None
    assert image_bytes(store, parent) == model
    assert leaf_bytes[2:] == [leaf_bytes[1]] * 5  # the first generation cuts the parent's runs, and none after it
    more = [after - before for before, after in pairwise(chunk_counts)]
    assert more == [more[0]] * 6


@pytest.mark.root
@pytest.mark.fuse
def test_generations_on_fuse_files(tmp_path: Path) -> None:
    """As it is with guests: each generation maps the FUSE file of the image captured from the one before."""
    size_bytes, random = 24 * MIB, Random(6)
    model = bytearray(size_bytes)
    with node_directories(tmp_path) as config, ChunkStore.open(config.store) as store:
        parent: ChunkId | None = None
        path = sparse(tmp_path / "memory0", size_bytes)
        for _ in range(3):
            with Holder.of(path, size_bytes) as holder:
                holder.tell("read", random.randrange(size_bytes // 2), size_bytes // 2)
                own = 0
                for at in random.sample(range(0, size_bytes, PAGE_BYTES), 50):
                    kind = random.randrange(3)
                    # New bytes, zeros, or what was there: the last makes the page the process's own all the same.
                    data = [random.randbytes(PAGE_BYTES), bytes(PAGE_BYTES), bytes(model[at : at + PAGE_BYTES])][kind]
                    holder.write(at, data)
                    model[at : at + PAGE_BYTES] = data
                    own += PAGE_BYTES
                captured = capture_memory(store, holder.pid, path, parent, size_bytes)
            assert captured.dirty_bytes == own
            assert image_bytes(store, captured.id) == model
            store.flush()
            node.ensure(config)
            path, parent = config.blocks / str(captured.id), captured.id
            assert path.read_bytes() == model
        with Holder.of(path, size_bytes) as holder:
            holder.write(5 * PAGE_BYTES, b"what a guest has of its own outlives the daemon")
            kill_daemon(config)
            captured = capture_memory(store, holder.pid, path, parent, size_bytes)
        assert captured.dirty_bytes == PAGE_BYTES
        assert image_bytes(store, captured.id)[5 * PAGE_BYTES :].startswith(b"what a guest has")


def test_a_process_that_wrote_nothing_gives_its_parent_again(store: ChunkStore, tmp_path: Path) -> None:
    path = sparse(tmp_path / "memory", 8 * MIB)
    with Holder.of(path, 8 * MIB) as holder:
        holder.write(MIB, b"x" * 10000)
        parent = capture_memory(store, holder.pid, path, None, 8 * MIB).id
    other = tmp_path / "restored"
    other.write_bytes(image_bytes(store, parent))
    with Holder.of(other, 8 * MIB) as holder:
        holder.tell("read", 0, 8 * MIB)
        captured = capture_memory(store, holder.pid, other, parent, 8 * MIB)
    assert (captured.id, captured.dirty_bytes) == (parent, 0)


def test_a_page_that_was_written_as_it_was_is_the_parents(store: ChunkStore, tmp_path: Path) -> None:
    whole = Random(8).randbytes(8 * MIB)
    path, other = sparse(tmp_path / "memory", 8 * MIB), tmp_path / "restored"
    other.write_bytes(whole)
    with Holder.of(path, 8 * MIB) as holder:
        holder.write(0, whole)
        parent = capture_memory(store, holder.pid, path, None, 8 * MIB).id
    with Holder.of(other, 8 * MIB) as holder:
        holder.write(MIB, whole[MIB : 2 * MIB])
        assert capture_memory(store, holder.pid, other, parent, 8 * MIB).id == parent
        holder.write(MIB + 5 * PAGE_BYTES, b"new")
        captured = capture_memory(store, holder.pid, other, parent, 8 * MIB)
    store.flush()
    new = Root.parse(store.get(captured.id))
    added = [leaf for leaf in new.leaves if leaf not in Root.parse(store.get(parent)).leaves]
    assert captured.dirty_bytes == MIB
    assert len(added) == 1 and added[0] is not None
    assert [extent.block_count for extent in Leaf.parse(store.get(added[0])).extents()].count(1) == 1
    expected = bytearray(whole)
    expected[MIB + 5 * PAGE_BYTES : MIB + 5 * PAGE_BYTES + 3] = b"new"
    assert image_bytes(store, captured.id) == expected


def test_two_captures_of_a_process_that_went_on(store: ChunkStore, tmp_path: Path) -> None:
    """A fork of a running VM: all that is its own is captured again, and what is equal is not stored again."""
    path = sparse(tmp_path / "memory", 8 * MIB)
    with Holder.of(path, 8 * MIB) as holder:
        holder.write(0, Random(1).randbytes(4 * MIB))
        first = capture_memory(store, holder.pid, path, None, 8 * MIB)
        store.flush()
        before = store.df().stored_bytes
        holder.write(MIB, b"y")
        second = capture_memory(store, holder.pid, path, None, 8 * MIB)
        store.flush()
    assert second.dirty_bytes == first.dirty_bytes == 4 * MIB
    assert image_bytes(store, second.id)[MIB : MIB + 1] == b"y"
    assert image_bytes(store, first.id) == Random(1).randbytes(4 * MIB) + bytes(4 * MIB)
    assert store.df().stored_bytes - before < 80 << 10


def test_a_large_memory_with_little_in_it(store: ChunkStore, tmp_path: Path) -> None:
    size_bytes = 64 << 30
    path = sparse(tmp_path / "memory", size_bytes)
    places = [0, 5 << 30, (5 << 30) + 3 * PAGE_BYTES, size_bytes - 1]
    with Holder.of(path, size_bytes) as holder:
        for place in places:
            holder.write(place, b"!")
        captured = capture_memory(store, holder.pid, path, None, size_bytes)
    assert captured.dirty_bytes == len(places) * PAGE_BYTES
    image = BlockImage.open(store, captured.id)
    assert [image.read(place, 2) for place in places] == [b"!\0", b"!\0", b"!\0", b"!"]
    assert len(image.leaf_ids()) == 3


@pytest.mark.skipif(len(Path("/proc/swaps").read_text().splitlines()) < 2, reason="this host has no swap")
def test_pages_in_swap_are_captured(store: ChunkStore, tmp_path: Path) -> None:
    path = sparse(tmp_path / "memory", 8 * MIB)
    with Holder.of(path, 8 * MIB) as holder:
        holder.write(MIB, Random(2).randbytes(MIB))
        holder.tell("swap")
        assert sum(one.length_bytes for one in private_ranges(holder.pid, path, 8 * MIB)) == MIB
        captured = capture_memory(store, holder.pid, path, None, 8 * MIB)
    assert image_bytes(store, captured.id) == bytes(MIB) + Random(2).randbytes(MIB) + bytes(6 * MIB)


def test_a_process_that_is_gone_is_an_error(store: ChunkStore, tmp_path: Path) -> None:
    path = sparse(tmp_path / "memory", MIB)
    with Holder.of(path, MIB) as holder:
        pid = holder.pid
    with pytest.raises(VmStateError, match="is gone"):
        capture_memory(store, pid, path, None, MIB)


def test_another_file_is_an_error(store: ChunkStore, tmp_path: Path) -> None:
    path, other = sparse(tmp_path / "memory", MIB), sparse(tmp_path / "other", MIB)
    with Holder.of(path, MIB) as holder, pytest.raises(VmStateError, match="does not map"):
        capture_memory(store, holder.pid, other, None, MIB)
