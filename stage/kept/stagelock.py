"""The lock of a stage: an flock on a file in its directory, held by who runs in the stage, and by its init."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stage.errors import StageBusyError, StageSetupError
from stage.kept import running

END_S = 10.0
"""How long a stage may take to end: its processes, and the command that waits for them."""
_LET_GO_S = 2.0


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Held for the moment in which a directory exists whose own lock is not taken yet."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StageSetupError(f"stages directory {root}: {error.strerror}", hint=space_hint(error)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def hold(path: Path, *, make: bool) -> int:
    """The stage's lock. An init that is ending has it for a moment longer, so that is waited for, and nobody else
    meanwhile."""
    try:
        with exclusive(path.parent):
            return lock(path, make=make)
    except StageBusyError:
        if running.find(path) is not None or not running.ended(path, _LET_GO_S):
            raise
    with exclusive(path.parent):
        return lock(path, make=make)


def lock(path: Path, *, make: bool) -> int:
    try:
        if make:
            path.mkdir(0o700, parents=True, exist_ok=True)
        fd = os.open(path / "lock", os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StageSetupError(f"stage {path}: {error.strerror}", hint=space_hint(error)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        init = running.find(path)
        who = f" by process {init.pid}" if init else ""
        raise StageBusyError(
            f"stage {path.name!r} is in use{who}",
            hint=f"run a command in it with pvisor stage exec {path.name} -- CMD, or use another --stage",
        ) from error
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        raise FileNotFoundError(path)
    return fd


def release(lock_fd: int) -> None:
    """Unlocked, not only closed: a child that another thread is just forking has the descriptor too, for a moment."""
    fcntl.flock(lock_fd, fcntl.LOCK_UN)
    os.close(lock_fd)


def require_ended(path: Path) -> None:
    """For who has the lock of a stage: nothing of an earlier init writes there any more. StageBusyError."""
    if not running.ended(path, END_S):
        raise StageBusyError(
            f"stage {path.name!r} has processes that do not end",
            hint="they wait for a disk or a server: look at the kernel's log",
        )


def holders_of(path: Path) -> list[int]:
    from imaged.chunkstore.storelock import holders

    return holders((path / "lock").stat())


def space_hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on the file system of PVISOR_HOME: `pvisor image rm` then `pvisor store gc`"
    return "set PVISOR_HOME to a directory you can write"
