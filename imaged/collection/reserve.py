"""Room that a full disk still has for the collection that is to free it: its index changes before any byte goes.

`<store>/reserve` is a file of nothing. Servers make it, and collections do at their end, when there is room for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "reserve"
RESERVE_BYTES = 4 << 20
"""Two transactions of a collection change about a thousand pages of the index, and reuse what earlier ones had."""


def take(store: Path) -> bool:
    """Whether it is there now. Not when the disk would be full by it, or nobody may write there."""
    path = store / NAME
    with contextlib.suppress(OSError):
        disk = os.statvfs(store)
        if path.exists() and path.stat().st_blocks * 512 >= RESERVE_BYTES:
            return True
        if disk.f_bavail * disk.f_frsize < 4 * RESERVE_BYTES:
            return False
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)
        return True
    return False


def give_up_when_scarce(store: Path) -> None:
    """When the disk has less room than the reserve."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(store)
        if disk.f_bavail * disk.f_frsize < RESERVE_BYTES:
            (store / NAME).unlink(missing_ok=True)


@contextlib.contextmanager
def given_up(store: Path) -> Iterator[None]:
    """For a collection: when the disk has little room; taken again afterwards."""
    give_up_when_scarce(store)
    try:
        yield
    finally:
        take(store)
