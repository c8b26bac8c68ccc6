"""A full disk, a read-only one, and a directory that belongs to somebody else."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import pack_path
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import StoreFullError, StoreReadOnlyError
from imaged.ids import ChunkId
from tests.support.chunkserver import ask, chunk_server
from tests.support.store_images import build_image, name_image, noise

pytestmark = pytest.mark.root
NOBODY = 65534


@contextmanager
def file_system(directory: Path, kind: str, megabytes: int) -> Iterator[Path]:
    """A small file system of its own, mounted on a new directory below `directory`."""
    target = directory / "small"
    target.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(target)]
    else:
        image = directory / "image"
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(target)]
    subprocess.run(command, check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


def fill(path: Path) -> None:
    """Take all the space that is left."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up(tmp_path: Path, kind: str) -> None:
    with file_system(tmp_path, kind, 24) as directory:
        root = directory / "store"
        durable: list[ChunkId] = []
        store = ChunkStore.open(root)
        name_image(store, "kept:1", build_image(store, range(20)))
        with pytest.raises(StoreFullError) as caught:
            for seed in range(1000):
                chunk = store.put(noise(60_000, seed))
                if seed % 16 == 0:
                    store.flush()
                    durable.append(chunk)
        assert "pvisor store gc" in caught.value.hint
        for _ in range(3):
            with pytest.raises(StoreFullError):
                for seed in range(2000, 2300):
                    store.put(noise(60_000, seed))
        with pytest.raises(StoreFullError):
            store.flush()
        assert [ChunkId.of(store.get(chunk)) for chunk in durable] == durable
        with pytest.raises(StoreFullError):
            store.close()
        with ChunkStore.open(root, readonly=True) as store:
            for number, row in store.index.packs().items():
                assert pack_path(root, number).stat().st_size == row.committed_bytes
        assert check(root).errors == []
        with ChunkStore.open(root) as store:
            assert store.missing(durable) == []
        # A full disk is what collection is for.
        report = collect(root)
        assert report.removed_chunks >= len(durable)
        assert report.freed_bytes > 10 << 20
        with ChunkStore.open(root) as store:
            chunks = [store.put(noise(60_000, seed)) for seed in range(3000, 3100)]
            store.flush()
            assert [ChunkId.of(store.get(chunk)) for chunk in chunks] == chunks
        assert check(root).errors == []


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_space_that_comes_back(tmp_path: Path, kind: str) -> None:
    with file_system(tmp_path, kind, 24) as directory, ChunkStore.open(directory / "store") as store:
        first = [store.put(noise(5000, seed)) for seed in range(20)]
        store.flush()
        fill(directory / "ballast")
        later = []
        with pytest.raises(StoreFullError):
            for seed in range(20, 400):
                later += [store.put(noise(50_000, seed))]
            store.flush()
        record = ChunkId.of(b"record")
        with pytest.raises(StoreFullError):
            name_image(store, "new:1", build_image(store, range(3)))
        assert store.refs.items() == []
        # What was accepted is readable meanwhile, and durable once there is space again.
        assert [ChunkId.of(store.get(chunk)) for chunk in first + later] == first + later
        (directory / "ballast").unlink()
        store.flush()
        assert [store.index.find(chunk) is not None for chunk in later] == [True] * len(later)
        assert store.put(b"record") == record
        store.flush()
        assert check(directory / "store").errors == []


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_collecting_when_others_fill_the_disk(tmp_path: Path, kind: str) -> None:
    with file_system(tmp_path, kind, 24) as directory:
        root = directory / "store"
        with ChunkStore.open(root) as store:
            for seed in range(150):
                store.put(noise(50_000, seed))
                if seed % 10 == 0:
                    name_image(store, f"image:{seed}", build_image(store, range(seed, seed + 10)))
            garbage = [store.put(noise(50_000, seed)) for seed in range(3)]
        fill(directory / "ballast")
        with ChunkStore.open(root) as store:
            for seed in range(10, 150, 10):
                assert store.refs.delete(f"image:{seed}")
        report = collect(root)
        assert report.freed_bytes > 6 << 20
        report = check(root)
        assert (report.errors, report.images) == ([], 1)
        with ChunkStore.open(root) as store:
            assert store.missing(garbage) == garbage


