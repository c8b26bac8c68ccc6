"""EROFS mounts of images: one for each image, shared by all who use it. On the hot path of `pvisor run`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fuse import rundir
from fuse.errors import MountError

if TYPE_CHECKING:
    from pathlib import Path

    from fuse.node import OpenImage
    from imaged.config import Config

_leases: dict[Path, int] = {}


def mount_image(config: Config, image: OpenImage) -> Path:
    """The image's mount, made when it is not there. Threads and processes may call this at once. MountError.

    Until this process ends it counts as a user of the mount, so that `node stop` leaves it alone.
    """
    lease = rundir.lease_path(config, image.id)
    if lease not in _leases:
        fd = rundir.take_lease(config, image.id)
        if _leases.setdefault(lease, fd) != fd:
            os.close(fd)
    return _mounted(config, image)


@contextmanager
def using_image(config: Config, image: OpenImage) -> Iterator[Path]:
    """As `mount_image`, but a user of the mount only while the block runs."""
    lease = rundir.take_lease(config, image.id)
    try:
        yield _mounted(config, image)
    finally:
        os.close(lease)


def drop_leases() -> None:
    """This process uses no image mount any more, but those of `using_image`."""
    while _leases:
        os.close(_leases.popitem()[1])


def is_mount_point(path: Path) -> bool:
    """Whether a file system begins at this directory; does not notice a bind mount of its own parent's system."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except OSError:
        return False


def _mounted(config: Config, image: OpenImage) -> Path:
    target = config.images / image.id
    if not is_mount_point(target):
        with rundir.mounting(config):
            _mount(config, image, target)
    return target


def _mount(config: Config, image: OpenImage, target: Path) -> None:
    if is_mount_point(target):
        return
    if not is_mount_point(config.blocks):
        raise MountError(
            f"mount image {image.name}: the node daemon's mount {config.blocks} is not visible here",
            errno.ENOTCONN,
            hint="run in the mount namespace in which the daemon was started, or `pvisor node stop` there",
        )
    from fuse import erofs

    target.mkdir(mode=0o700, exist_ok=True)
    try:
        erofs.mount(image.metadata_path, image.data_path, target)
    except BaseException:
        with contextlib.suppress(OSError):
            target.rmdir()
        raise
