import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.conversion import hostdir
from imaged.conversion.apply import Tree
from imaged.conversion.convert import convert
from imaged.conversion.cutter import Cutter
from imaged.erofs.tree import Inode
from imaged.errors import SourceError
from imaged.names import SourceName
from tests.support import trees
from tests.support.memory_store import MemoryStore


def read(top: Path) -> tuple[Inode, MemoryStore, tuple[str, ...], int]:
    store = MemoryStore()
    done: list[int] = []
    layer = hostdir.read_directory(top, Cutter(store), advance=done.append)
    tree = Tree()
    tree.apply(layer)
    return tree.root, store, layer.warnings, sum(done)


def fill(top: Path) -> None:
    """One of everything an unprivileged user can make."""
    rng = random.Random(3)
    for size in (0, 1, 4096, 65_537, 300_000):
        (top / f"{size}").write_bytes(rng.randbytes(size))
    (top / "deep" / "er").mkdir(parents=True)
    (top / "deep" / "er" / "x").write_bytes(b"x")
    (top / "link").symlink_to("/etc")
    (top / "deep" / "loop").symlink_to("..")
    os.link(top / "1", top / "deep" / "hard")
    os.link(top / "link", top / "deep" / "hardlink to symlink")
    os.mkfifo(top / "fifo")
    (top / os.fsdecode(b"\xff\n-")).write_bytes(b"odd")
    (top / ".wh.file").write_bytes(b"only a name")
    (top / ".wh..wh..opq").write_bytes(b"only a name")
    (top / "suid").write_bytes(b"s")
    (top / "suid").chmod(0o4711)
    os.setxattr(top / "suid", "user.k", b"\0v")
    os.setxattr(top / "deep", "user.d", b"")
    with open(top / "sparse", "wb") as stream:
        stream.seek(8 << 20)
        stream.write(b"middle")
        stream.truncate(24 << 20)
    with open(top / "hole", "wb") as stream:
        stream.truncate((1 << 40) + 1)
    os.utime(top / "deep", ns=(0, -1_500_000_000))


def test_everything_is_taken_over(tmp_path: Path) -> None:
    fill(tmp_path)
    root, store, warnings, done = read(tmp_path)
    assert trees.expected(store, root) == trees.found(tmp_path)
    assert warnings == ()
    assert done < 1 << 20
    hole = root.children[b"hole"]
    assert [(extent.block_count, extent.chunk) for extent in hole.extents] == [((1 << 28) + 1, None)]


@pytest.mark.root
def test_owners_and_nodes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"f")
    os.chown(tmp_path / "f", 70_000, 4_294_967_294)
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(tmp_path / "disk", stat.S_IFBLK | 0o600, os.makedev(4095, 1_048_575))
    os.setxattr(tmp_path / "f", "trusted.overlay.opaque", b"y")
    root, store, _, _ = read(tmp_path)
    assert trees.expected(store, root) == trees.found(tmp_path)


def test_sockets_are_left_out_with_a_warning(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        root, _, warnings, _ = read(tmp_path)
    assert list(root.children) == []
    assert len(warnings) == 1
    assert "'s' is a socket" in warnings[0]


def test_deep_directories(tmp_path: Path) -> None:
    name = "d" * 200
    fds = [os.open(tmp_path, os.O_RDONLY)]
    for _ in range(18):
        os.mkdir(name, dir_fd=fds[-1])
        fds.append(os.open(name, os.O_RDONLY, dir_fd=fds[-1]))
    for fd in fds:
        os.close(fd)
    root, _, _, _ = read(tmp_path)
    depth = 0
    while root.children:
        root, depth = root.children[name.encode()], depth + 1
    assert depth == 18


def shrink(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.truncate(10)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(("change", "words"), [(shrink, "became shorter"), (remove, "can not be read")])
def test_files_that_change_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], words: str
) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    xattrs = hostdir._DirectoryReader._xattrs

    def then_change(self: hostdir._DirectoryReader, path: bytes) -> dict[bytes, bytes]:
        found = xattrs(self, path)
        if path == b"f":
            change(tmp_path / "f")
        return found

    monkeypatch.setattr(hostdir._DirectoryReader, "_xattrs", then_change)
    with pytest.raises(SourceError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("missing", ["none", "file", "file/below"])
def test_what_is_no_directory(tmp_path: Path, missing: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match=missing) as caught:
        read(tmp_path / missing)
    assert caught.value.hint


def test_conversion_of_a_directory(tmp_path: Path) -> None:
    top = tmp_path / "my root"
    top.mkdir()
    fill(top)
    with ChunkStore.open(tmp_path / "store") as store:
        done = convert(store, SourceName.parse(f"dir:{top}"))
        again = convert(store, SourceName.parse(f"dir:{top}"), platform="linux/arm64")
        assert (done.name, done.record.layers, done.record.source_digest) == ("my-root:latest", (), "")
        assert done.record.entries == len(trees.found(top))
        assert again.record.metadata == done.record.metadata
        assert again.record.platform == "linux/arm64"
        ref = store.refs.get("my-root:latest")
        assert ref is not None and ref.record == again.id
        assert store.missing([done.id, again.id, done.record.metadata, done.record.data]) == []
