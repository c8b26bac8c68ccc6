"""The mount and namespace system calls of Linux, as the kernel has them; the only module that makes them."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from fuse.errors import MountError

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SLAVE = 0x1000, 0x2000, 0x4000, 0x40000, 0x80000
MNT_DETACH, MNT_EXPIRE, UMOUNT_NOFOLLOW = 0x2, 0x4, 0x8
CLONE_FS, CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x200, 0x20000, 0x4000000, 0x8000000
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


PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 4, 15, 24, 47, 4
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_CLOSE_RANGE = 428, 429, 436
_AT_FDCWD, _OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = -100, 0x1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH, _CLOSE_RANGE_CLOEXEC, _ALL_FDS = 0x4, 0x4, 0xFFFFFFFF
_CAPABILITY_VERSION_3 = 0x20080522

_open_tree = _libc["syscall"]
_open_tree.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
_move_mount = _libc["syscall"]
_move_mount.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
_close_range = _libc["syscall"]
_close_range.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint]


def open_tree(path: PathLike) -> int:
    """open_tree(2): a copy of what is at `path`, as a mount that is attached nowhere; the caller closes it."""
    fd = int(_open_tree(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC))
    if fd < 0:
        raise MountError(f"copy mount of {os.fsdecode(path)}", ctypes.get_errno())
    return fd


def move_mount(fd: int, target: PathLike) -> None:
    """move_mount(2): attaches a mount from `open_tree`; does not follow a symbolic link at `target`."""
    arguments = fd, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
    _check(_move_mount(_SYS_MOVE_MOUNT, *arguments), f"attach mount on {os.fsdecode(target)}")


def close_on_exec_from(first: int) -> None:
    """Marks every descriptor from `first` up, so that none of them reaches the next program."""
    _check(_close_range(_SYS_CLOSE_RANGE, first, _ALL_FDS, _CLOSE_RANGE_CLOEXEC), "mark descriptors close-on-exec")


def close_except(keep: set[int]) -> None:
    """Closes every descriptor that is not in `keep`; whoever owns those objects must not use them again."""
    first = 0
    for fd in sorted(keep):
        if fd > first:
            _check(_close_range(_SYS_CLOSE_RANGE, first, fd - 1, 0), "close descriptors")
        first = fd + 1
    _check(_close_range(_SYS_CLOSE_RANGE, first, _ALL_FDS, 0), "close descriptors")


def set_process_name(name: str) -> None:
    """prctl(PR_SET_NAME), at most 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _check(_libc.prctl(PR_SET_NAME, ctypes.addressof(buffer), 0, 0, 0), "set process name")


def set_undumpable() -> None:
    """prctl(PR_SET_DUMPABLE, 0): no core file, and /proc/PID closed to processes without CAP_SYS_PTRACE, until exec."""
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "set dumpable")


def limit_capabilities(keep: frozenset[int], last: int) -> None:
    """Programs executed from here on get at most `keep` of the capabilities 0 to `last`, and inherit none."""
    for capability in set(range(last + 1)) - keep:
        _check(_libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0), "limit capabilities")
    _check(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clear ambient capabilities")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high words
    _check(_libc.capget(header, sets), "read capabilities")
    sets[2] = sets[5] = 0
    _check(_libc.capset(header, sets), "set capabilities")


_SYS_SETGROUPS, _SYS_SETRESUID, _SYS_SETRESGID = 116, 117, 119
_set_ids = _libc["syscall"]
_set_ids.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint]
_set_groups = _libc["syscall"]
_set_groups.argtypes = [ctypes.c_long, ctypes.c_size_t, ctypes.c_void_p]


def set_user(uid: int, gid: int, groups: Sequence[int]) -> None:
    """setgroups(2), setresgid(2), setresuid(2) of the calling thread alone; the C library does it for all of them."""
    _check(_set_groups(_SYS_SETGROUPS, len(groups), (ctypes.c_uint32 * len(groups))(*groups)), "set groups")
    _check(_set_ids(_SYS_SETRESGID, gid, gid, gid), f"set group {gid}")
    _check(_set_ids(_SYS_SETRESUID, uid, uid, uid), f"set user {uid}")


_SYS_OPENAT2 = 437
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x1, 0x2, 0x4, 0x8
_RESOLVE_CONFINED = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
RENAME_NOREPLACE, RENAME_EXCHANGE = 0x1, 0x2

_openat2 = _libc["syscall"]
_openat2.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
_libc.syncfs.argtypes = [ctypes.c_int]


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """openat2(2) of what exists below `directory`: through no symbolic link, no `..` out of it and no other mount.

    OSError; ELOOP is a link, EXDEV a way out or a mount. EAGAIN is a directory that moved meanwhile: asked again.
    """
    how = (ctypes.c_uint64 * 3)(flags | os.O_CLOEXEC, 0, _RESOLVE_CONFINED)
    for _ in range(64):
        fd = int(_openat2(_SYS_OPENAT2, directory, path, how, ctypes.sizeof(how)))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), path)


def rename_at(old_directory: int, old: bytes, new_directory: int, new: bytes, flags: int) -> None:
    """renameat2(2) with RENAME_NOREPLACE or RENAME_EXCHANGE. OSError."""
    if _libc.renameat2(old_directory, old, new_directory, new, flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old, None, new)


def sync_file_system(fd: int) -> None:
    """syncfs(2): everything written to the file system of `fd` until now is durable. OSError."""
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX_BYTES, _BTIME_OFFSET = 256, 80


def born_ns(fd: int) -> int | None:
    """statx(2): when the file was made; None where the file system does not know. OSError."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, found) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if not struct.unpack_from("=I", found)[0] & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BTIME_OFFSET)
    return int(seconds * 10**9 + nanoseconds)


_libc.open_by_handle_at.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]


def open_handle(directory: int, kind: int, handle: bytes, flags: int) -> int:
    """open_by_handle_at(2) on the file system that `directory` is on. OSError; ESTALE when the file is gone."""
    packed = ctypes.create_string_buffer(struct.pack("=Ii", len(handle), kind) + handle)
    fd = int(_libc.open_by_handle_at(directory, packed, flags | os.O_CLOEXEC))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
