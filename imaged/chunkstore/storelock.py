"""The locks of a store directory: everyone who has it open holds `lock` shared, a rebuild holds it alone; who collects
or evicts holds `gc.lock` alone, a check of the store holds that shared.

They are flocks, so a killed process leaves nothing behind. Who holds one is read from /proc/locks when a message needs
it: no list of process ids can then be out of date.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from imaged.errors import StoreBusyError, StoreReadOnlyError
from imaged.faults import store_faults

LOCK_NAME = "lock"
COLLECTION_LOCK_NAME = "gc.lock"
WAIT_S = 30.0
"""How long opening a store waits for a rebuild to end, and a check for a collection."""
_POLL_S = 0.05


@dataclass(slots=True)
class _Flock:
    """A held lock (a context manager). `fd` is -1 when released, or when a read-only store has no lock file."""

    fd: int

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.release()


@dataclass(slots=True)
class StoreLock(_Flock):
    """The right to have a store open."""

    @classmethod
    def shared(cls, root: Path, *, readonly: bool = False, wait_s: float = WAIT_S) -> Self:
        """Wait until no process holds it alone, at most `wait_s`; StoreBusyError names the holder then."""
        if readonly and not (root / LOCK_NAME).exists():
            return cls(-1)
        fd = _open(root / LOCK_NAME, readonly=readonly)
        deadline = time.monotonic() + wait_s
        while not _try(fd, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                who = _close_and_name_holders(fd)
                raise StoreBusyError(
                    f"store {root}: {who} has been rebuilding it for {wait_s:.0f} s",
                    hint="try again when it has ended",
                )
            time.sleep(_POLL_S)
        return cls(fd)

    @classmethod
    def exclusive(cls, root: Path) -> Self:
        """Without waiting; StoreBusyError names the processes that have the store open."""
        fd = _open(root / LOCK_NAME, readonly=False)
        if not _try(fd, fcntl.LOCK_EX):
            who = _close_and_name_holders(fd)
            raise StoreBusyError(
                f"store {root}: {who} has it open",
                hint="stop it (`pvisor node stop` for the node daemon, SIGTERM for `pvisor serve`) and try again",
            )
        return cls(fd)


@dataclass(slots=True)
class CollectionLock(_Flock):
    """The right to take chunks away, or to rely on nobody doing that."""

    @classmethod
    def alone(cls, root: Path) -> Self:
        """To take chunks away. Without waiting; StoreBusyError names who collects, evicts or checks."""
        found = cls.alone_if_free(root)
        if found is None:
            raise _busy(root)
        return found

    @classmethod
    def alone_if_free(cls, root: Path) -> Self | None:
        """As `alone`, with None in place of the error."""
        fd = _open(root / COLLECTION_LOCK_NAME, readonly=False)
        if _try(fd, fcntl.LOCK_EX):
            return cls(fd)
        os.close(fd)
        return None

    @classmethod
    def shared(cls, root: Path, *, wait_s: float = WAIT_S) -> Self:
        """To see nothing taken away. Waits for a collection to end, at most `wait_s`; StoreBusyError names it then."""
        path = root / COLLECTION_LOCK_NAME
        try:
            fd = _open(path, readonly=False)
        except StoreReadOnlyError:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return cls(-1)  # nobody can collect here
            except OSError:
                fd = -1
            if fd < 0:
                raise
        deadline = time.monotonic() + wait_s
        while not _try(fd, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                os.close(fd)
                raise _busy(root)
            time.sleep(_POLL_S)
        return cls(fd)


def _busy(root: Path) -> StoreBusyError:
    who = _close_and_name_holders(_open(root / COLLECTION_LOCK_NAME, readonly=True))
    return StoreBusyError(f"store {root}: {who} is collecting or checking it", hint="try again when it has ended")


def _open(path: Path, *, readonly: bool) -> int:
    with store_faults("open its lock", path.parent):
        return os.open(path, (os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT) | os.O_CLOEXEC, 0o644)


def _try(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_and_name_holders(fd: int) -> str:
    status = os.fstat(fd)
    os.close(fd)
    pids = holders(status)
    if not pids:
        return "another process"
    return ", ".join(f"process {pid} ({_command(pid)})" for pid in pids[:3])


def holders(status: os.stat_result) -> list[int]:
    """The processes that hold a flock on this file, as /proc/locks names them (none when it can not say)."""
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    pids = set()
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted:
            pids.add(int(fields[4]))
    return sorted(pid for pid in pids if pid > 0)


def _command(pid: int) -> str:
    if pid == os.getpid():
        return "this one"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return _named([word.decode(errors="replace") for word in words if word])


def _named(words: list[str]) -> str:
    """A command line in short: ours by what they are called, others by their program and first words."""
    if any("fuse.daemon" in word for word in words):
        return "the node daemon"
    for at, word in enumerate(words[:4]):
        if Path(word).name == "pvisor" or "cli.main" in word:
            own = (word for word in words[at + 1 :] if not word.startswith(("-", "http:", "https:")))
            return f"pvisor {next(own, '')}".rstrip()
    if not words:
        return "unnamed"
    from textwrap import shorten

    return shorten(" ".join([Path(words[0]).name, *words[1:]]), 80, placeholder=" ...")
