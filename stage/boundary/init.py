"""The first process of a stage: sets it up, starts the workload, hands on signals, reaps, and gives its exit code.

It runs in a fork of the caller and after `enter` stands in an untrusted root, so nothing may be imported there: the
import system is switched off first. It keeps its capabilities, and nothing of it can be reached by the workload, which
gets those of a container, a filter of system calls, and the stage's limits.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn

from fuse import linux
from imaged.errors import PvisorError
from imaged.flock import try_lock
from stage.boundary import rootfs, users, workload
from stage.boundary.process import ProcessSpec
from stage.boundary.terminal import HostTerminal, open_pty
from stage.errors import SETUP_FAILED, CommandError, StageSetupError
from stage.kept.cgroups import Group

# Sent by the kernel when the caller dies, where there is something to do then: put the caller's terminal back, or see
# if others run in the stage. A caller that gives its workload up sends it as well.
PARENT_DIED = signal.SIGRTMAX
FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGTERM,
    signal.SIGCONT,
    signal.SIGTSTP,
    signal.SIGWINCH,
)
# As the terminal driver would: to every process of the group, not only to its first.
_TO_GROUP = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP}
_MESSAGE_BYTES = 32 << 10


class Descriptors(NamedTuple):
    """Where the workload's stdin, stdout and stderr come from; None is /dev/null. With a terminal, it is all three."""

    stdin: int | None
    stdout: int | None
    stderr: int | None
    terminal: HostTerminal | None


class Startup(NamedTuple):
    """What the fork needs: the workload, how to get into its namespaces, and the channel back to the caller."""

    spec: ProcessSpec
    streams: Descriptors
    enter: Callable[[], None]
    channel: socket.socket
    keep_fds: tuple[int, ...]
    signal_mask: frozenset[int]
    group: Group
    joined: int | None = None
    """A lock that every command which joins the stage holds shared; None where nobody can join."""
    ahead: bool = False
    """The caller wants the exit code when all processes of the stage are dead, ahead of the end of init itself."""


def main(startup: Startup) -> NoReturn:
    """Runs in the fork, with every signal blocked; never returns into the caller's code."""
    code = SETUP_FAILED
    try:
        code = _serve(startup)
    except BaseException as error:
        _report(startup.channel, error)
        code = _code_of(error)
    finally:
        os._exit(code)


def _code_of(error: BaseException) -> int:
    return int(getattr(error, "exit_code", SETUP_FAILED))


def _serve(startup: Startup) -> int:
    terminal_fd = _isolate(startup)
    startup.enter()
    identity = users.lookup(startup.spec.user, rootfs.read_text("/etc/passwd"), rootfs.read_text("/etc/group"))
    env = {"HOME": identity.home, **startup.spec.env}
    spec = startup.spec._replace(env=env, workdir=_workdir(startup.spec))
    slave = _terminal(startup, identity.uid)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    last = int(rootfs.read_text("/proc/sys/kernel/cap_last_cap") or b"40")
    killed = startup.group.killed_for_memory()
    streams = startup.streams
    stdin, stdout, stderr = (
        null if fd is None or _leads_out(fd) else fd
        for fd in ((slave, slave, slave) if slave is not None else (streams.stdin, streams.stdout, streams.stderr))
    )
    first = workload.Workload(
        spec=spec,
        identity=identity,
        streams=(stdin, stdout, stderr),
        terminal=slave,
        group=startup.group,
        signal_mask=startup.signal_mask,
        last_capability=last,
    )
    if startup.joined is not None:  # until here nobody can have joined, and the kernel ends all of it with the caller
        linux.die_with_parent(PARENT_DIED)
    startup.channel.send(json.dumps({"ready": True}).encode())  # signals that come from now on are the workload's
    code = None
    try:
        pid = workload.start(first, partial(_report, startup.channel))
    except Exception as error:
        _report(startup.channel, error)
        code = _code_of(error)
    complaints = _complaints(startup, slave)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if startup.streams.stdin is not None and startup.streams.stdin > 2:
        os.close(startup.streams.stdin)
    # The slave stays open, so that a workload that closes and reopens its terminal does not end the caller's copying.
    if code is None:
        code = _attend(pid)
    killed = startup.group.killed_for_memory() - killed
    if killed and complaints is not None:
        _complain(complaints, killed, startup.group)
    if terminal_fd is not None and startup.streams.terminal is not None and not _caller_lives(startup.channel):
        startup.streams.terminal.restore(terminal_fd)
    mine = [fd for fd in (terminal_fd, slave, complaints) if fd is not None]
    # Got, the lock is kept for good: who comes later finds that the stage has ended.
    if startup.joined is not None and not try_lock(startup.joined):
        linux.die_with_parent(0)
        _tell(startup, code, mine)
        fcntl.flock(startup.joined, fcntl.LOCK_EX)
    elif startup.ahead and os.getpid() == 1:
        _end_others()
        _tell(startup, code, mine)
    return code


def _end_others() -> None:
    """Kills and reaps all other processes of the stage: each is a child of init, or is when its parent dies."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _tell(startup: Startup, code: int, mine: list[int]) -> None:
    """The caller gets its exit code, and has the ends of its streams to itself; orphans are reaped by the kernel."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    outputs = {startup.streams.stdout, startup.streams.stderr} - {startup.streams.stdin}  # which is closed already
    for fd in {*mine, *(fd for fd in outputs if fd is not None and fd > 2)}:
        os.close(fd)
    with startup.channel, suppress(OSError):  # the caller may be gone
        startup.channel.send(json.dumps({"exit": code}).encode())


