"""The writes of a stage on disk: how much they are, and their way to stable storage."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from fuse import linux
from stage.errors import StageError

# A descriptor each, and a process may have as few as 1024. No real tree is that deep.
_DEEPEST = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def written_bytes(directories: Iterable[Path]) -> int:
    """What the entries below take on the disk, hard-linked files once; those that go meanwhile do not count.

    The process that writes there may run: no symbolic link is followed, whatever it swaps.
    """
    seen: set[tuple[int, int]] = set()
    return sum(_below(directory, seen) for directory in directories)


def sync(directory: Path) -> None:
    """Everything on the file system of `directory` is on stable storage when this returns. StageError when it is not.

    One call for all of a stage's writes: files, names, attributes, and what stage.json says of them.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_by(fd, directory)
    finally:
        os.close(fd)


def sync_by(fd: int, directory: Path) -> None:
    """As `sync`, by an open file there."""
    try:
        linux.sync_file_system(fd)
    except OSError as error:
        raise StageError(
            f"the writes in {directory} may not be on disk: {error.strerror}",
            hint="look at the kernel's log for errors of the disk",
        ) from error


def _below(directory: Path, seen: set[tuple[int, int]]) -> int:
    total = 0
    path: list[int] = []  # the open directories from the top to where we are
    pending: list[list[str]] = [
        [os.fspath(directory)]
    ]  # and what is still to be entered in each, beginning above the top
    try:
        while pending:
            if not pending[-1]:
                pending.pop()
                if path:
                    os.close(path.pop())
                continue
            name = pending[-1].pop()
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=path[-1] if path else None)
            except OSError:  # gone, or something else now
                continue
            path.append(fd)
            size, names = _entries(fd, seen)
            total += size
            pending.append(names if len(path) < _DEEPEST else [])
    finally:
        for fd in path:
            os.close(fd)
    return total


def _entries(fd: int, seen: set[tuple[int, int]]) -> tuple[int, list[str]]:
    """Bytes of a directory's own entries, and the names of its directories."""
    size, names = 0, []
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                names.append(entry.name)
            elif found.st_nlink > 1:
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            size += found.st_blocks * 512
    return size, names
