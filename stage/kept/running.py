"""What runs in a stage: its init, written down for other commands, and the processes of its pid namespace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_NAME = "init"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PF_EXITING = 0x4


class Init(NamedTuple):
    """A running init, told from a later process with the same pid by its start time (clock ticks since boot)."""

    pid: int
    started: int


def start_time(pid: int) -> int:
    """Of a process that is there, if only as a zombie. OSError when it is gone."""
    return int(_stat(pid)[19])


def record(directory: Path, pid: int) -> None:
    """Write down that this init runs in the stage."""
    fields = {"pid": pid, "started": start_time(pid), "boot": _boot()}
    temporary = directory / f".{_NAME}.new"
    temporary.write_text(json.dumps(fields) + "\n")
    temporary.replace(directory / _NAME)


def recorded(directory: Path) -> bool:
    """Whether something was ever noted to run in the stage since `forget`."""
    return (directory / _NAME).exists()


def forget(directory: Path) -> None:
    """Nothing runs in the stage any more."""
    (directory / _NAME).unlink(missing_ok=True)


def find(directory: Path) -> Init | None:
    """The init that runs in the stage now. One that is ending is none: nothing can join it any more."""
    init = _recorded(directory)
    try:
        return init if init is not None and not int(_stat(init.pid)[6]) & _PF_EXITING else None
    except OSError:
        return None


def ended(directory: Path, timeout_s: float) -> bool:
    """Waits until no init is there and with it no process of the stage; False when that takes longer.

    An init lets go of the stage's lock when it begins to end, and has ended when the last of its processes has.
    """
    init = _recorded(directory)
    if init is None:
        return True
    with handle(init) as pidfd:
        if pidfd is None:
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))


def processes(inits: Iterable[Init]) -> dict[Init, tuple[int, ...]]:
    """The host's pids of the processes in each of these stages, joined ones included, in one look at /proc.

    Without pVisor's own: the init, and the parent of each joined command, which are those whose parent is outside.
    """
    spaces = {space: init for init in inits if (space := _pid_namespace(init.pid)) is not None}
    found: dict[int, tuple[int, Init]] = {}
    if spaces:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                space = _pid_namespace(int(entry.name))
                if space in spaces and (parent := _parent(int(entry.name))) is not None:
                    found[int(entry.name)] = parent, spaces[space]
    members: dict[Init, list[int]] = {init: [] for init in spaces.values()}
    for pid, (parent, init) in sorted(found.items()):
        if parent in found and found[parent][1] == init:
            members[init].append(pid)
    return {init: tuple(pids) for init, pids in members.items()}


def end(init: Init) -> None:
    """Kill every process of the stage: the kernel does, with pid 1 of their namespace. Does nothing when it is gone."""
    with handle(init) as pidfd, contextlib.suppress(ProcessLookupError):
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


@contextlib.contextmanager
def handle(init: Init) -> Iterator[int | None]:
    """A handle of this very process, or None."""
    try:
        pidfd = os.pidfd_open(init.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        try:
            same = start_time(init.pid) == init.started
        except OSError:
            same = False
        yield pidfd if same else None
    finally:
        os.close(pidfd)


def _recorded(directory: Path) -> Init | None:
    """What is written down, when that process is there; what a crash or an earlier boot left is nothing."""
    try:
        fields = json.loads((directory / _NAME).read_bytes())
        init = Init(pid=int(fields["pid"]), started=int(fields["started"]))
        return init if fields["boot"] == _boot() and start_time(init.pid) == init.started else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stat(pid: int) -> list[bytes]:
    """/proc/PID/stat from field 3 on; the name in field 2 may hold spaces and parentheses. OSError."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _boot() -> str:
    return _BOOT_ID.read_text().strip()


def _pid_namespace(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    try:
        return int(_stat(pid)[1])
    except OSError:
        return None
