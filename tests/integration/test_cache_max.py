"""A bounded cache under a real node daemon: what is read stays right, whatever goes meanwhile."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fuse import node
from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from tests.support.chunkserver import ChunkServer, chunk_server
from tests.support.command import Host, host
from tests.support.node import convert_tree, kill_daemon, wait_for

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
MIB = 1 << 20
FILES = 14
FILE_BYTES = 2_000_123
QUOTA = 16 * MIB
SLACK = 2 * MIB


@cache
def content(image: str, number: int) -> bytes:
    return random.Random(f"{image} {number}").randbytes(FILE_BYTES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkServer]:
    """With two images of 28 MB that do not compress."""
    root = tmp_path_factory.mktemp("server")
    for image in ("first", "second"):
        tree = root / image
        tree.mkdir()
        for number in range(FILES):
            (tree / f"file{number:02}").write_bytes(content(image, number))
        convert_tree(root / "store", tree, f"{image}:1")
    with chunk_server(root / "store") as running:
        yield running


@pytest.fixture
def worker(tmp_path: Path, server: ChunkServer) -> Iterator[Host]:
    with host(tmp_path / "worker", server.url) as made:
        made.extra["PVISOR_CACHE_MAX"] = "16M"
        yield made
        for directory in ("first", "second"):
            subprocess.run(["umount", "-l", str(made.root / directory)], check=False, capture_output=True)
        kill_daemon(config_of(made))  # not stopped: other processes of the host may have a copy of its mounts


def config_of(worker: Host) -> Config:
    return Config(home=worker.root / "home", run=worker.root / "run", server=worker.server)


def mount(worker: Host, image: str) -> Path:
    directory = worker.root / image
    directory.mkdir(parents=True)
    worker.run("mount", f"{image}:1", str(directory))
    return directory


def read(directory: Path, number: int) -> bytes:
    """Past the page cache."""
    fd = os.open(directory / f"file{number:02}", os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(fd, FILE_BYTES + 1, 0)
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_until_evicted(worker: Host, directory: Path, count: int, *, most_bytes: int) -> dict[str, Any]:
    """Every file again and again until so many chunks went, while the packs take no more; what the cache is then.

    What was read is kept behind its reader, and an eviction that was held back pauses for a second: so as many reads
    as fit into that second can pass without one.
    """

    def went() -> bool:
        for number in range(FILES):
            assert read(directory, number) == content("first", number)
            assert used(worker) <= most_bytes
        return int(status(worker)["cache"]["evicted_chunks"]) >= count

    wait_for(went)
    return status(worker)["cache"]  # type: ignore[no-any-return]


def used(worker: Host) -> int:
    return sum(path.stat().st_blocks * 512 for path in (worker.root / "home/store/packs").iterdir())


def status(worker: Host) -> dict[str, Any]:
    return node.Node(config_of(worker)).status()


def test_an_image_larger_than_the_bound_is_read_twice(worker: Host) -> None:
    directory = mount(worker, "first")
    found = read_until_evicted(worker, directory, 100, most_bytes=QUOTA + SLACK)
    assert found["max_bytes"] == QUOTA
    assert found["used_bytes"] <= QUOTA + SLACK
    assert "cache: " in worker.run("node", "status").stdout.decode()
    # What it takes is told without the daemon as well.
    assert worker.json("store", "df")["disk_bytes"] <= QUOTA + SLACK
    kill_daemon(config_of(worker))
    assert check(worker.root / "home/store").errors == []


def test_what_is_used_stays_and_what_only_this_host_has_too(worker: Host, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "file").write_bytes(content("own", 0))
    worker.run("convert", f"dir:{own}", "--name", "own:1", "--server", worker.server)
    local = Host(worker.root, "", worker.extra)
    first, second = mount(worker, "first"), mount(worker, "second")
    last = FILES - 1  # nothing lies behind it that would be read ahead
    for number in range(FILES):
        assert read(first, last) == content("first", last)  # used all the time
        assert read(second, number) == content("second", number)
    images = status(worker)["images"]
    fetched = next(image["fetched_bytes"] for image in images.values() if image["name"].startswith("first"))
    assert read(first, last) == content("first", last)
    images = status(worker)["images"]
    again = next(image["fetched_bytes"] for image in images.values() if image["name"].startswith("first"))
    assert again == fetched  # it was still here
    assert local.json("image", "verify", "own:1")["absent"] == 0
    assert used(worker) <= QUOTA + SLACK


def test_a_daemon_that_runs_takes_another_bound(worker: Host) -> None:
    del worker.extra["PVISOR_CACHE_MAX"]
    directory = mount(worker, "first")
    for number in range(FILES):
        assert read(directory, number) == content("first", number)
        # A disk that is behind its reader by some files would be spared the next ones.
        wait_for(lambda least=(number + 1) * FILE_BYTES: used(worker) >= least)  # type: ignore[misc]
    assert status(worker)["cache"]["max_bytes"] is None
    assert used(worker) > QUOTA + SLACK
    assert worker.json("node", "start", "--cache-max", "16M")["cache"]["max_bytes"] == QUOTA
    wait_for(lambda: used(worker) <= QUOTA)
    assert "such as 500M or 20G" in worker.run("node", "start", "--cache-max", "1M", code=2).stderr.decode()
    worker.extra["PVISOR_CACHE_MAX"] = "lots"
    assert "PVISOR_CACHE_MAX 'lots' is not a size" in worker.error("node", "start", code=2)
    del worker.extra["PVISOR_CACHE_MAX"]


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_smaller_than_the_bound(tmp_path: Path, server: ChunkServer, kind: str) -> None:
    home = tmp_path / "worker/home"
    home.mkdir(parents=True)
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=36m", "tmpfs", str(home)]
    else:
        image = tmp_path / "disk"
        with image.open("wb") as file:
            file.truncate(40 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        command = ["mount", "-o", "loop", str(image), str(home)]
    subprocess.run(command, check=True)
    try:
        with host(tmp_path / "worker", server.url) as worker:
            worker.extra["PVISOR_CACHE_MAX"] = "10G"
            directory = mount(worker, "first")
            try:
                read_until_evicted(worker, directory, 1, most_bytes=32 * MIB)
                free = os.statvfs(home)
                assert free.f_bavail * free.f_frsize > 8 * MIB
                # Somebody takes the rest of the disk: what does not fit is read without being kept.
                with (home / "ballast").open("wb", buffering=0) as file:
                    try:
                        while file.write(bytes(4096)):
                            pass
                    except OSError:
                        pass
                for number in range(FILES):
                    assert read(directory, number) == content("first", number)
                (home / "ballast").unlink()
                with ChunkStore.open(home / "store") as store:
                    store.put(b"there is room again")
            finally:
                subprocess.run(["umount", "-l", str(directory)], check=False)
            kill_daemon(config_of(worker))
            assert check(home / "store").errors == []
    finally:
        subprocess.run(["umount", "-l", str(home)], check=False)
