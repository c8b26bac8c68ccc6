"""The node daemon's mount, whose files a VM's memory and disks are: known by its device number."""

from __future__ import annotations

from fuse import mountinfo, rundir
from fuse.errors import NodeError
from imaged.config import Config


def current_device(config: Config) -> int:
    """The node daemon's mount as it is now; 0 when no daemon runs. Asks neither the daemon nor its files."""
    if not config.run.is_dir() or rundir.daemon_pid(config) is None:
        return 0
    return mountinfo.device_on(config.blocks)


def require_device(config: Config) -> int:
    """Of the node daemon's mount. NodeError when the daemon is gone."""
    try:
        return config.blocks.stat().st_dev
    except OSError as error:  # its mount is there, and nobody behind it
        raise daemon_gone(str(config.blocks), error) from error


def daemon_gone(path: str, error: OSError) -> NodeError:
    """What to raise when a file of the daemon's could not be used."""
    hint = "try again: the next command starts another"
    return NodeError(f"the node daemon is gone: {path}: {error.strerror}", hint=hint)
