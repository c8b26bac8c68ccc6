"""A detached QEMU process: how it is started, found again, waited for, and how it ended.

    qemu.pid     written by the process itself before it becomes QEMU: its line of /proc/self/stat, so the pid first
    qemu.log     what QEMU prints
    qemu.live    QEMU's own pid file. QEMU removes it when it exits; after a crash or a kill it is still there
    qemu.ended   how it ended, written by the first who learns it

The process is no child of most commands that ask, so its exit status comes from wherever the kernel still has it: our
own child, a zombie, or (Linux 6.15 and later) a process descriptor that was open when it ended. When nobody has it,
`qemu.live` still tells an exit from a crash. Without its qemu.pid a QEMU is found by its command line (`vmm.stray`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from fuse.smallpages import without_huge_pages
from vmm import procstat, stray
from vmm.errors import QemuError, QemuTimeoutError, VmStateError

# `sh` so that the pid file is there before QEMU is, whatever happens to the starter. It costs a millisecond.
_SHELL = "/bin/sh"
_SCRIPT = 'cd / && ulimit -c 0 &&%s read -r line </proc/self/stat && echo "$line" >"$0" && exec "$@"'
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_DEFAULTED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)
_KILLED_S = 20.0
_PID_WRITTEN_S = 2.0
_REAPED_S = 0.1
_ENDING_S = 3.0
_POLL_S = 0.002
_LOG_TAIL_BYTES = 4096
_TERMINATED = "terminating on signal"
# A socket whose path was too long for an address has another one to QEMU, which it can not remove.
_NOISE = "Failed to unlink socket"


class Ending(NamedTuple):
    """How a QEMU ended: `exit_code` or `signal`, or neither when the kernel has forgotten it.

    `crashed` is then what is known: it did not exit by itself. `log_line` is the last line of its log, or empty.
    """

    exit_code: int | None = None
    signal: int | None = None
    crashed: bool = False
    log_line: str = ""

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal} ({_signal_name(self.signal)})"
        if self.exit_code is not None:
            return f"exit status {self.exit_code}"
        return "killed or crashed" if self.crashed else "ended"

    @property
    def powered_off(self) -> bool:
        """Whether QEMU exited as it does when the guest powers off or reboots, or when it is told to quit."""
        return not self.crashed and self.exit_code in (0, None) and _TERMINATED not in self.log_line

    def error(self, what: str = "QEMU ended", *, hint: str = "") -> QemuError:
        line = f"; its log ends: {self.log_line}" if self.log_line else ""
        cause = "the guest powered off or rebooted" if self.powered_off else str(self)
        return QemuError(f"{what}: {cause}{line}", ended=str(self), log_line=self.log_line, hint=hint)


class Process:
    """A QEMU and a descriptor on it. One thread at a time."""

    __slots__ = ("_pidfd", "_run", "pid")

    def __init__(self, run_dir: Path, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._run, self._pidfd = run_dir, pidfd

    @classmethod
    def spawn(
        cls, argv: Sequence[str], run_dir: Path, *, inherit: Sequence[int], files_bytes: int | None = None
    ) -> Self:
        """Start it in a session of its own; it gets the descriptors of `inherit`, under the same numbers, and no other.
        With `files_bytes` it makes no file larger: writing more is an error to it. OSError."""
        for stale in ("qemu.pid", stray.LIVE_NAME, "qemu.ended"):
            (run_dir / stale).unlink(missing_ok=True)
        (run_dir / "qemu.pid").touch(mode=0o600)  # from here on somebody may be about to write it
        # POSIX has it in units of 512 bytes; the signal would end it, and is ignored.
        limit = "" if files_bytes is None else f" trap '' XFSZ && ulimit -f {files_bytes >> 9} &&"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        log = os.open(run_dir / "qemu.log", flags, 0o600)
        try:
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            try:
                actions: list[tuple[int, ...]] = [
                    (os.POSIX_SPAWN_DUP2, null, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ]
                # On itself: this clears close-on-exec in the new process alone.
                actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in inherit]
                # What whoever started us has left open, a lock or a pipe, would be held as long as QEMU lives.
                actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in _open_descriptors() if fd > 2 and fd not in inherit]
                pid = _spawned(
                    run_dir,
                    lambda: os.posix_spawn(
                        _SHELL,
                        [_SHELL, "-c", _SCRIPT % limit, str(run_dir / "qemu.pid"), *argv],
                        _ENVIRONMENT,
                        file_actions=actions,
                        setsid=True,
                        setsigmask=(),
                        setsigdef=_DEFAULTED,
                    ),
                )
            finally:
                os.close(null)
        finally:
            os.close(log)
        try:
            return cls(run_dir, pid, os.pidfd_open(pid))
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    @classmethod
    def attach(cls, run_dir: Path) -> Self:
        """The QEMU of this directory; VmStateError tells how it ended when it does not live."""
        found = _find(run_dir)
        if found is None:
            ending = last_ending(run_dir)
            if ending is None:
                raise VmStateError(f"no QEMU was started in {run_dir}")
            raise VmStateError(ending.error("QEMU is gone").message)
        return cls(run_dir, *found)

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._pidfd

    def ending(self) -> Ending | None:
        """How it ended, or None while it lives."""
        return self._learn() if _readable(self._pidfd, 0) else None

    def wait(self, timeout_s: float) -> Ending:
        """Wait until it has ended. QemuTimeoutError."""
        if not _readable(self._pidfd, timeout_s):
            raise QemuTimeoutError(f"QEMU (pid {self.pid}) did not end in {timeout_s:.0f} s")
        return self._learn()

    def kill(self) -> Ending:
        """End it at once, whatever it does."""
        self.send_kill()
        return self.wait(_KILLED_S)

    def send_kill(self) -> None:
        """As `kill`, without waiting for it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the process, which lives on."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _learn(self) -> Ending:
        status = _wait_status(self._run, self.pid, self._pidfd)
        if status is not None:
            _record(self._run, status)
        ending = last_ending(self._run)
        return Ending() if ending is None else ending


