"""The node daemon on the real kernel: mounts, crashes of every part, and what comes back after them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fuse import linux, mounts, node, rundir
from fuse.errors import MountError, NodeError
from fuse.imagemount import is_mount_point, mount_image
from fuse.mountinfo import mount_points
from imaged.config import Config
from imaged.errors import NotFoundError, PvisorError
from tests.support.chunkserver import chunk_server
from tests.support.node import convert_tree, forget_profiles, kill_daemon, node_directories, wait_for

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
FILES = 40
FILE_BYTES = 200_123
CHUNKS = FILES * FILE_BYTES // (32 << 10)


@cache
def content(number: int) -> bytes:
    """Different for each file, and not compressible."""
    return random.Random(number).randbytes(FILE_BYTES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    (root / "sub").mkdir()
    for number in range(FILES):
        (root / "sub" / f"file{number:02}").write_bytes(content(number))
    (root / "empty").write_bytes(b"")
    (root / "link").symlink_to("sub/file01")
    (root / "small").write_bytes(b"a small file\n")
    return root


@pytest.fixture(scope="module")
def server_store(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("server") / "store"
    convert_tree(store, tree, "big:1")
    other = tmp_path_factory.mktemp("other")
    (other / "one").write_bytes(b"other\n")
    convert_tree(store, other, "other:1")
    return store


@pytest.fixture
def server(server_store: Path) -> Iterator[str]:
    forget_profiles(server_store)
    with chunk_server(server_store) as running:
        yield running.url


@pytest.fixture
def config(tmp_path: Path, server: str) -> Iterator[Config]:
    """With a server that has the images and nothing here."""
    with node_directories(tmp_path, server=server) as made:
        yield made


@pytest.fixture
def local(tmp_path: Path, tree: Path) -> Iterator[Config]:
    """Without a server; the image is in the local store."""
    with node_directories(tmp_path) as made:
        convert_tree(made.store, tree, "big:1")
        yield made


def mount(config: Config, name: str = "big:1") -> Path:
    return mount_image(config, node.ensure(config).open_image(name))


def below(config: Config) -> list[str]:
    return [str(found.path) for found in mount_points() if found.path.is_relative_to(config.run.parent)]


def assert_equal(mounted: Path, tree: Path) -> None:
    names = sorted(path.relative_to(tree) for path in tree.rglob("*"))
    assert sorted(path.relative_to(mounted) for path in mounted.rglob("*")) == names
    for name in names:
        if (tree / name).is_file():
            assert (mounted / name).read_bytes() == (tree / name).read_bytes(), name


def read_error(path: Path) -> int | None:
    """The errno that reading a file gives, in a process of its own so that a hang fails the test."""
    code = "import sys\ntry: open(sys.argv[1], 'rb').read()\nexcept OSError as e: sys.exit(e.errno)"
    return subprocess.run([sys.executable, "-c", code, path], timeout=60).returncode or None


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    held: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (listener, *held):
            connection.close()


def test_a_server_that_hangs_holds_up_neither_local_images_nor_the_status(local: Config) -> None:
    daemon = node.ensure(local)
    failures: list[str] = []

    def hang(number: int, url: str) -> None:
        with pytest.raises(NodeError) as caught:
            daemon.open_image(f"other{number}:1", server=url)
        failures.append(caught.value.message)

    with silent_server() as url:
        threads = [threading.Thread(target=hang, args=(number, url)) for number in range(40)]
        for thread in threads:
            thread.start()
        answered = 0
        while answered < 20 and not failures:  # until the first of them gives up, after some seconds
            assert daemon.status()["images"].keys() <= {daemon.open_image("big:1").id}
            answered += not failures
        assert answered > 0
    for thread in threads:
        thread.join(60)
    assert len(failures) == 40


def forget_pages(path: Path) -> None:
    """The kernel's of this file only: `drop_caches` takes those that tests of other processes count on."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


