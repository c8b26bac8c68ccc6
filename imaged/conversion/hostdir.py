"""A directory of this host read as one layer: owners, times, xattrs, hard links, holes and all.

Symlinks are never followed below the directory itself. Names mean themselves here: a file called `.wh.x` is a file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from imaged.conversion.cutter import Cutter
from imaged.conversion.layer import HardLink, Layer, LayerEntry, NodeEntry, check_inode, clean_path
from imaged.erofs.tree import Inode
from imaged.errors import SourceError

READ_BYTES = 1 << 20
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOATIME
_BLOCK_UNIT = 512
"""Of st_blocks."""
_NO_XATTRS = (errno.ENOTSUP, errno.ENODATA)


def read_directory(root: Path, cutter: Cutter, *, advance: Callable[[int], None]) -> Layer:
    """The tree below `root`, entries by name, parents first. The cutter is finished.

    Sockets have no place in an image and are left out with a warning. `advance` is told the bytes of file data as
    they are read. SourceError for what can not be read and for a file that shrinks meanwhile.
    """
    with _source_errors(root, b""), _closing_fd(os.open(root, _DIRECTORY_FLAGS)) as root_fd:
        reader = _DirectoryReader(root, root_fd, cutter, advance)
        entries = list(reader.entries())
    cutter.finish()
    return Layer(entries, tuple(reader.warnings))


@contextmanager
def _closing_fd(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _source_errors(root: Path, path: bytes) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = root / os.fsdecode(path)
        raise SourceError(
            f"{str(where)!r} can not be read: {error.strerror}",
            hint="a directory is converted as root, while nothing changes it",
        ) from error


class _DirectoryReader:
    """The state of one walk. Paths are relative to the root's descriptor, so that the root may be deep."""

    def __init__(self, root: Path, root_fd: int, cutter: Cutter, advance: Callable[[int], None]) -> None:
        self._root, self._root_fd, self._cutter, self._advance = root, root_fd, cutter, advance
        self.warnings: list[str] = []
        self._links: dict[tuple[int, int], bytes] = {}

    def entries(self) -> Iterator[LayerEntry]:
        pending = [b""]
        while pending:
            path = pending.pop()
            with _source_errors(self._root, path):
                entry = self._entry(path)
                if entry is None:
                    continue
                yield entry
                if isinstance(entry, NodeEntry) and entry.inode.is_directory:
                    prefix = path + b"/" if path else b""
                    pending += [prefix + name for name in sorted(self._names(path), reverse=True)]

    def _names(self, path: bytes) -> list[bytes]:
        with (
            _closing_fd(os.open(path or b".", _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=self._root_fd)) as fd,
            os.scandir(fd) as found,
        ):
            return [os.fsencode(one.name) for one in found]

    def _entry(self, path: bytes) -> LayerEntry | None:
        status = os.stat(path or b".", dir_fd=self._root_fd, follow_symlinks=False)
        shown = path.decode(errors="backslashreplace")
        if stat.S_ISSOCK(status.st_mode):
            self.warnings.append(f"{shown!r} is a socket, left out")
            return None
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            first = self._links.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                return HardLink(path, first)
        inode = Inode(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns)
        if stat.S_ISLNK(status.st_mode):
            inode.target = os.readlink(path, dir_fd=self._root_fd)
        elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            inode.major, inode.minor = os.major(status.st_rdev), os.minor(status.st_rdev)
        inode.xattrs = self._xattrs(path)
        try:
            check_inode(inode)
            clean_path(path or b".")
        except ValueError as error:
            raise SourceError(f"{shown!r} in {self._root}: {error}") from None
        if stat.S_ISREG(status.st_mode):
            self._read_file(path, inode, status)
        return NodeEntry(path, inode)

    def _xattrs(self, path: bytes) -> dict[bytes, bytes]:
        # The xattr calls take no directory descriptor; /proc gives the root a name that is always short.
        name = b"/proc/self/fd/%d/%s" % (self._root_fd, path or b".")
        try:
            names = os.listxattr(name, follow_symlinks=False)
            return {os.fsencode(one): os.getxattr(name, one, follow_symlinks=False) for one in names}
        except OSError as error:
            if error.errno in _NO_XATTRS:
                return {}
            raise

    def _read_file(self, path: bytes, inode: Inode, status: os.stat_result) -> None:
        try:
            fd = os.open(path, _FILE_FLAGS, dir_fd=self._root_fd)
        except PermissionError:
            # O_NOATIME is for a file's owner and root alone.
            fd = os.open(path, _FILE_FLAGS & ~os.O_NOATIME, dir_fd=self._root_fd)
        with _closing_fd(fd):
            self._cutter.begin(inode, path.rpartition(b"/")[0])
            position = 0
            for start, end in _data_ranges(fd, status):
                self._cutter.hole(start - position)
                self._read_range(path, fd, start, end)
                position = end
            self._cutter.hole(status.st_size - position)
            self._cutter.end()

    def _read_range(self, path: bytes, fd: int, start: int, end: int) -> None:
        while start < end:
            data = os.pread(fd, min(READ_BYTES, end - start), start)
            if not data:
                where = path.decode(errors="backslashreplace")
                raise SourceError(
                    f"{where!r} in {self._root} became shorter while it was read: {start} bytes, not {end}",
                    hint="convert a directory that nothing changes",
                )
            self._cutter.write(data)
            self._advance(len(data))
            start += len(data)


def _data_ranges(fd: int, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """Where the file has data; the whole file when it has no holes or the file system does not tell."""
    size = status.st_size
    if status.st_blocks * _BLOCK_UNIT >= size:
        if size:
            yield 0, size
        return
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < end:
            yield start, end
