"""Mounting one EROFS image: from its two files where the kernel can (Linux 6.12), through loop devices elsewhere."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from fuse import linux, loop
from fuse.errors import MountError

log = logging.getLogger(__name__)
READ_AHEAD_KIB = 32
"""Of a shell in Debian, 16 needs 3 % fewer bytes but more requests; 64 needs 11 % more bytes for the same requests."""
_BDI = Path("/sys/class/bdi")
_REFUSALS = {errno.ENOTBLK, errno.EINVAL, errno.EOPNOTSUPP}
"""What a kernel says that can not mount from files, or knows no direct I/O there."""


def mount(metadata: Path, data: Path, target: Path, *, environ: Mapping[str, str] = os.environ) -> None:
    """Mount read-only on `target`. PVISOR_EROFS=direct, file or loop forces one way. MountError."""
    forced = environ.get("PVISOR_EROFS", "")
    ways = {"direct": _mount_direct, "file": _mount_buffered, "loop": _mount_loop}
    if forced:
        if forced not in ways:
            what = f"mount with PVISOR_EROFS={forced}"
            raise MountError(what, errno.EINVAL, hint=f"it may be {', '.join(ways)} or unset")
        ways[forced](metadata, data, target)
        return
    try:
        _mount_direct(metadata, data, target)
    except MountError as error:
        if error.errno not in _REFUSALS:
            raise
        log.info("file-backed mount: %s", error.message)
        _mount_loop(metadata, data, target)


def _mount_direct(metadata: Path, data: Path, target: Path) -> None:
    """The data is cached once, in EROFS, not in FUSE as well, and one read of EROFS is one of FUSE: all or an error."""
    with _read_ahead_of_new():
        _mount(metadata, data, target, ",directio")


def _mount_buffered(metadata: Path, data: Path, target: Path) -> None:
    """Through FUSE's page cache, whose read-ahead goes on from file to file: a third faster where all is read.

    Never the default: a read of which the end fails comes out short, and EROFS then, on kernels that lack a late fix,
    shows zeros in place of what is missing.
    """
    with _read_ahead_of_new():
        _mount(metadata, data, target, "")


def _mount_loop(metadata: Path, data: Path, target: Path) -> None:
    with loop.attached(metadata) as first, loop.attached(data, direct=True) as second:
        for device in (first, second):
            _set_read_ahead(Path("/sys/block") / device.name / "bdi/read_ahead_kb")
        _mount(first, second, target, "")


def _mount(source: Path, device: Path, target: Path, more: str) -> None:
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    if "," not in str(device):
        linux.mount(source, target, "erofs", flags, f"device={device}{more}")
        return
    # Mount options have no way to quote a comma.
    fd = os.open(device, os.O_PATH | os.O_CLOEXEC)
    try:
        linux.mount(source, target, "erofs", flags, f"device=/proc/self/fd/{fd}{more}")
    finally:
        os.close(fd)


@contextlib.contextmanager
def _read_ahead_of_new() -> Iterator[None]:
    """Set the read-ahead of the mount that the block makes.

    The kernel's 128 KiB around each page fault of a program would fetch twice what a shell needs. Nothing says which
    erofs-N in /sys is whose, so it is the one that was not there before.
    """
    before = _bdis()
    yield
    for name in _bdis() - before:
        _set_read_ahead(_BDI / name / "read_ahead_kb")


def _bdis() -> set[str]:
    try:
        return {path.name for path in _BDI.glob("erofs-*")}
    except OSError:
        return set()


def _set_read_ahead(path: Path) -> None:
    """Only costs speed when it is not possible, as with a read-only /sys."""
    try:
        path.write_text(str(READ_AHEAD_KIB))
    except OSError as error:
        log.info("read-ahead: %s", error)
