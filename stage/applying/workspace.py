"""The host directory that an apply works in, held against other applies."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stage.errors import StageBusyError, StageError
from stage.hostpath import HostTree
from stage.kept.record import Base

WAIT_S = 60.0


@contextmanager
def held(path: Path, base: Base | None = None, *, wait_s: float = WAIT_S) -> Iterator[HostTree]:
    """The directory, locked while the block runs, which ends the moment this process does.

    StageError when it is not there or not that of `base`, StageBusyError when another apply takes longer than `wait_s`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StageError(
            f"workspace {path}: {error.strerror}", hint="put the directory back where it was when the stage was made"
        ) from error
    with HostTree(fd) as tree:
        require_same(path, base, os.fstat(fd))
        _lock(fd, path, wait_s)
        yield tree


def require_same(path: Path, base: Base | None, found: os.stat_result) -> None:
    """Raises StageError when what has the name now is not the directory of `base`."""
    if base is not None and not is_same(base, found):
        raise StageError(
            f"workspace {path} is not the directory that the stage was made for",
            hint="put that one back, or copy what you need out of the stage",
        )


def is_same(base: Base, found: os.stat_result) -> bool:
    """Whether it is that directory. After a reboot, a disk may have another device number."""
    if base.inode != found.st_ino:
        return False
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return base.device == found.st_dev or base.time_ns < booted_ns


def _lock(fd: int, path: Path, wait_s: float) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
    if not _wait(fd, wait_s):
        raise StageBusyError(
            f"another process holds workspace {path}, for more than {wait_s:.0f} s",
            hint="wait for the other apply; `lslocks` shows who it is",
        )


def _wait(fd: int, wait_s: float) -> bool:
    """flock has no timeout, so a thread waits; one that comes too late finds its descriptor's lock unwanted."""
    mine = os.dup(fd)
    done = threading.Event()

    def wait() -> None:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX)
            done.set()
        finally:
            os.close(mine)

    threading.Thread(target=wait, name="workspace-lock", daemon=True).start()
    return done.wait(wait_s)