def _isolate(startup: Startup) -> int | None:
    """Cuts the fork off from the caller: imports, descriptors, session. Returns its copy of the caller's terminal."""
    gc.disable()  # objects of the caller must not close descriptors whose numbers are used again here
    sys.path[:], sys.meta_path[:], sys.path_hooks[:] = [], [], []
    linux.set_undumpable()
    linux.set_process_name("pvisor-init")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, there would be nothing to wait for
    os.setsid()
    os.umask(0o022)  # of all that is made in the root, whatever the caller's is
    terminal = startup.streams.terminal
    terminal_fd = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3) if terminal is not None and terminal.attributes else None
    streams = (startup.streams.stdin, startup.streams.stdout, startup.streams.stderr)
    mine = (terminal_fd, startup.joined, startup.channel.fileno(), *startup.keep_fds, *startup.group.descriptors)
    linux.close_except({fd for fd in (*streams, *mine) if fd is not None} | {0, 1, 2})
    linux.die_with_parent(PARENT_DIED if terminal_fd is not None else signal.SIGKILL)
    poll = select.poll()
    poll.register(startup.channel, 0)
    if poll.poll(0):  # the caller died before the kernel was told to tell us
        os._exit(SETUP_FAILED)
    return terminal_fd


def _terminal(startup: Startup, uid: int) -> int | None:
    terminal = startup.streams.terminal
    if terminal is None:
        return None
    master, slave = open_pty(terminal, uid)
    socket.send_fds(startup.channel, [json.dumps({"pty": True}).encode()], [master])
    os.close(master)
    return slave


def _complaints(startup: Startup, slave: int | None) -> int | None:
    """The workload's stderr, kept where the kernel may end processes for want of memory."""
    stderr = slave if slave is not None else startup.streams.stderr
    if stderr is None or startup.group.events is None:
        return None
    return fcntl.fcntl(stderr, fcntl.F_DUPFD_CLOEXEC, 3)


def _complain(stderr: int, killed: int, group: Group) -> None:
    processes = "1 process" if killed == 1 else f"{killed} processes"
    limit = group.limits.memory_bytes
    where = f" within the stage's {limit / (1 << 20):g} MiB" if limit is not None else ""
    try:
        os.write(stderr, f"pvisor: out of memory{where}: the kernel killed {processes}\n".encode())
    except OSError:  # nobody reads it, and the exit code tells as well
        return


def _workdir(spec: ProcessSpec) -> str:
    """Made when missing. Resolved as text, so that a link in /proc to a descriptor leads nowhere else."""
    try:
        return rootfs.ensure_directory(spec.workdir)
    except StageSetupError as error:
        raise StageSetupError(f"working directory {spec.workdir}: {error.message}", hint="give -w DIR") from error


def _caller_lives(channel: socket.socket) -> bool:
    """Asks. A caller that dies hangs up the pty first, so that the workload may well end before the kernel tells us."""
    try:
        channel.send(json.dumps({"ended": True}).encode())
        return bool(channel.recv(1))
    except OSError:
        return False


def _leads_out(fd: int) -> bool:
    """From a directory of the host, `..` goes up to the host's root, past the root of the stage."""
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def _attend(first: int) -> int:
    """Reaps every orphan and passes signals on until the workload ends; returns the exit code a shell would give."""
    while True:
        code = _reap(first)
        if code is not None:
            return code
        number = signal.sigwaitinfo(signal.valid_signals()).si_signo
        if number == signal.SIGCHLD:
            continue
        if number == PARENT_DIED:  # or wants it ended; what others run in the stage may stay
            os.kill(first, signal.SIGKILL)
            return 128 + signal.SIGKILL
        _pass_on(number, first)


def _reap(first: int) -> int | None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return SETUP_FAILED
        if pid == 0:
            return None
        if pid == first:
            return exit_code(status)


def exit_code(status: int) -> int:
    """A wait status as a shell gives it: 128 + N for a process that signal N ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _pass_on(number: int, first: int) -> None:
    # The stage is a session of its own, where the default of SIGTSTP is to do nothing.
    number = signal.SIGSTOP if number == signal.SIGTSTP else number
    try:
        if number in _TO_GROUP or number == signal.SIGSTOP:
            os.killpg(first, number)
        else:
            os.kill(first, number)
    except ProcessLookupError:  # not a session leader yet, or gone already
        try:
            os.kill(first, number)
        except ProcessLookupError:
            return


def _report(channel: socket.socket, error: BaseException) -> None:
    if isinstance(error, PvisorError):
        message, hint = error.message, error.hint
    elif isinstance(error, OSError) and error.errno in workload.UNFETCHED:
        message, hint = f"start of the stage: {workload.UNFETCHED_MESSAGE}: {error.strerror}", workload.UNFETCHED_HINT
    else:
        message, hint = f"start of the stage: {type(error).__name__}: {error}", ""
    fields = {
        "error": message[:_MESSAGE_BYTES],
        "hint": hint[:_MESSAGE_BYTES],
        "code": error.exit_code if isinstance(error, CommandError) else SETUP_FAILED,
    }
    try:
        channel.send(json.dumps(fields).encode())
    except OSError:  # the caller is gone
        return
