"""Leases of virtual machines: while one is held the node daemon is not stopped, as the machine's memory is its files.

A lease is a shared flock(2) on `PVISOR_RUN/leases/vm-NAME`. QEMU is given the descriptor, so the lease ends with QEMU,
however that ends and whichever command started it.
"""

from __future__ import annotations

import fcntl
import os

from fuse import rundir
from fuse.errors import NodeError
from imaged.config import Config
from imaged.flock import try_lock

_PREFIX = "vm-"


def take(config: Config, key: str) -> int:
    """A descriptor that holds the lease of the VM named `key`, until its last copy is closed. It is close-on-exec: who
    starts QEMU gives it to that one alone.

    Take it before the daemon is asked for anything, then what it opens stays: a daemon that is just being stopped is
    waited for, and from then on none is. NodeError.
    """
    if not key or "/" in key:
        raise NodeError(f"{key!r} can not name a lease", hint="use the VM's name")
    rundir.make(config)
    with rundir.starting(config):
        while True:
            fd = os.open(rundir.lease_path(config, _PREFIX + key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if os.fstat(fd).st_nlink:  # else `held` has just removed it as nobody's
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def drop(config: Config, key: str) -> None:
    """Remove the file of a lease that nobody holds; one that is held, or not there, stays so."""
    path = rundir.lease_path(config, _PREFIX + key)
    if not path.exists():
        return
    with rundir.looking(config):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if try_lock(fd):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def held(config: Config) -> list[str]:
    """The names of the VMs whose leases are held; the files of others are removed."""
    found = []
    with rundir.looking(config):
        for path in sorted((config.run / "leases").glob(_PREFIX + "*")):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if try_lock(fd):
                    path.unlink()
                else:
                    found.append(path.name.removeprefix(_PREFIX))
            finally:
                os.close(fd)
    return found
