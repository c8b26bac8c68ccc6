"""The lock of a store directory: everyone who has it open holds it shared, gc and rebuild hold it alone.

It is a flock on `<root>/lock`, so a killed process leaves nothing behind. Who holds it is read from /proc/locks when a
message needs it: no list of process ids can then be out of date.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from imaged.errors import StoreBusyError
from imaged.faults import store_faults

LOCK_NAME = "lock"
WAIT_S = 30.0
"""How long opening a store waits for a collection or a rebuild to end."""
_POLL_S = 0.05


@dataclass(slots=True)
class StoreLock:
    """A held lock (a context manager). `fd` is -1 when released, or when a read-only store has no lock file."""

    fd: int

    @classmethod
    def shared(cls, root: Path, *, readonly: bool = False, wait_s: float = WAIT_S) -> Self:
        """Wait until no process holds it alone, at most `wait_s`; StoreBusyError names the holder then."""
        if readonly and not (root / LOCK_NAME).exists():
            return cls(-1)
        fd = _open(root, readonly=readonly)
        deadline = time.monotonic() + wait_s
        while not _try(fd, fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                who = _close_and_name_holders(fd)
                raise StoreBusyError(
                    f"store {root}: {who} has been collecting or rebuilding it for {wait_s:.0f} s",
                    hint="try again when it has ended",
                )
            time.sleep(_POLL_S)
        return cls(fd)

    @classmethod
    def exclusive(cls, root: Path) -> Self:
        """Without waiting; StoreBusyError names the processes that have the store open."""
        fd = _open(root, readonly=False)
        if not _try(fd, fcntl.LOCK_EX):
            who = _close_and_name_holders(fd)
            raise StoreBusyError(
                f"store {root}: {who} has it open",
                hint="stop it (`pvisor node stop` for the node daemon, SIGTERM for `pvisor serve`) and try again",
            )
        return cls(fd)

    def release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _open(root: Path, *, readonly: bool) -> int:
    with store_faults("open its lock", root):
        return os.open(root / LOCK_NAME, os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT, 0o644)


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
