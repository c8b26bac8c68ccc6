"""Loop devices: how EROFS gets its images on kernels that mount it from block devices only (before Linux 6.12).

The numbers are those of linux/loop.h. Devices are read-only and detach themselves when their last user closes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from fuse.errors import MountError

_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR, _LO_FLAGS_DIRECT_IO = 1, 4, 16
_CONFIG = struct.Struct("<II 5Q 4I 64s 64s 32s 2Q 8Q")
"""struct loop_config: fd, block_size, struct loop_info64 (flags are its fourth 32-bit word), eight reserved words."""
_BLOCK_BYTES = 4096
_ATTEMPTS = 64


@contextlib.contextmanager
def attached(path: Path, *, direct: bool = False) -> Iterator[Path]:
    """A read-only loop device on a file. It outlives the block as long as a mount uses it. MountError.

    `direct` keeps the loop device from caching a second time what the file's own system caches; where that is not
    possible it is left out.
    """
    backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        device, fd = _configure(backing, path, _LO_FLAGS_DIRECT_IO if direct else 0)
    finally:
        os.close(backing)
    try:
        yield device
    finally:
        os.close(fd)


def _configure(backing: int, path: Path, flags: int) -> tuple[Path, int]:
    """A free device with this file on it, and the descriptor that keeps it. Another process may be quicker: again."""
    for _ in range(_ATTEMPTS):
        device, fd = _free_device(path)
        try:
            fcntl.ioctl(fd, _LOOP_CONFIGURE, _config(backing, path, flags))
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EINVAL and flags:
                flags = 0
            elif error.errno != errno.EBUSY:
                raise MountError(f"set up a loop device on {path}", error.errno or 0) from error
            continue
        except BaseException:
            os.close(fd)
            raise
        return device, fd
    raise MountError(f"set up a loop device on {path}", errno.EBUSY, hint="`losetup -a` shows who uses them")


def _free_device(path: Path) -> tuple[Path, int]:
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
        finally:
            os.close(control)
        device = Path(f"/dev/loop{number}")
        return device, os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        hint = "load the loop module, and in a container pass /dev/loop-control and /dev/loop*"
        raise MountError(f"find a loop device for {path}", error.errno or 0, hint=hint) from error


def _config(backing: int, path: Path, flags: int) -> bytes:
    flags |= _LO_FLAGS_READ_ONLY | _LO_FLAGS_AUTOCLEAR
    name = os.fsencode(path)[:63]
    return _CONFIG.pack(backing, _BLOCK_BYTES, *[0] * 5, 0, 0, 0, flags, name, b"", b"", 0, 0, *[0] * 8)
