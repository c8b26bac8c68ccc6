"""Paths below one directory, on the real kernel: no way leads out of it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from stage.hostpath import HostTree, empty, listing, make_private


def deep(top: Path, levels: int) -> bytes:
    """A chain of directories that is too long for one path, with a file at its end; its relative path."""
    name = b"n" * 200
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        further = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = further
    os.close(os.open(b"end", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)
    return b"/".join([*[name] * levels, b"end"])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_path_is_walked_without_links_and_without_leaving(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "d").mkdir(parents=True)
    (top / "d/file").write_text("x")
    (tmp_path / "outside").write_text("x")
    (top / "link").symlink_to("d")
    (top / "out").symlink_to(tmp_path)
    (top / "d/last").symlink_to("file")
    with HostTree(top) as tree:
        found = tree.stat(b"d/file")
        assert found is not None and found.st_size == 1
        last = tree.stat(b"d/last")
        assert last is not None and last.st_size == len("file")
        assert tree.stat(b"d/file/x") is None and tree.stat(b"none/x") is None
        for path, number in (
            (b"link/file", errno.ELOOP),
            (b"out/outside", errno.ELOOP),
            (b"d/../../outside", errno.EXDEV),
        ):
            with pytest.raises(OSError) as caught:
                tree.stat(path)
            assert caught.value.errno == number


def test_a_moved_directory_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_text("x")
    with HostTree(tmp_path) as tree:
        assert tree.stat(b"a/x") is not None
        (tmp_path / "a").rename(tmp_path / "b")
        assert tree.stat(b"a/x") is None and tree.stat(b"b/x") is not None


def test_paths_longer_than_the_kernel_takes(tmp_path: Path) -> None:
    path = deep(tmp_path, 40)
    assert len(path) > os.pathconf("/", "PC_PATH_MAX")
    with HostTree(tmp_path) as tree:
        assert tree.stat(path) is not None
        os.close(tree.open_node(path))
        assert tree.names(path.rpartition(b"/")[0]) == [b"end"]


def test_parents_are_not_kept_open(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "x").touch()
    before = descriptors()
    with HostTree(tmp_path) as tree:
        for number in range(200):
            assert tree.stat(b"%d/x" % number) is not None
        assert descriptors() <= before + 3
    assert descriptors() == before


def test_empty_removes_everything_and_follows_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    top.mkdir()
    deep(top, 40)
    (top / "link").symlink_to(outside)
    (top / "d").mkdir()
    (top / "d/link").symlink_to(outside)
    os.mkfifo(top / "d/fifo")
    fd = os.open(top, os.O_RDONLY)
    empty(fd)
    assert listing(fd) == []
    os.close(fd)
    assert (outside / "kept").exists()


def test_empty_meets_what_changes_under_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is being killed may still turn directories into files and back, or remove them."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    for name in ("gone", "file", "link", "filled"):
        (top / name / "below").mkdir(parents=True)
        (top / name / "x").write_text("x")
    (top / "late").mkdir()
    turns = {b"gone": "rm -r gone", b"file": "rm -r file; echo > file", b"link": "rm -r link; ln -s ../outside link"}
    turns |= {b"filled": "echo > filled/late", b"late": "rmdir late; echo > late"}
    rmdir = os.rmdir

    def late(name: bytes, *, dir_fd: int) -> None:
        if name in turns:
            subprocess.run(["sh", "-ec", turns.pop(name)], cwd=top, check=True)
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", late)
    fd = os.open(top, os.O_RDONLY)
    empty(fd)
    assert listing(fd) == [] and not turns
    os.close(fd)
    assert (outside / "kept").exists()


@pytest.mark.root
def test_a_private_directory_inherits_nothing(tmp_path: Path) -> None:
    acl = bytes.fromhex("0200000001000700ffffffff020007000900000004000500ffffffff10000700ffffffff20000500ffffffff")
    os.setxattr(tmp_path, "system.posix_acl_default", acl)
    tmp_path.chmod(0o2775)
    fd = os.open(tmp_path, os.O_RDONLY)
    made = make_private(fd, b"place")
    assert not [name for name in os.listxattr(made) if "acl" in name]
    assert os.fstat(made).st_mode & 0o777 == 0o700
    os.close(made)
    os.close(fd)
