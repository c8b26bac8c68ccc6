"""A node daemon with directories of its own, that leaves nothing behind however a test ends."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fuse import linux, rundir
from fuse.imagemount import drop_leases
from fuse.mountinfo import mount_points
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.conversion.convert import convert
from imaged.names import ImageName, SourceName


@contextlib.contextmanager
def node_directories(directory: Path, *, server: str | None = None) -> Iterator[Config]:
    """A configuration for daemons; at the end they are killed and everything below `directory` is unmounted."""
    config = Config(home=directory / "home", run=directory / "run", server=server)
    try:
        yield config
    finally:
        kill_daemon(config)
        for mount in reversed(mount_points()):
            if mount.path.is_relative_to(directory):
                with contextlib.suppress(OSError):
                    linux.umount(mount.path, linux.MNT_DETACH)
        drop_leases()


def kill_daemon(config: Config) -> None:
    """kill -9, and wait until it is gone. Does nothing when none runs."""
    pid = rundir.daemon_pid(config) if config.run.is_dir() else None
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: rundir.daemon_pid(config) != pid)


def wait_for(done: Callable[[], object], wait_s: float = 60.0) -> None:
    deadline = time.monotonic() + wait_s
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def convert_tree(store: Path, root: Path, name: str) -> None:
    """Convert a plain directory into the store under this name."""
    with ChunkStore.open(store) as opened:
        convert(opened, SourceName.parse(f"dir:{root}"), name=ImageName.parse(name), platform=None)


def forget_profiles(store: Path) -> None:
    """As if no run of any image had been recorded: what is read then comes only when it is read."""
    with ChunkStore.open(store) as opened:
        for image in opened.profiles.ids():
            opened.profiles.delete(image)
