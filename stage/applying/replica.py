"""Copies of single nodes of a stage's writes, with everything that makes them what they are."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from stage.edits.names import quoted
from stage.edits.tree import Node
from stage.errors import StageBusyError

_SMALL_BYTES = 128 << 10
_PIECE_BYTES = 1 << 20
_KINDS = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}
_PRIVATE, _LABEL = b"trusted.overlay.", b"security.selinux"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What a node has besides its content; `mtime_ns` is None where the time is left to what happens."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int | None
    xattrs: Mapping[bytes, bytes]

    @classmethod
    def of(cls, node: Node) -> Attributes:
        """Of a file; the time of a directory follows what happens in it."""
        mtime_ns = None if node.is_directory else node.mtime_ns
        return cls(mode=node.mode, uid=node.uid, gid=node.gid, mtime_ns=mtime_ns, xattrs=node.xattrs)


def copy(node: Node, directory: int, name: bytes) -> None:
    """Makes `name` in `directory`, where nobody else writes. A directory is made empty, without its attributes.

    StageBusyError when the node is changed meanwhile; OSError.
    """
    if node.is_directory:
        os.mkdir(name, 0o700, dir_fd=directory)
        return
    if node.type == "file":
        _copy_file(node, directory, name)
        return
    if node.type == "symlink":
        os.symlink(node.target, name, dir_fd=directory)
    else:
        os.mknod(name, node.mode | _KINDS[node.type], dir_fd=directory)
    path = b"/proc/self/fd/%d/%s" % (directory, name)
    os.chown(name, node.uid, node.gid, dir_fd=directory, follow_symlinks=False)
    if node.type != "symlink":
        os.chmod(path, node.mode)  # noqa: PTH101 (bytes)
    for key, value in node.xattrs.items():
        os.setxattr(path, key, value, follow_symlinks=False)
    os.utime(name, ns=(node.mtime_ns, node.mtime_ns), dir_fd=directory, follow_symlinks=False)


def set_attributes(fd: int, wanted: Attributes) -> None:
    """Of an open file or directory; what it has already is not written, and so may be where nothing can be written.

    Owner first, for a change of owner takes suid bits and capabilities away.
    """
    found = os.fstat(fd)
    if (found.st_uid, found.st_gid) != (wanted.uid, wanted.gid):
        os.fchown(fd, wanted.uid, wanted.gid)
        found = os.fstat(fd)
    if stat.S_IMODE(found.st_mode) != wanted.mode:
        os.fchmod(fd, wanted.mode)
    here = _xattr_names(fd)
    for name in here - wanted.xattrs.keys():
        os.removexattr(fd, name)
    for name, value in wanted.xattrs.items():
        if name not in here or os.getxattr(fd, name) != value:
            os.setxattr(fd, name, value)
    if wanted.mtime_ns is not None and found.st_mtime_ns != wanted.mtime_ns:
        os.utime(fd, ns=(found.st_atime_ns, wanted.mtime_ns))


def _xattr_names(fd: int) -> set[bytes]:
    try:
        names = {os.fsencode(name) for name in os.listxattr(fd)}
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return set()
        raise
    return {name for name in names if not name.startswith(_PRIVATE) and name != _LABEL}


def _copy_file(node: Node, directory: int, name: bytes) -> None:
    try:
        source = node.open()
    except OSError as error:
        raise _changed(node) from error
    try:
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            _copy_data(source, target, node.size_bytes)
            set_attributes(target, Attributes.of(node))
        finally:
            os.close(target)
        found = os.fstat(source)
        if (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns) != (
            node.inode,
            node.size_bytes,
            node.mtime_ns,
            node.ctime_ns,
        ):
            raise _changed(node)
    finally:
        os.close(source)


def _changed(node: Node) -> StageBusyError:
    return StageBusyError(
        f"{quoted(node.location).decode()} changed in the stage while it was copied",
        hint="apply again when the stage's process is done with it",
    )


def _copy_data(source: int, target: int, size: int) -> None:
    if size <= _SMALL_BYTES:
        _write(target, os.read(source, size + 1))
        return
    os.truncate(target, size)
    position = 0
    while position < size:
        try:
            position = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(source, position, os.SEEK_HOLE)
        os.lseek(target, position, os.SEEK_SET)
        os.lseek(source, position, os.SEEK_SET)
        while position < end:
            count = _copy_piece(source, target, min(end - position, 1 << 30))
            if count == 0:
                return  # the file has shrunk, as the comparison after this finds
            position += count


def _copy_piece(source: int, target: int, length: int) -> int:
    """Shared blocks where the file system can do that."""
    try:
        return os.copy_file_range(source, target, length)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM):
            raise
    data = os.read(source, min(length, _PIECE_BYTES))
    _write(target, data)
    return len(data)


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
