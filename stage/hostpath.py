"""A directory tree that others write at the same time, reached from its top and in no other way.

The host directory that an apply writes to and the retained writes it reads may both be changed by processes that want
pVisor to write elsewhere. So no path is walked by name: the kernel resolves each one from the top's descriptor and
refuses symbolic links, `..` and other mounts on the way, and the last name is never followed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

from fuse import linux

# openat2 takes at most PATH_MAX at once; a name is at most 255.
_PIECE_BYTES = 3800
_PLACE = re.compile(rb"\.pvisor-apply-[0-9a-f]{16}(/|\Z)")
# How deep a tree is removed where it lies: a descriptor for each level.
_LEVELS = 8
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_DEFAULT_ACLS = ("system.posix_acl_default", "system.posix_acl_access")


class HostTree:
    """Everything below one directory. Each look resolves its path anew, since directories may move; for one thread."""

    def __init__(self, top: Path | int) -> None:
        """`top` is a path, or a descriptor that this object closes."""
        self.fd = top if isinstance(top, int) else os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._parent: int | None = None

    def __enter__(self) -> HostTree:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        os.close(self.fd)

    def _forget(self) -> None:
        if self._parent is not None:
            os.close(self._parent)
            self._parent = None

    def parent(self, path: bytes) -> tuple[int, bytes]:
        """The descriptor of the directory that has `path`, valid until the next call, and the name in it. OSError."""
        self._forget()
        directory, _, name = path.rpartition(b"/")
        if not directory:
            return self.fd, name
        self._parent = self._directory(directory)
        return self._parent, name

    def _directory(self, path: bytes, flags: int = os.O_PATH) -> int:
        return open_below(self.fd, path, flags | os.O_DIRECTORY)

    def stat(self, path: bytes) -> os.stat_result | None:
        """lstat; None when it is not there. OSError ELOOP or EXDEV when a link or a mount is on the way."""
        try:
            directory, name = self.parent(path)
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open_node(self, path: bytes) -> int:
        """O_PATH of whatever is there, so that looking at it opens no device and waits for no fifo."""
        directory, name = self.parent(path)
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)

    def names(self, path: bytes) -> list[bytes]:
        """The names in a directory; OSError when it is not one, or something is mounted there."""
        fd = self._directory(path, os.O_RDONLY)
        try:
            return listing(fd)
        finally:
            os.close(fd)


def open_below(top: int, path: bytes, flags: int) -> int:
    """As `linux.open_beneath`, for a path of any length. OSError."""
    fd = top
    try:
        while len(path) > _PIECE_BYTES:
            cut = path.rindex(b"/", 0, _PIECE_BYTES)
            further = linux.open_beneath(fd, path[:cut], os.O_PATH | os.O_DIRECTORY)
            if fd != top:
                os.close(fd)
            fd, path = further, path[cut + 1 :]
        return linux.open_beneath(fd, path, flags)
    finally:
        if fd != top:
            os.close(fd)


def listing(directory: int) -> list[bytes]:
    """The names in an open directory."""
    return [os.fsencode(name) for name in os.listdir(directory)]


def place_name(token: str) -> bytes:
    """The private directory of an apply, at the top of a workspace."""
    return b".pvisor-apply-" + token.encode()


def in_place(path: bytes) -> bool:
    """Whether a path of a workspace is that of such a directory, or below it."""
    return _PLACE.match(path) is not None


def make_private(directory: int, name: bytes) -> int:
    """A new directory that only its owner enters and whose access control lists nobody inherits; its descriptor."""
    os.mkdir(name, 0o700, dir_fd=directory)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    for attribute in _DEFAULT_ACLS:
        try:
            os.removexattr(fd, attribute)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
    os.fchmod(fd, 0o700)
    return fd


def empty(top: int) -> None:
    """Removes everything in a directory, however deep: what is far down moves up to it first.

    By descriptor: a process that still stands in there and swaps names for links leads to nothing else. What goes or
    becomes something else meanwhile, in the last step of a process that is being killed, is met again as it is then.
    """
    names = itertools.count()
    token = os.urandom(4).hex().encode()

    def move_up(name: bytes, directory: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(name, b"removed-%s-%d" % (token, next(names)), src_dir_fd=directory, dst_dir_fd=top)

    while listing(top):
        _clear(top, _LEVELS, move_up)


def _clear(directory: int, levels: int, move_up: Callable[[bytes, int], None]) -> None:
    for name in listing(directory):
        if _remove(name, directory):
            continue
        if not levels:
            move_up(name, directory)
            continue
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            if error.errno in _GONE:
                continue
            raise
        try:
            _clear(fd, levels - 1, move_up)
        finally:
            os.close(fd)
        _remove(name, directory)


def _remove(name: bytes, directory: int) -> bool:
    """False when it is a directory with something in it, or becomes another thing just now."""
    try:
        os.unlink(name, dir_fd=directory)
        return True
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        pass
    try:
        os.rmdir(name, dir_fd=directory)
        return True
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        return False
