"""Starting and stopping the node daemon, off the hot path."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fuse import linux, mounts, rundir, vmlease
from fuse.errors import MountError, NodeError
from fuse.mountinfo import mount_points, peer_groups, users_elsewhere
from fuse.node import Node, connect
from imaged import submodule
from imaged.config import Config

log = logging.getLogger(__name__)
_READY_S = 60.0
_END_S = 30.0
_PASSING_USE_S = 0.5
_POLL_S = 0.01
_MOST_NAMED = 5


def start(config: Config) -> Node:
    """The daemon that runs, or a new one; of several callers one starts it and the others wait. NodeError."""
    if os.geteuid() != 0:
        raise NodeError("the node daemon needs root: it mounts file systems", hint="run pvisor with sudo")
    rundir.make(config)
    with rundir.starting(config):
        node = connect(config)
        if node is not None:
            return node
        mounts.detach_all(config)
        _spawn(config)
    node = Node(config)
    mounts.restore(config, node, [entry for entry in mounts.user_mounts(config) if entry.detached])
    return node


def stop(config: Config) -> bool:
    """Unmount all images and end the daemon; whether one ran. NodeError says what is in use; all stays then."""
    if not config.run.is_dir():
        return False
    with rundir.starting(config):
        pid = rundir.daemon_pid(config)
        if pid is None:
            mounts.detach_all(config)
            return False
        machines = vmlease.held(config)
        if machines:
            raise _in_use_by_vms(pid, machines)
        ours = peer_groups(
            {one.device for one in mount_points() if config.blocks == one.path or config.images == one.path.parent}
        )
        released = mounts.release_all(config)
        if released.directories or released.busy:
            mounts.mount_again(config, Node(config), released.images)
            raise _in_use(pid, released)
        try:
            # Not by looking at the directory: a daemon that hangs would hang this too.
            if any(mount.path == config.blocks for mount in mount_points()):
                _umount(config.blocks)
            else:
                os.kill(pid, signal.SIGTERM)
        except MountError as error:
            if error.errno != errno.EBUSY:
                raise
            mounts.mount_again(config, Node(config), released.images)
            raise _used_elsewhere(pid, users_elsewhere(ours)) from error
        _end(config, pid)
        mounts.forget_all(config, released.images)
    return True


def _umount(path: Path) -> None:
    """Whatever process just gets a mount namespace of its own has all mounts of the host there, until it drops them."""
    busy: MountError | None = None

    def done() -> bool:
        nonlocal busy
        try:
            linux.umount(path)
        except MountError as error:
            if error.errno != errno.EBUSY:
                raise
            busy = error
            return False
        return True

    if not _wait(done, _PASSING_USE_S) and busy is not None:
        raise busy


def _in_use(pid: int, found: mounts.Released) -> NodeError:
    directories = [f"{entry.directory} ({entry.name} is mounted there)" for entry in found.directories]
    steps = [f"`pvisor umount {shlex.quote(entry.directory)}`" for entry in found.directories]
    if found.busy:
        steps.append("end what else uses it" if steps else "end what uses it")
    return NodeError(
        f"the node daemon (pid {pid}) is in use: {'; '.join(directories + found.busy)}",
        hint=f"{', '.join(steps)}, then try again",
    )


def _in_use_by_vms(pid: int, names: Sequence[str]) -> NodeError:
    named = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return NodeError(
        f"the node daemon (pid {pid}) is in use: the memory or disks of VM {named}{more} come from it",
        hint=f"`pvisor vm park {names[0]}` or `pvisor vm rm {names[0]}`, then try again",
    )


def _used_elsewhere(pid: int, users: Sequence[int]) -> NodeError:
    """Mounts that this namespace does not see: of a container, or copied by whoever got a namespace of its own."""
    named = [f"process {user} ({_command(user)})" for user in users[:_MOST_NAMED]]
    more = [f"{len(users) - _MOST_NAMED} more"] if len(users) > _MOST_NAMED else []
    who = f", of {', '.join(named + more)}" if named else ""
    return NodeError(
        f"the node daemon (pid {pid}) is in use: it is mounted in another mount namespace{who}",
        hint="end that, or unmount there what is pVisor's, then try again",
    )


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def _spawn(config: Config) -> None:
    """Start the process and wait until it answers; NodeError with its own reason otherwise."""
    command = [*submodule.command("fuse.daemon"), "--home", str(config.home), "--run", str(config.run)]
    if config.server is not None:
        command += ["--server", config.server]
    if config.cache_max_bytes is not None:
        command += ["--cache-max", str(config.cache_max_bytes)]
    reading, writing = os.pipe()
    try:
        try:
            with open(rundir.log_path(config), "ab") as output:
                # It forks off by itself, so that no caller has to wait for it as a child.
                subprocess.run(
                    [*command, "--ready-fd", str(writing)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[writing],
                    start_new_session=True,
                    cwd="/",
                    env=submodule.environment(),
                    check=False,
                )
        finally:
            os.close(writing)
        answer = _read_answer(config, reading)
    finally:
        os.close(reading)
    if not answer.get("ok"):
        raise NodeError(
            f"the node daemon did not start: {answer.get('error', 'it ended at once')}",
            hint=str(answer.get("hint") or f"see {rundir.log_path(config)}"),
        )


def _read_answer(config: Config, fd: int) -> dict[str, object]:
    ready, _, _ = select.select([fd], [], [], _READY_S)
    if not ready:
        raise NodeError(f"the node daemon was not ready within {_READY_S:.0f} s", hint=f"see {rundir.log_path(config)}")
    line = os.read(fd, 1 << 16)
    answer: dict[str, object] = json.loads(line) if line else {}
    return answer


def _end(config: Config, pid: int) -> None:
    """Wait until the daemon has ended; one that does not is killed."""
    if _wait(lambda: rundir.daemon_pid(config) != pid, _END_S):
        return
    log.warning("node daemon %d does not end: killing it", pid)
    os.kill(pid, signal.SIGKILL)
    if not _wait(lambda: rundir.daemon_pid(config) != pid, _END_S):
        raise NodeError(f"the node daemon (pid {pid}) does not end", hint=f"see {rundir.log_path(config)}")
    mounts.detach_all(config)


def _wait(done: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
