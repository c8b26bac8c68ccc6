"""Starts the workload: a process with its streams, user and privileges, which then is another program.

Privileges, user, filter and working directory belong to a thread in Linux. So a thread of init takes those of the
workload and starts the program as vfork(2) does, without a copy of init's memory: that copy, the faults of all pages
that init and it write next, and its removal would take longer than all else that a start does.
"""

from __future__ import annotations

import _thread
import errno
import fcntl
import os
import signal
import termios
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from fuse import linux
from stage.boundary import capabilities, seccomp
from stage.boundary.process import ProcessSpec
from stage.boundary.users import Credentials
from stage.errors import NOT_EXECUTABLE, NOT_FOUND, SETUP_FAILED, CommandError
from stage.kept.cgroups import Group

# What the node daemon answers, or the kernel in its place, when it can not get what is read.
UNFETCHED = {errno.EIO, errno.ENOTCONN}
UNFETCHED_MESSAGE = "the image's bytes could not be fetched"
UNFETCHED_HINT = "see if the server answers, and pvisor node status; node.log in PVISOR_RUN has the reason"
# What Python ignores for itself.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
_OOM_SCORE = "/proc/self/oom_score_adj"


class Workload(NamedTuple):
    """What the process is to be. `terminal` is the pty that its streams are, if they are one."""

    spec: ProcessSpec
    identity: Credentials
    streams: tuple[int, int, int]
    terminal: int | None
    group: Group
    signal_mask: frozenset[int]
    last_capability: int


def start(workload: Workload, report: Callable[[BaseException], None]) -> int:
    """Starts it as a child of this process, which is in the root of the stage and has one thread. Returns the pid.

    What a process can only do for itself needs a fork: to take a terminal, move to a cgroup, ask for the death of its
    parent, or give up that the kernel spares it. There `report` gets, in the child, the error that is raised else.
    """
    alone = os.getpid() == 1  # else the workload is in a namespace that does not end with this process
    if alone and workload.terminal is None and not workload.group.entrances and not _is_spared():
        return _spawn(workload)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become(workload, die_with=None if alone else parent)
        except BaseException as error:
            report(error)
            os._exit(getattr(error, "exit_code", SETUP_FAILED))
    return pid


def _spawn(workload: Workload) -> int:
    """posix_spawn(3) by a thread that ends with it."""
    streams = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in workload.streams]
    spawn = partial(
        os.posix_spawn,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)],
        setsid=True,
        setsigmask=workload.signal_mask,
        setsigdef=_IGNORED,
    )

    def work() -> int:
        linux.unshare(linux.CLONE_FS)
        _privileges(workload)
        linux.close_on_exec_from(3)
        seccomp.install()
        return execute(workload.spec, spawn)

    try:
        return _in_thread(work)
    finally:
        for fd in streams:
            os.close(fd)


def _in_thread(work: Callable[[], int]) -> int:
    """What another thread returns or raises. Less than `threading.Thread`: each page touched after a fork is copied."""
    outcome: list[int] = []
    failed: list[BaseException] = []
    done = _thread.allocate_lock()

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failed.append(error)
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(run, ())
    done.acquire()
    if failed:
        raise failed[0]
    return outcome[0]


def _become(workload: Workload, *, die_with: int | None) -> NoReturn:
    """In a process of its own."""
    os.setsid()
    if workload.terminal is not None:
        fcntl.ioctl(workload.terminal, termios.TIOCSCTTY, 0)
    _standard_streams(workload.streams)
    if _is_spared():
        _do_not_spare()
    workload.group.enter()
    _privileges(workload)
    if die_with is not None:  # set last: a change of user clears it
        linux.die_with_parent(signal.SIGKILL)
        if os.getppid() != die_with:
            os._exit(SETUP_FAILED)
    linux.close_on_exec_from(3)
    _default_signals(workload.signal_mask)
    seccomp.install()
    execute(workload.spec, os.execve)
    raise AssertionError("execve returned")


def _privileges(workload: Workload) -> None:
    """Of the calling thread."""
    os.chdir(workload.spec.workdir)
    linux.unshare(linux.CLONE_NEWCGROUP)  # its root is the cgroup that it is in
    capabilities.limit(workload.last_capability)
    linux.set_user(workload.identity.uid, workload.identity.gid, workload.identity.groups)


def _standard_streams(sources: tuple[int, int, int]) -> None:
    """Puts the sources at 0, 1 and 2, whichever of those numbers they have now."""
    safe = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in sources]
    for target, fd in enumerate(safe):
        os.dup2(fd, target)
        os.close(fd)


def _is_spared() -> bool:
    """Whether the caller is one that the kernel must spare when memory runs out."""
    try:
        fd = os.open(_OOM_SCORE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.read(fd, 16).startswith(b"-")
    finally:
        os.close(fd)


def _do_not_spare() -> None:
    """The workload of such a caller is not."""
    with suppress(OSError):  # a kernel that does not let it be raised decides for itself
        Path(_OOM_SCORE).write_bytes(b"0")


def _default_signals(mask: frozenset[int]) -> None:
    """What Python handles or ignores for itself is default again; what the caller ignores (nohup) stays ignored."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def execute(spec: ProcessSpec, start: Callable[[str, tuple[str, ...], dict[str, str]], int]) -> int:
    """`start`, as execve(2), of argv[0], looked up in the stage's PATH. CommandError as a shell would: 126 or 127."""
    program = spec.argv[0]
    if not program:
        raise CommandError("the command is an empty string", exit_code=NOT_FOUND, hint="give a command after --")
    places = [program]
    if "/" not in program:
        places = [os.path.join(place or ".", program) for place in spec.env.get("PATH", "").split(":")]
    failure: OSError | None = None
    for place in filter(_may_exist, places):
        try:
            return start(place, spec.argv, dict(spec.env))
        except OSError as error:
            error.filename = place
            failure = failure or error
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                break
    raise _not_executed(program, failure)


def _may_exist(path: str) -> bool:
    """Asked first, because a start that fails takes much longer."""
    try:
        Path(path).stat()
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def _not_executed(program: str, failure: OSError | None) -> CommandError:
    if failure is None:
        hint = "check the command after -- and the image's PATH"
        if program.startswith("-"):
            hint = "options go before the image's name; after it comes the command"
        return CommandError(f"{program}: not found in the image", exit_code=NOT_FOUND, hint=hint)
    if failure.errno in UNFETCHED:
        return CommandError(
            f"{failure.filename}: {UNFETCHED_MESSAGE}: {failure.strerror}",
            exit_code=NOT_EXECUTABLE,
            hint=UNFETCHED_HINT,
        )
    if failure.errno == errno.ENOENT:
        return CommandError(
            f"{failure.filename}: there, but the interpreter or loader it names is not in the image",
            exit_code=NOT_FOUND,
            hint="look at its first line, or run ldd on it",
        )
    hints = {
        errno.EACCES: "it must be a regular file with an execute bit for this user",
        errno.ENOEXEC: "it is built for another machine, or is a script without a #! line",
        errno.E2BIG: "arguments and environment are too long together",
    }
    return CommandError(
        f"{failure.filename}: can not be executed: {failure.strerror}",
        exit_code=NOT_EXECUTABLE,
        hint=hints.get(failure.errno or 0, ""),
    )
