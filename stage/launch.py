"""Runs a process in a stage and stands in for it: exit code, signals, terminal.

    caller ── fork ──> init (pid 1: namespaces, mounts, reaping) ── fork ──> workload (its own session)

Nothing is mounted outside the new mount namespace and the kernel ends init with the caller, so a caller that is killed
leaves no process and no mount; only a temporary stage's directory, for `Stages.sweep`.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fuse import linux
from fuse.errors import MountError
from stage import init, rootfs
from stage.errors import StageNotFoundError, StageSetupError
from stage.process import ProcessSpec
from stage.stages import Init, Stage, start_time
from stage.supervise import Caller, Signals, usable
from stage.terminal import Copy, HostTerminal, raw_mode


def run(
    lower: Path,
    spec: ProcessSpec,
    stage: Stage,
    *,
    net: Literal["none", "host"] = "none",
    interactive: bool = False,
    tty: bool = False,
) -> int:
    """Runs `spec` over `lower` with its writes in `stage`; returns the exit code a shell would give (128 + signal).

    The stage's workspace appears at /workspace under its own writes. Without `interactive` stdin is /dev/null. Signals
    that this process gets are passed on when called from the main thread. Raises StageSetupError (nothing started) and
    CommandError (126, 127).
    """
    _check(lower, stage)

    def enter() -> None:
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
        linux.unshare(flags | (linux.CLONE_NEWNET if net == "none" else 0))
        socket.sethostname(stage.hostname)
        if net == "none":
            rootfs.raise_loopback()
        rootfs.enter(lower, stage, host_network=net == "host")

    env = {"HOSTNAME": stage.hostname, **spec.env}
    return _start(
        ProcessSpec(argv=spec.argv, env=env, workdir=spec.workdir, user=spec.user),
        lambda: linux.unshare(linux.CLONE_NEWPID),
        enter,
        keep_fds=(stage.lock_fd,),
        on_ready=stage.record_init,
        interactive=interactive,
        tty=tty,
    )


def join(running: Init, spec: ProcessSpec, *, interactive: bool = False, tty: bool = False) -> int:
    """Runs `spec` beside what runs in a stage (from `Stages.running`); it ends with the stage at the latest."""
    _require_root()
    try:
        pidfd = os.pidfd_open(running.pid)
    except ProcessLookupError:
        pidfd = -1
    try:
        if pidfd < 0 or start_time(running.pid) != running.started:
            raise StageNotFoundError(f"process {running.pid} of the stage has ended", hint="run the command again")
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWNET
        return _start(
            spec,
            lambda: linux.setns(pidfd, linux.CLONE_NEWPID),
            lambda: linux.setns(pidfd, flags),
            keep_fds=(pidfd,),
            on_ready=lambda _pid: None,
            interactive=interactive,
            tty=tty,
        )
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise StageSetupError(f"a stage needs root, this is uid {os.geteuid()}", hint="run pvisor with sudo")


def _check(lower: Path, stage: Stage) -> None:
    _require_root()
    workspace = stage.workspace
    if not lower.is_dir():
        raise StageSetupError(f"image directory {lower} is not there", hint="see pvisor node status")
    if workspace is None:
        return
    if not workspace.is_dir():
        raise StageSetupError(
            f"workspace {workspace} is not a directory", hint="make it, or give --workspace an existing directory"
        )
    if stage.path.resolve().is_relative_to(workspace.resolve()):
        raise StageSetupError(
            f"workspace {workspace} contains the stage's own directory {stage.path}",
            hint="give a directory further down, or set PVISOR_HOME outside of it",
        )


def _start(
    spec: ProcessSpec,
    into_pid_namespace: Callable[[], None],
    enter: Callable[[], None],
    *,
    keep_fds: tuple[int, ...],
    on_ready: Callable[[int], None],
    interactive: bool,
    tty: bool,
) -> int:
    _plug_standard_descriptors()
    terminal = HostTerminal() if tty else None
    channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with channel, far, _input_pipe(interactive and not tty) as (pipe, feed), raw_mode(terminal):
        stdin = pipe if pipe is not None else usable(0) if interactive else None
        streams = init.Streams(stdin=stdin, stdout=usable(1), stderr=usable(2), terminal=terminal)
        with Signals() as signals:
            pid = _fork(into_pid_namespace)
            if pid == 0:
                init.main(
                    init.Startup(
                        spec=spec,
                        streams=streams,
                        enter=enter,
                        channel=far,
                        keep_fds=keep_fds,
                        signal_mask=signals.mask,
                    )
                )
            far.close()
            if pipe is not None:
                os.close(pipe)
            caller = Caller(pid, channel, terminal, signals, on_ready)
            caller.input = Copy(0, feed) if feed is not None else None
            caller.interactive = interactive and usable(0) is not None
            signals.catch()
            return caller.attend()


def _plug_standard_descriptors() -> None:
    """A closed 0, 1 or 2 becomes /dev/null, so that no descriptor of ours gets that number."""
    for fd in (0, 1, 2):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except OSError:
            os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


@contextmanager
def _input_pipe(wanted: bool) -> Iterator[tuple[int | None, int | None]]:
    """A terminal as stdin without a pty is read by us: in another session the workload would escape job control."""
    if not (wanted and os.isatty(0)):
        yield None, None
        return
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    yield reader, writer  # both ends are closed by those who use them


def _fork(into_pid_namespace: Callable[[], None]) -> int:
    """A fork whose child is in another pid namespace, while later children of the caller are not."""
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            into_pid_namespace()
        except MountError as error:
            raise StageSetupError(
                f"process namespace: {os.strerror(error.errno)}",
                hint="pvisor needs CAP_SYS_ADMIN and user.max_pid_namespaces > 0",
            ) from error
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                linux.setns(own, linux.CLONE_NEWPID)
        return pid
    finally:
        os.close(own)
