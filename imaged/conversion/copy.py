"""Copy a mounted tree into a directory with everything that makes it what it is."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from imaged.blockbuilder import is_zero
from imaged.errors import PvisorError
from imaged.progress import NoProgress, Progress

_COPY_BYTES = 1 << 20


def copy_tree(source: Path, target: Path, progress: Progress | None = None) -> None:
    """Copy into `target`, which is new or empty: owners, modes, times, xattrs, hard links, holes and device nodes.

    Not `cp -a`: it asks st_blocks whether a file has holes, which EROFS does not tell, and then reads 300 GB of them.
    PvisorError names the file that can not be copied; what was copied until then stays.
    """
    if target.exists() and any(os.scandir(target)):
        raise PvisorError(f"{target} is not empty", hint="export into a new or empty directory")
    progress = progress or NoProgress()
    progress.start("copying files", None)
    links: dict[int, Path] = {}
    directories: list[tuple[Path, Path]] = []
    path = source
    try:
        target.mkdir(parents=True, exist_ok=True)
        directories.append((source, target))
        for path in _below(source):
            made = target / path.relative_to(source)
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode):
                made.mkdir(0o700)
                directories.append((path, made))
                continue
            first = links.setdefault(found.st_ino, made) if found.st_nlink > 1 else made
            if first is not made:
                os.link(first, made, follow_symlinks=False)
                continue
            _copy_node(path, made, found, progress)
            _copy_metadata(path, made, found)
        for path, made in reversed(
            directories
        ):  # last: entries change a directory's time, and its mode may forbid them
            _copy_metadata(path, made, path.lstat())
    except OSError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        reason = error.strerror or str(error)
        hint = "directory exports need root, and a file system with room, xattrs and device nodes"
        raise PvisorError(f"can not copy {shown} to {target}: {reason}", hint=hint) from error


def _below(directory: Path) -> Iterator[Path]:
    """Everything below, parents first; not recursive."""
    pending = [directory]
    while pending:
        here = pending.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                path = Path(entry.path)
                yield path
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)


def _copy_node(source: Path, target: Path, found: os.stat_result, progress: Progress) -> None:
    if stat.S_ISLNK(found.st_mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISREG(found.st_mode):
        _copy_data(source, target, found.st_size, progress)
    else:
        os.mknod(target, found.st_mode, found.st_rdev)


def _copy_data(source: Path, target: Path, size: int, progress: Progress) -> None:
    """Data where the file system says there is some, and there is; the rest stays a hole."""
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        writer.truncate(size)
        position = 0
        while position < size:
            try:
                start = os.lseek(reader.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            position = start
            end = os.lseek(reader.fileno(), start, os.SEEK_HOLE)
            while position < end:
                block = os.pread(reader.fileno(), min(_COPY_BYTES, end - position), position)
                if not block:
                    raise OSError(errno.EIO, "the file ends early")
                if not is_zero(block):
                    os.pwrite(writer.fileno(), block, position)
                position += len(block)
                progress.advance(len(block))


def _copy_metadata(source: Path, target: Path, found: os.stat_result) -> None:
    """Owner first, since a change of owner takes suid and capabilities away; times last."""
    os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        target.chmod(stat.S_IMODE(found.st_mode))
    for name in os.listxattr(source, follow_symlinks=False):
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(found.st_mtime_ns, found.st_mtime_ns), follow_symlinks=False)
