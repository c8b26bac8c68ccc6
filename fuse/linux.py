"""The mount and namespace system calls of Linux, as the kernel has them; the only module that makes them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from fuse.errors import MountError

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SLAVE = 0x1000, 0x2000, 0x4000, 0x40000, 0x80000
MNT_DETACH, UMOUNT_NOFOLLOW = 0x2, 0x8
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x2000000
PR_SET_PDEATHSIG = 1
_SYS_PIVOT_ROOT = 155

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p]

PathLike = Path | str | bytes


def _check(result: int, what: str) -> None:
    if result != 0:
        raise MountError(what, ctypes.get_errno())


def mount(source: PathLike, target: PathLike, fstype: str = "", flags: int = 0, options: str | bytes = b"") -> None:
    """mount(2); `options` is the data string of the file system."""
    arguments = os.fsencode(source), os.fsencode(target), fstype.encode() or None, flags, os.fsencode(options) or None
    _check(_libc.mount(*arguments), f"mount {fstype or os.fsdecode(source)} on {os.fsdecode(target)}")


def umount(target: PathLike, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), f"unmount {os.fsdecode(target)}")


def unshare(flags: int) -> None:
    """unshare(2). CLONE_NEWPID takes effect for the children that follow."""
    _check(_libc.unshare(flags), "unshare namespaces")


def setns(fd: int, flags: int = 0) -> None:
    """setns(2)."""
    _check(_libc.setns(fd, flags), "enter namespace")


def pivot_root(new_root: PathLike, put_old: PathLike) -> None:
    """pivot_root(2), x86-64."""
    _check(_libc.syscall(_SYS_PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def die_with_parent(signal_number: int) -> None:
    """prctl(PR_SET_PDEATHSIG): the kernel sends this signal when the thread that made this process ends."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "set parent death signal")
