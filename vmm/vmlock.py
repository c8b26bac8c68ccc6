"""The locks of a VM's directory, which the kernel gives back with the process that has them.

`lock` is held by a command that changes the VM, `owner` by the command that a temporary VM belongs to. The directory of
all VMs is locked for the moment in which one is made or taken away.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imaged.flock import is_held
from vmm.errors import VmNotFoundError, VmSetupError, space_hint

LOCK_NAME, _OWNER_NAME = "lock", "owner"
_TRIES = 100


def try_lock(path: Path) -> int | None:
    """The lock of a VM's directory; None when somebody has it. VmNotFoundError when there is no directory."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise VmNotFoundError(path.name) from error
    except OSError as error:
        raise VmSetupError(f"VM {path.name!r}: {path}: {error.strerror}", hint=space_hint(error)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if os.fstat(fd).st_nlink == 0:
        os.close(fd)
        raise VmNotFoundError(path.name, " any more")
    return fd


def release(fd: int) -> None:
    """Unlocked, not only closed: a child that another thread is just forking has the descriptor too, for a moment."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lock_owner(path: Path) -> int:
    """The lock of the command that this temporary VM belongs to: until it is released, or the command ends."""
    fd = os.open(path / _OWNER_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def has_owner(path: Path) -> bool:
    """Whether it is a temporary VM, be its command there or gone."""
    return (path / _OWNER_NAME).exists()


def is_owned(path: Path) -> bool:
    """Whether the command that a temporary VM belongs to is still there."""
    return is_held(path / _OWNER_NAME)


@contextmanager
def making(root: Path) -> Iterator[None]:
    """Held for the moment in which a directory exists whose own lock is not taken yet. VmSetupError."""
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise VmSetupError(f"directory of VMs {root}: {error.strerror}", hint=space_hint(error)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        release(fd)


def remove_empty(path: Path) -> None:
    """Take away a VM's directory in which only the lock is left. OSError.

    Who looks whether a VM is free makes the lock where it has just gone, and finds then that there is no VM.
    """
    for left in reversed(range(_TRIES)):
        (path / LOCK_NAME).unlink(missing_ok=True)
        try:
            path.rmdir()
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise
