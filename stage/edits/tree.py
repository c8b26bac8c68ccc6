"""A directory that others write to, read without ever leaving it: no symbolic link is followed on the way to a name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from fuse import linux
from stage.hostpath import open_below

Type = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
ROOT = b"."
_TYPES: Mapping[int, Type] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
# overlayfs' own notes are not part of what a name stands for; SELinux labels are given by the host's policy.
_OWN_XATTRS = b"trusted.overlay."
_LABEL = b"security.selinux"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a name stood for when it was looked at, and where its bytes are (`tree`, `location`).

    `mode` is the permission bits, `rdev` the number of a device, `target` of a symbolic link; a directory's
    `size_bytes` is 0. `device`, `inode` and `ctime_ns` tell this node from a later one of the same name.
    """

    type: Type
    mode: int
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int
    link_count: int
    rdev: int
    target: bytes
    xattrs: Mapping[bytes, bytes]
    tree: Tree = field(repr=False, compare=False)
    location: bytes

    @property
    def is_directory(self) -> bool:
        return self.type == "directory"

    def open(self) -> int:
        """A descriptor to read a regular file with; OSError when something else has taken its place."""
        return self.tree.open_file(self.location)

    @contextmanager
    def reading(self) -> Iterator[int]:
        """`open` for a block, in which errors name the file."""
        fd = self.open()
        try:
            yield fd
        except OSError as error:
            if error.filename is None:
                error.filename = os.fsdecode(self.location)
            raise
        finally:
            os.close(fd)


class Tree:
    """A directory, opened once. Paths are bytes relative to it, `ROOT` for itself. May be shared between threads.

    It is a copy of the mount: what is mounted inside the directory is not seen, as overlayfs sees none in its layers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = linux.open_tree(path)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def open(self, path: bytes, flags: int) -> int:
        """open(2) of what is at `path`. OSError; ELOOP when a part of it is a symbolic link."""
        return open_below(self._fd, path, flags)

    def open_file(self, path: bytes) -> int:
        """A regular file to read; OSError(EINVAL) for anything else, such as a device, which is then never opened."""
        handle = self.open(path, os.O_PATH)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", os.fsdecode(path))
            return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(handle)

    @contextmanager
    def directory(self, path: bytes) -> Iterator[int]:
        """A descriptor of a directory, for functions with `dir_fd`."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)

    def names(self, path: bytes) -> list[bytes]:
        """The names in a directory, sorted; none when there is no such directory (any more)."""
        try:
            with self.directory(path) as fd, os.scandir(fd) as entries:
                return sorted(os.fsencode(entry.name) for entry in entries)
        except OSError as error:
            if absent(error):
                return []
            raise

    def node(self, path: bytes) -> Node | None:
        """What is at `path`; None when nothing is, or a part of the path is no directory."""
        parent, name = split(path)
        try:
            with self.directory(parent) as fd:
                return self.node_in(fd, path, name)
        except OSError as error:
            if absent(error):
                return None
            raise

    def node_in(self, fd: int, path: bytes, name: bytes) -> Node | None:
        """As `node`, with the parent directory already open."""
        real = b"/proc/self/fd/%d/%s" % (fd, name)
        try:
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            kind = _TYPES[stat.S_IFMT(found.st_mode)]
            target = os.readlink(name, dir_fd=fd) if kind == "symlink" else b""
            xattrs = {}
            for key in map(os.fsencode, os.listxattr(real, follow_symlinks=False)):
                if not key.startswith(_OWN_XATTRS) and key != _LABEL:
                    xattrs[key] = os.getxattr(real, key, follow_symlinks=False)
        except OSError as error:
            if absent(error) or error.errno in (errno.EINVAL, errno.ENODATA):  # something else by now
                return None
            raise
        return Node(
            type=kind,
            mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            size_bytes=0 if kind == "directory" else found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            device=found.st_dev,
            inode=found.st_ino,
            link_count=found.st_nlink,
            rdev=found.st_rdev if kind in ("char", "block") else 0,
            target=target,
            xattrs=xattrs,
            tree=self,
            location=path,
        )

    def born_ns(self, path: bytes) -> int | None:
        """When what is at `path` was made; None where the file system does not know, or nothing is there."""
        try:
            fd = self.open(path, os.O_PATH)
        except OSError as error:
            if absent(error):
                return None
            raise
        try:
            return linux.born_ns(fd)
        finally:
            os.close(fd)

    def note(self, path: bytes, name: str) -> bytes:
        """One of overlayfs' own attributes, `trusted.overlay.NAME`, of what is at `path`; b"" when it has none."""
        parent, last = split(path)
        try:
            with self.directory(parent) as fd:
                return os.getxattr(
                    b"/proc/self/fd/%d/%s" % (fd, last), _OWN_XATTRS + name.encode(), follow_symlinks=False
                )
        except OSError as error:
            if absent(error) or error.errno in (errno.ENODATA, errno.ENOTSUP):
                return b""
            raise


def join(directory: bytes, name: bytes) -> bytes:
    """The path of a name in a directory of a tree."""
    return name if directory == ROOT else directory + b"/" + name


def split(path: bytes) -> tuple[bytes, bytes]:
    """A path's directory and last name; those of `ROOT` are itself."""
    parent, _, name = path.rpartition(b"/")
    return parent or ROOT, name


def parents(path: bytes) -> Iterator[bytes]:
    """The directories above a path, nearest first, without `ROOT`."""
    while (path := split(path)[0]) != ROOT:
        yield path


def absent(error: OSError) -> bool:
    """Whether a look-up failed because there is nothing, or a link or file where a directory would have to be."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)


def vanished(error: OSError) -> bool:
    """Whether `Node.open` failed because the file is not there any more, or something else is."""
    return absent(error) or error.errno == errno.EINVAL