def test_opening_on_a_full_disk(tmp_path: Path) -> None:
    with file_system(tmp_path, "tmpfs", 4) as directory:
        with ChunkStore.open(directory / "old") as store:
            chunk = store.put(b"x")
        fill(directory / "ballast")
        with pytest.raises(StoreFullError):
            ChunkStore.open(directory / "new")
        with ChunkStore.open(directory / "old") as store:
            assert store.get(chunk) == b"x"


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with file_system(tmp_path, "tmpfs", 8) as directory:
        root = directory / "store"
        with ChunkStore.open(root) as store:
            record = build_image(store, range(3))
            name_image(store, "kept:1", record)
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        with pytest.raises(StoreReadOnlyError, match="Read-only file system"):
            ChunkStore.open(root)
        with pytest.raises(StoreReadOnlyError):
            ChunkStore.open(directory / "new")
        with pytest.raises(StoreReadOnlyError):
            collect(root)
        with ChunkStore.open(root, readonly=True) as store:
            assert store.get(record.id) == record.to_bytes()
            assert [name for name, _ in store.refs.items()] == ["kept:1"]
        assert check(root).errors == []


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="pvisor-store-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_directory_of_another_user(open_directory: Path) -> None:
    root = open_directory / "store"
    with ChunkStore.open(root) as store:
        chunk = store.put(b"x")
    assert as_nobody(lambda: refused_as_a_whole(root)) == 0
    root.chmod(0o755)
    assert as_nobody(lambda: readable_alone(root, chunk)) == 0


def as_nobody(work: Callable[[], int]) -> int:
    """What it returns, in a process of that user; 1 when it raises."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused_as_a_whole(root: Path) -> int:
    """As it is made: images may be private."""
    for attempt in (lambda: ChunkStore.open(root, readonly=True), lambda: ChunkStore.open(root), lambda: check(root)):
        try:
            attempt()
        except StoreReadOnlyError as error:
            if "Permission denied" not in error.message:
                return 2
        else:
            return 3
    return 0


def readable_alone(root: Path, chunk: ChunkId) -> int:
    """As a group may be given it."""
    with ChunkStore.open(root, readonly=True) as store:
        if store.get(chunk) != b"x":
            return 2
    try:
        ChunkStore.open(root)
    except StoreReadOnlyError as error:
        return 0 if "Permission denied" in error.message else 4
    return 3


@pytest.mark.network
def test_a_full_server_can_be_asked_to_collect(tmp_path: Path) -> None:
    """By the page and by its API: the host of a server is not everybody's to log in to."""
    with file_system(tmp_path, "ext4", 48) as directory:
        with ChunkStore.open(directory / "store") as store:
            for number in range(4):
                name_image(store, f"big-{number}:1", build_image(store, range(number * 20, number * 20 + 20)))
        with chunk_server(directory / "store") as server:
            deadline = time.monotonic() + 30
            while not (directory / "store/reserve").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            fill(directory / "rest")
            with pytest.raises(OSError, match="No space left"):
                (directory / "more").write_bytes(bytes(4096))
            assert ask(server, "GET", "/")[0] == 200
            for number in range(4):
                assert ask(server, "DELETE", f"/v1/images/big-{number}:1")[0] == 200
            status, _, body = ask(server, "POST", "/v1/gc")
            assert status == 202, body
            path = f"/v1/jobs/{json.loads(body)['job']}"
            while (job := json.loads(ask(server, "GET", path)[2]))["state"] in ("queued", "running"):
                assert time.monotonic() < deadline + 60
                time.sleep(0.1)
            assert job["state"] == "done", job
            assert job["report"]["freed_bytes"] > 0