def alive(run_dir: Path) -> bool:
    """Whether the QEMU that was started in this directory lives."""
    return pid_of(run_dir) is not None


def pid_of(run_dir: Path) -> int | None:
    """The process id of the QEMU that was started in this directory, when it lives."""
    found = _find(run_dir)
    if found is None:
        return None
    os.close(found[1])
    return found[0]


def has_ended(run_dir: Path) -> bool:
    """Whether there is no QEMU, or it is ending: its sockets go before it does."""
    try:
        found = Process.attach(run_dir)
    except VmStateError:
        return True
    try:
        found.wait(_ENDING_S)
    except QemuTimeoutError:
        return False
    finally:
        found.close()
    return True


def is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped this process."""
    now = procstat.stat(pid)
    return now is not None and now.state in "Tt"


def last_ending(run_dir: Path) -> Ending | None:
    """How the QEMU of this directory ended, for one that lives no more; None when there was none."""
    line = _last_line(run_dir / "qemu.log")
    try:
        status = json.loads((run_dir / "qemu.ended").read_bytes())["wait_status"]
    except (OSError, ValueError, KeyError):
        if not (run_dir / "qemu.pid").exists():
            return None
        return Ending(crashed=(run_dir / stray.LIVE_NAME).exists(), log_line=line)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Ending(signal=-code, crashed=True, log_line=line)
    return Ending(exit_code=code, log_line=line)


def _spawned(run_dir: Path, spawn: Callable[[], int]) -> int:
    """The pid; what was started all the same is killed when an interrupt comes meanwhile."""
    try:
        return without_huge_pages(spawn)
    except OSError:
        raise
    except BaseException:
        found = _find(run_dir)
        if found is not None:
            Process(run_dir, *found).kill()
            os.close(found[1])
        raise


def _open_descriptors() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def _find(run_dir: Path) -> tuple[int, int] | None:
    """Pid and a descriptor of the living QEMU of this directory, which is no other process that has its pid now."""
    written = _read_pid(run_dir / "qemu.pid") or _stray(run_dir)
    if written is None:
        return None
    pid, started = written
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    now = procstat.stat(pid)
    if now is not None and now.started == started:
        if now.state not in "ZX":
            return pid, pidfd
        status = _wait_status(run_dir, pid, pidfd)
        if status is not None:
            _record(run_dir, status)
    os.close(pidfd)
    return None


def _stray(run_dir: Path) -> tuple[int, int] | None:
    """As `_read_pid`, for one whose pid file somebody has removed; it gets another."""
    pid = stray.find(run_dir)
    now = None if pid is None else procstat.stat(pid)
    if now is None:
        return None
    with contextlib.suppress(OSError):  # there may be no directory, and no room
        (run_dir / "qemu.pid").write_text(Path(f"/proc/{now.pid}/stat").read_text())
    return now.pid, now.started


def _read_pid(path: Path) -> tuple[int, int] | None:
    """Pid and start time. The file is empty for a moment while the new process writes it."""
    deadline = time.monotonic() + _PID_WRITTEN_S
    while True:
        try:
            text = path.read_text()
        except FileNotFoundError:
            return None
        if text.endswith("\n"):
            try:
                stat = procstat.Stat.parse(text)
            except (ValueError, IndexError):  # somebody else wrote it
                return None
            return stat.pid, stat.started
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)


def _wait_status(run_dir: Path, pid: int, pidfd: int) -> int | None:
    """The wait status of a process that has ended, from whoever still has it. Our own child is reaped by this."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        result = None  # another's child, or reaped by another thread
    if result is not None:
        return result.si_status << 8 if result.si_code == os.CLD_EXITED else result.si_status
    deadline = time.monotonic() + _REAPED_S
    while time.monotonic() < deadline and not (run_dir / "qemu.ended").exists():
        status = procstat.status_of_descriptor(pidfd)
        if status is not None:
            return status
        stat = procstat.stat(pid)
        if stat is not None and stat.state in "ZX":
            return stat.exit_status
        time.sleep(_POLL_S)
    return None


def _record(run_dir: Path, wait_status: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # the VM was removed meanwhile
        (run_dir / "qemu.ended").write_text(json.dumps({"wait_status": wait_status}))


def _last_line(path: Path) -> str:
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip() and _NOISE not in line), "")


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
