"""Runs a process in a stage and stands in for it: exit code, signals, terminal.

    caller ── fork ──> init (pid 1: namespaces, mounts, reaping) ── spawn ──> workload (its own session)

Nothing is mounted outside the new mount namespace and the kernel ends init with the caller, so a caller that is killed
leaves no process and no mount; only a temporary stage's directory, for `Stages.sweep`.

A program that runs a temporary stage has its exit code when every process of the workload is dead and reaped. Init is
then on its way out, with the mounts; who removes the directory waits for that (`Stage.rest`).
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
from stage.boundary import init, rootfs, seccomp
from stage.boundary.process import ProcessSpec
from stage.boundary.streams import Streams
from stage.boundary.supervise import Caller, Signals, await_end, reap, usable
from stage.boundary.terminal import Copy, HostTerminal, raw_mode
from stage.errors import StageBusyError, StageSetupError
from stage.kept import cgroups
from stage.kept.cgroups import Group, Limits
from stage.kept.running import Init, handle
from stage.kept.stagefiles import Stage, joining


def run(
    lower: Path,
    spec: ProcessSpec,
    stage: Stage,
    *,
    net: Literal["none", "host"] = "none",
    interactive: bool = False,
    tty: bool = False,
    streams: Streams | None = None,
    timeout_s: float | None = None,
    limits: Limits | None = None,
) -> int:
    """Runs `spec` over `lower` with its writes in `stage`; returns the exit code a shell would give (128 + signal).

    The stage's workspace appears at /workspace under its own writes. Without `interactive` stdin is /dev/null. Signals
    that this process gets are passed on when called from the main thread. Raises StageSetupError (nothing started) and
    CommandError (126, 127).

    A program gives `streams` in place of its own standard streams, and keeps its signals. StageTimeoutError.
    """
    _check(lower, stage)
    host_network = net == "host"  # anything else, whatever it is, has none

    def enter() -> None:
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
        linux.unshare(flags | (0 if host_network else linux.CLONE_NEWNET))
        socket.sethostname(stage.hostname)
        if not host_network:
            rootfs.raise_loopback()
        rootfs.enter(lower, stage, host_network=host_network)

    env = {"HOSTNAME": stage.hostname, **spec.env}
    with cgroups.limited(stage.path, limits or Limits()) as group, stage.joined() as joined:
        return _start(
            ProcessSpec(argv=spec.argv, env=env, workdir=spec.workdir, user=spec.user),
            lambda: linux.unshare(linux.CLONE_NEWPID),
            enter,
            keep_fds=(stage.lock_fd,),
            on_ready=stage.record_init,
            interactive=interactive,
            tty=tty,
            group=group,
            joined=joined,
            given=streams,
            timeout_s=timeout_s,
            ending=(lambda pid: stage.rest.callback(await_end, pid))
            if stage.temporary and streams is not None
            else None,
        )


def join(running: Init, stage: Path, spec: ProcessSpec, *, interactive: bool = False, tty: bool = False) -> int:
    """Runs `spec` beside what runs in a stage (from `Stages.running`), within the same limits.

    `stage` is the stage's directory. Its init stays until the last command has ended. StageBusyError when that is just
    happening, or StageSetupError where the kernel notices it: nothing was started. StageEndedError when someone ends
    the stage.
    """
    _require_root()
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWNET
    with joining(stage, running) as held, handle(running) as pidfd, cgroups.joined(stage) as group:
        if pidfd is None:
            raise StageBusyError(f"process {running.pid} of the stage has ended", hint="run the command again")
        return _start(
            spec,
            lambda: linux.setns(pidfd, linux.CLONE_NEWPID),
            lambda: linux.setns(pidfd, flags),
            keep_fds=(pidfd, held),
            on_ready=lambda _pid: None,
            interactive=interactive,
            tty=tty,
            group=group,
        )


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
    group: Group,
    joined: int | None = None,
    given: Streams | None = None,
    timeout_s: float | None = None,
    ending: Callable[[int], object] | None = None,
) -> int:
    reap()
    _plug_standard_descriptors()
    seccomp.program()  # made here, it is there for every later start
    terminal = HostTerminal() if tty else None
    channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with channel, far, _input_pipe(interactive and not tty) as (pipe, feed), raw_mode(terminal):
        stdin = pipe if pipe is not None else usable(0) if interactive else None
        streams = init.Descriptors(stdin=stdin, stdout=usable(1), stderr=usable(2), terminal=terminal)
        if given is not None:
            streams = init.Descriptors(stdin=given.stdin, stdout=given.stdout, stderr=given.stderr, terminal=None)
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
                        group=group,
                        joined=joined,
                        ahead=ending is not None,
                    )
                )
            far.close()
            group.expect(pid)
            if pipe is not None:
                os.close(pipe)
            caller = Caller(pid, channel, terminal, signals, on_ready)
            caller.input = Copy(0, feed) if feed is not None else None
            caller.interactive = interactive and usable(0) is not None
            caller.shared = joined is not None
            if ending is not None:
                caller.ending = ending
            if given is not None:
                given.started()
                caller.pumps = given.pumps
            return caller.attend(timeout_s=timeout_s, catch=given is None)


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
        except OSError as error:
            raise StageSetupError(f"process of the stage: {os.strerror(error.errno or 0)}") from error
        finally:
            if pid != 0:
                linux.setns(own, linux.CLONE_NEWPID)
        return pid
    finally:
        os.close(own)