@pytest.mark.parametrize("way", ["", "direct", "file", "loop"])
def test_a_lazy_mount_holds_the_tree(config: Config, tree: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVISOR_EROFS", way)
    image = node.ensure(config).open_image("big:1")
    mounted = mount_image(config, image)
    before = node.Node(config).status()["images"][image.id]
    assert (mounted / "small").read_bytes() == b"a small file\n"
    after_one = node.Node(config).status()["images"][image.id]
    # The leaf and the file. On a host so slow that its own server seems far, some of what lies around them as well.
    assert 0 < after_one["fetched_chunks"] - before["fetched_chunks"] < CHUNKS // 8
    assert_equal(mounted, tree)
    counters = node.Node(config).status()["images"][image.id]
    assert counters["fetched_bytes"] > after_one["fetched_bytes"]
    assert counters["reads"] > after_one["reads"]
    assert counters["requests"] > 0
    assert mount_image(config, image) == mounted
    assert len([path for path in below(config) if path == str(mounted)]) == 1
    assert node.stop(config)
    assert below(config) == []
    assert node.connect(config) is None
    if way == "loop":
        assert str(config.run) not in subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("way", ["direct", "file", "loop"])
def test_the_kernel_merges_reads_of_a_file(local: Config, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so only if the inode names the data device; else it asks for each of the 49 pages."""
    monkeypatch.setenv("PVISOR_EROFS", way)
    image = node.ensure(local).open_image("big:1")
    mounted = mount_image(local, image)
    before = node.Node(local).status()["images"][image.id]["reads"]
    assert (mounted / "sub/file05").read_bytes() == content(5)
    assert node.Node(local).status()["images"][image.id]["reads"] - before <= 12


def test_an_unknown_way_to_mount_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVISOR_EROFS", "magic")
    with pytest.raises(MountError, match="PVISOR_EROFS=magic"):
        mount(config)


def test_paths_with_commas_and_spaces(tmp_path: Path, tree: Path) -> None:
    directory = tmp_path / "a, b c\n"
    directory.mkdir()
    with node_directories(directory) as config:
        convert_tree(config.store, tree, "big:1")
        assert (mount(config) / "small").read_bytes() == b"a small file\n"
        assert node.stop(config)
        assert below(config) == []


def test_many_processes_start_one_daemon_and_make_one_mount(config: Config) -> None:
    code = (
        "import sys; from pathlib import Path; from imaged.config import Config; from fuse import node\n"
        "from fuse.imagemount import mount_image\n"
        "c = Config(home=Path(sys.argv[1]), run=Path(sys.argv[2]), server=sys.argv[3])\n"
        "m = mount_image(c, node.ensure(c).open_image('big:1'))\n"
        "print(len((m / 'sub/file07').read_bytes()), node.Node(c).status()['pid'])"
    )
    command = [sys.executable, "-c", code, str(config.home), str(config.run), str(config.server)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    outputs = {process.communicate(timeout=60)[0] for process in running}
    assert len(outputs) == 1
    assert outputs.pop().split()[0] == str(len(content(7)))
    assert len(below(config)) == 2


def test_a_short_name_and_an_id_open_the_same_image(config: Config) -> None:
    running = node.ensure(config)
    image = running.open_image("big:1")
    assert running.open_image(image.id).id == image.id
    with pytest.raises(NodeError, match="nothing"):
        running.open_image("nothing:1")


def test_without_a_server_an_unknown_name_says_what_to_do(local: Config) -> None:
    with pytest.raises(NodeError) as caught:
        node.ensure(local).open_image("nothing:1")
    assert "PVISOR_SERVER" in caught.value.hint


def test_a_killed_daemon_fails_reads_and_the_next_command_recovers(config: Config, tree: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    mounts.mount_user(config, node.ensure(config).open_image("big:1"), directory)
    mounted = directory
    assert (mounted / "sub/file00").read_bytes() == content(0)
    kill_daemon(config)
    assert (mounted / "sub/file00").read_bytes() == content(0), "cached pages stay readable"
    assert read_error(mounted / "sub/file30") in (errno.EIO, errno.ENOTCONN)
    recovered = node.ensure(config)
    assert_equal(directory, tree)
    assert_equal(mount_image(config, recovered.open_image("big:1")), tree)
    mounts.umount_user(config, directory)
    assert list(directory.iterdir()) == []


def test_recovery_leaves_alone_what_the_user_unmounted(local: Config, tmp_path: Path) -> None:
    image = node.ensure(local).open_image("big:1")
    left, kept = tmp_path / "left", tmp_path / "kept"
    for directory in (left, kept):
        directory.mkdir()
        mounts.mount_user(local, image, directory)
    subprocess.run(["umount", left], check=True)
    kill_daemon(local)
    node.ensure(local)
    assert not is_mount_point(left)
    assert (kept / "small").read_bytes() == b"a small file\n"
    assert [entry.directory for entry in mounts.user_mounts(local)] == [str(kept)]


def test_a_daemon_that_was_terminated_has_its_directories_back_later(local: Config, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    mounts.mount_user(local, node.ensure(local).open_image("big:1"), directory)
    os.kill(node.Node(local).status()["pid"], signal.SIGTERM)
    wait_for(lambda: rundir.daemon_pid(local) is None)
    assert not is_mount_point(directory)
    node.ensure(local)
    assert (directory / "small").read_bytes() == b"a small file\n"


@pytest.mark.parametrize("covered", ["mnt", "."])
def test_a_mount_over_a_directory_is_not_ours_to_take(local: Config, tmp_path: Path, covered: str) -> None:
    directory = tmp_path / "user" / "mnt"
    directory.mkdir(parents=True)
    image = node.ensure(local).open_image("big:1")
    mounts.mount_user(local, image, directory)
    above = (tmp_path / "user" / covered).resolve()
    linux.mount("tmpfs", above, "tmpfs")
    (above / "users").touch()
    if covered == ".":
        directory.mkdir()
    with pytest.raises(MountError, match=f"hidden by tmpfs on {above}"):
        mounts.umount_user(local, directory)
    with pytest.raises(MountError, match=f"hidden by tmpfs on {above}"):
        mounts.mount_user(local, image, directory)
    with pytest.raises(NodeError, match=f"hidden by tmpfs on {above}"):
        node.stop(local)
    kill_daemon(local)
    node.ensure(local)
    assert (above / "users").exists()
    linux.umount(above)
    assert is_mount_point(directory)
    mounts.umount_user(local, directory)
    assert not is_mount_point(directory)
    assert node.stop(local)


def test_metadata_files_go_with_the_last_daemon(local: Config, tmp_path: Path) -> None:
    other = Config(home=local.home, run=tmp_path / "other")
    mounted = mount(local)
    files = list(local.metadata.iterdir())
    assert len(files) == 1
    try:
        node.ensure(other)
        assert node.stop(other)
    finally:
        kill_daemon(other)
    assert list(local.metadata.iterdir()) == files
    kill_daemon(local)
    (local.metadata / "left.erofs").touch()
    assert (mount(local) / "small").exists()
    assert list(local.metadata.iterdir()) == files
    assert (mounted / "small").exists()
    assert node.stop(local)
    assert list(local.metadata.iterdir()) == []


def test_an_open_file_of_a_dead_daemon_does_not_hang_the_next_command(config: Config) -> None:
    mounted = mount(config)
    with (mounted / "sub/file03").open("rb") as file:
        file.read(10)
        kill_daemon(config)
        assert (mount(config) / "sub/file03").read_bytes() == content(3)
        assert file.read(10)


def test_terminated_it_takes_its_mounts_along(config: Config) -> None:
    mount(config)
    pid = node.Node(config).status()["pid"]
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: rundir.daemon_pid(config) is None)
    assert below(config) == []
    assert node.connect(config) is None


@pytest.mark.slow
def test_a_server_that_is_gone_fails_only_what_is_not_here(tmp_path: Path, server_store: Path) -> None:
    forget_profiles(server_store)
    with chunk_server(server_store) as first:
        port = first.port
        with node_directories(tmp_path, server=first.url) as config:
            mounted = mount(config)
            assert (mounted / "sub/file00").read_bytes() == content(0)
            first.stop()
            forget_pages(mounted / "sub/file00")
            assert (mounted / "sub/file00").read_bytes() == content(0), "what was fetched is in the store"
            assert read_error(mounted / "sub/file20") == errno.EIO
            assert "chunk " in rundir.log_path(config).read_text()
            kill_daemon(config)
            mounted = mount(config)
            assert (mounted / "sub/file00").read_bytes() == content(0), "it starts without its server"
            with chunk_server(server_store, port=port):
                wait_for(lambda: read_error(mounted / "sub/file20") is None)
                assert (mounted / "sub/file20").read_bytes() == content(20)


@pytest.mark.alone
def test_a_flipped_bit_in_the_cache_is_fetched_again(config: Config, tree: Path) -> None:
    mounted = mount(config)
    assert_equal(mounted, tree)
    assert node.stop(config)
    for pack in (config.store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        for position in range(5000, len(data), 5000):
            data[position] ^= 1
        pack.write_bytes(data)
    drop_caches()
    mounted = mount(config)
    assert_equal(mounted, tree)
    assert next(iter(node.Node(config).status()["images"].values()))["fetched_chunks"] > 0


def test_a_flipped_bit_without_a_server_is_an_error_and_never_wrong_bytes(local: Config) -> None:
    mounted = mount(local)
    for pack in (local.store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        for position in range(200, len(data), 100):
            data[position] ^= 1
        pack.write_bytes(data)
    for number in range(FILES):
        assert read_error(mounted / f"sub/file{number:02}") in (None, errno.EIO)
    results = [read_error(mounted / f"sub/file{number:02}") for number in range(FILES)]
    assert errno.EIO in results


def test_stop_names_what_is_in_use_and_goes_on(local: Config) -> None:
    image = node.ensure(local).open_image("big:1")
    mounted = mount_image(local, image)
    with (mounted / "small").open("rb") as file:
        with pytest.raises(NodeError, match=f"in use: image {image.id[:12]}"):
            node.stop(local)
        assert file.read() == b"a small file\n"
    assert (mounted / "small").read_bytes() == b"a small file\n"
    assert node.stop(local)


def test_stop_leaves_images_that_another_process_leases(local: Config) -> None:
    image = node.ensure(local).open_image("big:1")
    mount_image(local, image)
    with rundir.lease_path(local, image.id).open("rb") as lease:
        fcntl.flock(lease, fcntl.LOCK_SH)
        with pytest.raises(NodeError, match=f"process {os.getpid()}"):
            node.stop(local)
    assert node.stop(local)
    assert not node.stop(local)


@pytest.mark.parametrize("use", ["directory", "file", "lease"])
def test_a_refused_stop_leaves_everything_as_it_was(config: Config, tmp_path: Path, use: str) -> None:
    """Also what nobody uses, whether it was mounted before or after what somebody does."""
    running = node.ensure(config)
    empty = tmp_path / "empty"
    empty.mkdir()
    images = [running.open_image(name) for name in ("big:1", "other:1")]
    for used in images:
        mounted = [mount_image(config, image) for image in images]
        with contextlib.ExitStack() as uses:
            if use == "directory":
                mounts.mount_user(config, used, empty)
            elif use == "file":
                uses.enter_context((mounted[images.index(used)] / FIRST[used.name]).open("rb"))
            else:
                fcntl.flock(uses.enter_context(rundir.lease_path(config, used.id).open("rb")), fcntl.LOCK_SH)
            before = found_mounts(config)
            for _ in range(3):  # what one looks at is not unmounted the next time either
                with pytest.raises(NodeError, match="in use") as caught:
                    node.stop(config)
                assert found_mounts(config) == before
            if use == "directory":
                assert f"{empty} ({used.name} is mounted there)" in caught.value.message
                assert f"`pvisor umount {empty}`" in caught.value.hint
                assert (empty / FIRST[used.name]).read_bytes()
                assert [entry.directory for entry in mounts.user_mounts(config)] == [str(empty)]
                mounts.umount_user(config, empty)
            for image, path in zip(images, mounted, strict=True):
                assert (path / FIRST[image.name]).read_bytes()
    assert node.stop(config)
    assert below(config) == []


FIRST = {"big:1": "small", "other:1": "one"}


def found_mounts(config: Config) -> str:
    """Mounts with their ids: one that was made again has another."""
    listed = subprocess.run(["findmnt", "-rno", "ID,TARGET,SOURCE"], capture_output=True, text=True, check=True).stdout
    return "".join(line for line in listed.splitlines(keepends=True) if str(config.run.parent) in line)


def test_stop_sees_a_user_that_is_not_visible_and_brings_images_back(local: Config) -> None:
    mounted = mount(local)
    hidden = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", "echo in; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert hidden.stdout is not None
        assert hidden.stdout.readline() == b"in\n"
        with pytest.raises(NodeError, match=rf"another mount namespace, of process {hidden.pid} \(sh\)"):
            node.stop(local)
        assert (mounted / "small").read_bytes() == b"a small file\n"
        inside = ["nsenter", f"--mount=/proc/{hidden.pid}/ns/mnt", "cat", str(mounted / "small")]
        assert subprocess.run(inside, capture_output=True, check=True).stdout == b"a small file\n"
    finally:
        hidden.communicate(b"\n", timeout=10)
    assert node.stop(local)
    assert below(local) == []


def test_a_daemon_that_hangs_is_reported_and_can_be_stopped(local: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse import starter

    pid = node.ensure(local).status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(node, "_STATUS_S", 0.2)
    monkeypatch.setattr(starter, "_END_S", 1.0)
    with pytest.raises(NodeError, match=f"pid {pid}"):
        node.ensure(local).status()
    assert node.stop(local)
    assert rundir.daemon_pid(local) is None
    assert below(local) == []


def test_user_directories(config: Config, tree: Path, tmp_path: Path) -> None:
    running = node.ensure(config)
    big, other = running.open_image("big:1"), running.open_image("other:1")
    directory = tmp_path / "mnt"
    with pytest.raises(NotFoundError, match="No such file"):
        mounts.mount_user(config, big, directory)
    directory.mkdir()
    mounts.mount_user(config, big, directory)
    mounts.mount_user(config, big, directory)
    assert_equal(directory, tree)
    with pytest.raises(MountError, match="image big:1 is mounted there"):
        mounts.mount_user(config, other, directory)
    with (directory / "small").open("rb"), pytest.raises(MountError, match="busy"):
        mounts.umount_user(config, directory)
    mounts.umount_user(config, directory)
    assert not is_mount_point(directory)
    with pytest.raises(NotFoundError, match="no image is mounted"):
        mounts.umount_user(config, directory)
    mounts.mount_user(config, other, directory)
    assert (directory / "one").read_bytes() == b"other\n"
    subprocess.run(["umount", directory], check=True)
    mounts.mount_user(config, big, directory)
    assert (directory / "small").exists()
    mounts.umount_user(config, directory)
    assert node.stop(config)


def test_many_readers_at_once(config: Config) -> None:
    mounted = mount(config)
    wrong: list[str] = []

    def read(number: int) -> None:
        for shift in range(FILES):
            name = (number * 5 + shift) % FILES
            if (mounted / f"sub/file{name:02}").read_bytes() != content(name):
                wrong.append(f"{number}: {name}")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_files_of_the_fuse_mount(config: Config) -> None:
    image = node.ensure(config).open_image("big:1")
    assert image.data_id in {path.name for path in config.blocks.iterdir()}
    assert image.data_path.stat().st_size % 4096 == 0
    assert not (config.blocks / "nothing").exists()
    assert not (config.blocks / ("00" * 32)).exists()
    with pytest.raises(OSError, match="Read-only"):
        (config.blocks / "new").write_bytes(b"x")
    assert config.run.stat().st_mode & 0o077 == 0


def test_a_daemon_that_can_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "home").write_bytes(b"a file")
    with node_directories(tmp_path) as config, pytest.raises(PvisorError, match="did not start") as caught:
        node.ensure(config)
    assert str(config.home) in str(caught.value)
