"""The files in PVISOR_RUN that commands and the node daemon meet at, and the locks on them.

    node.sock     the daemon's control socket
    node.pid      its process id; the daemon holds a lock on it while it lives
    node.lock     held by whoever starts or stops the daemon
    node.log      what the daemon logs
    blocks        the FUSE mount
    images/ID     EROFS mounts
    leases/ID     locked, shared, by every process that uses the mount images/ID
    leases/vm-NAME  locked, shared, by the QEMU of a virtual machine
    leases.lock   held by whoever looks which leases of machines are held
    metadata/     metadata images for which PVISOR_HOME had no room
    mounts.json   directories on which the user mounted an image
    mounts.lock   held by whoever changes mounts or the table

All locks are flock(2) locks: a killed process leaves none behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fuse.errors import NodeError
from imaged.config import Config
from imaged.flock import try_lock

_POLL_S = 0.01


def socket_path(config: Config) -> Path:
    return config.run / "node.sock"


def pid_path(config: Config) -> Path:
    return config.run / "node.pid"


def log_path(config: Config) -> Path:
    return config.run / "node.log"


def lease_path(config: Config, image: str) -> Path:
    return config.run / "leases" / image


def metadata_path(config: Config) -> Path:
    return config.run / "metadata"


def table_path(config: Config) -> Path:
    return config.run / "mounts.json"


def make(config: Config) -> None:
    """The directories; those made here are closed to other users, because images may be private."""
    for directory in (config.run, config.blocks, config.images, config.run / "leases"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            if error.errno == errno.ENOTCONN:  # it is there, under the mount of a daemon that died
                continue
            raise _unwritable(directory, error) from error


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """For a block that makes or writes a file here. NodeError says what to do."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> NodeError:
    hint = "set PVISOR_RUN to a directory you can write"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free space there, or set PVISOR_RUN to a larger file system"
    return NodeError(f"can not make {path}: {error.strerror}", hint=hint)


@contextlib.contextmanager
def starting(config: Config) -> Iterator[None]:
    """Alone with the right to start or stop the daemon."""
    with _alone(config.run / "node.lock", wait_s=120.0):
        yield


@contextlib.contextmanager
def mounting(config: Config) -> Iterator[None]:
    """Alone with the right to change mounts and the mount table."""
    with _alone(config.run / "mounts.lock", wait_s=60.0):
        yield


@contextlib.contextmanager
def looking(config: Config) -> Iterator[None]:
    """Alone with the right to try the locks of leases: two who try at once would take each other for a holder."""
    with _alone(config.run / "leases.lock", wait_s=10.0):
        yield


@contextlib.contextmanager
def _alone(path: Path, *, wait_s: float) -> Iterator[None]:
    with changing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock(fd, path, wait_s=wait_s)
        yield
    finally:
        os.close(fd)


def lock(fd: int, path: Path, *, wait_s: float) -> None:
    """Take the exclusive lock; NodeError names its holder when it stays taken for `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not try_lock(fd):
        if time.monotonic() >= deadline:
            from imaged.chunkstore.storelock import holders  # imports LMDB, which the hot path does without

            pids = ", ".join(map(str, holders(os.fstat(fd)))) or "another process"
            message = f"{path} has been locked by {pids} for {wait_s:.0f} s"
            raise NodeError(message, hint="see what that process waits for")
        time.sleep(_POLL_S)


def take_lease(config: Config, image: str) -> int:
    """Say that this process uses an image's mount, until the descriptor that is returned is closed or it ends."""
    fd = os.open(lease_path(config, image), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    return fd


def daemon_pid(config: Config) -> int | None:
    """The process that holds the daemon's lock, whether or not it answers."""
    try:
        fd = os.open(pid_path(config), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if try_lock(fd):
            return None
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
