"""Reads of a cold mount while servers, disks and daemons fail: the right bytes or an error, and never a hang."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from fuse import node, rundir
from fuse.imagemount import drop_leases, mount_image
from imaged import catalog
from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.fetching.room import floor_bytes
from imaged.ids import ChunkId
from tests.support.chunkserver import chunk_server
from tests.support.node import convert_tree, kill_daemon, node_directories, wait_for
from tests.support.proxy import Proxy, Spoil, half_then_silence, proxy, silence, status, wrong

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
FILES = 12
FILE_BYTES = 700_123
READ = """
import sys
for path in sys.argv[1:]:
    try:
        sys.stdout.buffer.write(open(path, "rb").read())
    except OSError as error:
        sys.exit(error.errno)
"""


@cache
def content(number: int) -> bytes:
    return random.Random(number).randbytes(FILE_BYTES)


def contents() -> bytes:
    return b"".join(content(number) for number in range(FILES))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for number in range(FILES):
        (root / f"file{number:02}").write_bytes(content(number))
    return root


@pytest.fixture
def store(tree: Path, tmp_path: Path) -> Path:
    """Of a server, with no profile in it."""
    convert_tree(tmp_path / "server", tree, "big:1")
    return tmp_path / "server"


@pytest.fixture
def front(store: Path) -> Iterator[Proxy]:
    with chunk_server(store) as server, proxy(server.url) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path, front: Proxy) -> Iterator[Config]:
    with node_directories(tmp_path / "worker", server=front.url) as made:
        yield made


def mount(config: Config) -> Path:
    return mount_image(config, node.ensure(config).open_image("big:1"))


def start_reading(mounted: Path) -> subprocess.Popen[bytes]:
    """All files, in a process of its own."""
    paths = [str(mounted / f"file{number:02}") for number in range(FILES)]
    return subprocess.Popen([sys.executable, "-c", READ, *paths], stdout=subprocess.PIPE)


def rest_of(reader: subprocess.Popen[bytes]) -> bytes:
    """What a reader of whom some was read gives until it ends; `communicate` does not know of what is buffered."""
    assert reader.stdout is not None
    with reader.stdout:
        rest = reader.stdout.read()
    reader.wait(60)
    return rest


def read_all(mounted: Path) -> bytes:
    """The bytes of all files. A hang is a failed test; an errno, too."""
    reader = start_reading(mounted)
    out, _ = reader.communicate(timeout=100)
    assert reader.returncode == 0, os.strerror(reader.returncode)
    return out


@pytest.mark.parametrize(
    "spoils",
    [
        [status(500)] * 3,
        [status(429, Retry_After="1")] * 2,
        [wrong] * 3,
        [half_then_silence] * 3,
        [silence] * 3,
        [status(500), half_then_silence, wrong, status(429, Retry_After="1"), silence],
    ],
    ids=["500", "429", "wrong bytes", "half, then silence", "silence", "all of them"],
)
def test_a_server_that_recovers_costs_time_only(config: Config, front: Proxy, spoils: list[Spoil]) -> None:
    mounted = mount(config)
    front.spoils = list(spoils)
    assert read_all(mounted) == contents()
    assert front.spoils == []
    assert not front.released.is_set()
    kill_daemon(config)
    assert check(config.store).errors == []


@pytest.mark.parametrize("spoil", [wrong, status(404), status(403)], ids=["wrong bytes", "404", "403"])
def test_what_no_server_gives_is_an_error_until_one_does(config: Config, front: Proxy, spoil: Spoil) -> None:
    mounted = mount(config)
    front.spoils = [spoil] * 10_000
    reader = start_reading(mounted)
    out, _ = reader.communicate(timeout=100)
    assert (reader.returncode, contents().startswith(out)) == (errno.EIO, True)
    front.spoils = []
    assert read_all(mounted) == contents()


def test_a_server_killed_and_started_again_in_the_middle_of_a_read(store: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(chunk_server(store))
        config = stack.enter_context(node_directories(tmp_path / "worker", server=first.url))
        mounted = mount(config)
        reader = start_reading(mounted)
        assert reader.stdout is not None
        out = reader.stdout.read(FILE_BYTES // 2)
        first.stop(signal.SIGKILL)
        stack.enter_context(chunk_server(store, port=first.port))
        assert (out + rest_of(reader) == contents(), reader.returncode) == (True, 0)


@pytest.mark.slow
def test_a_server_that_refuses_connections_for_ten_seconds(store: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(chunk_server(store))
        config = stack.enter_context(node_directories(tmp_path / "worker", server=first.url))
        mounted = mount(config)
        first.stop(signal.SIGKILL)
        reader = start_reading(mounted)
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(10)
        stack.enter_context(chunk_server(store, port=first.port))
        out, _ = reader.communicate(timeout=100)
        assert (reader.returncode, out == contents()) == (0, True)


def test_a_profile_that_names_what_does_not_exist(config: Config, front: Proxy, store: Path) -> None:
    """Nor is it in the image: it costs a request at most, and the reads are right."""
    with ChunkStore.open(store) as opened:
        record = catalog.find(opened, "big:1").record
        opened.profiles.merge(record.data, [ChunkId.of(b"%d" % number) for number in range(1000)])
    mounted = mount(config)
    assert read_all(mounted) == contents()
    (counters,) = node.Node(config).status()["images"].values()
    assert counters["fetched_bytes"] < 2 * len(contents())


@pytest.fixture
def small_home(tmp_path: Path) -> Iterator[Path]:
    """PVISOR_HOME with room for less than the image."""
    home = tmp_path / "worker/home"
    home.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(home)], check=True)
    yield home
    subprocess.run(["umount", "-l", str(home)], check=False, capture_output=True)


@pytest.mark.alone
def test_a_disk_that_is_full_costs_the_cache_only(small_home: Path, config: Config, front: Proxy) -> None:
    assert FILES * FILE_BYTES > 5 << 20
    mounted = mount(config)
    assert config.home == small_home
    assert read_all(mounted) == contents()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    assert read_all(mounted) == contents()
    assert "not cached" in rundir.log_path(config).read_text()


def test_caching_leaves_space_and_a_full_disk_stops_no_start(tmp_path: Path, front: Proxy) -> None:
    """Nothing that runs may fail because of copies; nor an image that is here because of what others wrote."""
    home = tmp_path / "tight/home"
    home.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(home)], check=True)
    try:
        with node_directories(tmp_path / "tight", server=front.url) as config:
            assert read_all(mount(config)) == contents()
            wait_for(lambda: "nearly full" in rundir.log_path(config).read_text())
            found = os.statvfs(home)
            assert found.f_bavail * found.f_frsize >= floor_bytes(20 << 20) - (1 << 20), "but for what a start needs"
            drop_leases()
            assert node.stop(config)
            with contextlib.suppress(OSError), (home / "others").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            mounted = mount(config)
            assert read_all(mounted) == contents()
            assert list(rundir.metadata_path(config).iterdir()) != []
            drop_leases()
            assert node.stop(config)
            assert list(rundir.metadata_path(config).iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(home)], check=False, capture_output=True)


def test_a_daemon_killed_while_reads_wait_for_the_server(config: Config, front: Proxy) -> None:
    """They fail; the next command brings the mount back, and then they are right."""
    mounted = mount(config)
    front.spoils = [silence] * 10_000
    readers = [start_reading(mounted) for _ in range(3)]
    assert front.silent.acquire(timeout=30)
    kill_daemon(config)
    for reader in readers:
        out, _ = reader.communicate(timeout=30)
        assert reader.returncode in (errno.EIO, errno.ENOTCONN)
        assert contents().startswith(out)
    front.spoils = []
    assert read_all(mount(config)) == contents()


def test_a_killed_daemon_in_the_middle_of_everything(config: Config, front: Proxy) -> None:
    """Whatever was just being fetched, stored or answered: what the next one has is right."""
    chosen = random.Random(7)
    for _ in range(4):
        mounted = mount(config)
        reader = start_reading(mounted)
        assert reader.stdout is not None
        out = reader.stdout.read(chosen.randrange(1, FILES * FILE_BYTES // 2))
        kill_daemon(config)
        assert contents().startswith(out + rest_of(reader))
        assert reader.returncode in (0, errno.EIO, errno.ENOTCONN)
    assert read_all(mount(config)) == contents()


def test_many_cold_readers_of_a_server_that_limps(config: Config, front: Proxy) -> None:
    """Each third answer is spoiled, in turn in every way."""
    ways: list[Spoil | None] = [status(500), None, None, half_then_silence, None, None, wrong, None, None]
    mounted = mount(config)
    turn = iter(range(1_000_000))

    def spoil_or_pass(path: str) -> Spoil | None:
        return ways[next(turn) % len(ways)] if "/v1/chunks" in path else None

    front.take = spoil_or_pass  # type: ignore[method-assign]
    readers = [start_reading(mounted) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rest_of, readers))
    assert [reader.returncode for reader in readers] == [0] * 4
    assert all(out == contents() for out in found)
