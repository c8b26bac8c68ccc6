"""Makes a directory the root of a new mount namespace, with the file systems that a process expects.

Order is the safety here: everything of the host that is needed is opened first, then the root changes, and only then
are names of the image looked up. Whatever symbolic link an image has at /dev or /etc, it ends inside the image.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fuse import linux
from stage.boundary.overlay import OVER_WORKSPACE, mount_overlay
from stage.errors import StageSetupError
from stage.kept.stagefiles import Stage
from stage.options import WORKSPACE

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
# What tells about the host or reaches into it: hidden, by an empty directory or by /dev/null.
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/sys/dev/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs/selinux",
)
_LOCKED = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
_TEXT_LIMIT_BYTES, _PIECE_BYTES = 1 << 20, 1 << 14
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


class HostParts(NamedTuple):
    """What the stage gets from the host: a mount that is attached nowhere yet, and the text of files to copy."""

    workspace: int | None
    files: Mapping[str, bytes]


def enter(lower: Path, stage: Stage, *, host_network: bool) -> None:
    """Changes the root of the calling process, which must be the only one in its mount namespace."""
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    parts = _collect(stage, host_network=host_network)
    mount_overlay(lower, stage.upper, stage.work, stage.path, volatile=stage.temporary)
    os.chdir(stage.path)
    linux.pivot_root(".", ".")
    linux.umount(".", linux.MNT_DETACH)
    os.chdir("/")
    _populate(parts)


def raise_loopback() -> None:
    """Brings `lo` up in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack_from("16sH", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def read_text(path: str) -> bytes:
    """A regular file's bytes, at most 1 MiB; nothing when it is absent or something else (a fifo would block)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        text = b""  # in pieces, so that a short file costs no memory of the longest
        while len(text) < _TEXT_LIMIT_BYTES and (piece := os.read(fd, _PIECE_BYTES)):
            text += piece
        return text[:_TEXT_LIMIT_BYTES]
    finally:
        os.close(fd)


def ensure_directory(path: str) -> str:
    """The real path of a directory inside the root, made with its parents when missing."""
    real = os.path.realpath(path)
    try:
        Path(real).mkdir(0o755, parents=True, exist_ok=True)
    except OSError as error:
        leads = f" (a link to {real})" if real != path else ""
        raise StageSetupError(
            f"the image's {path}{leads} is not a directory and can not be one: {error.strerror}"
        ) from error
    return real


def _collect(stage: Stage, *, host_network: bool) -> HostParts:
    workspace_fd = None
    if stage.workspace is not None:
        flags = linux.MS_NODEV | linux.MS_NOSUID
        upper, work = stage.workspace_upper, stage.workspace_work
        volatile = stage.temporary
        mount_overlay(stage.workspace, upper, work, upper, options=OVER_WORKSPACE, flags=flags, volatile=volatile)
        workspace_fd = linux.open_tree(stage.workspace_upper)
    host = stage.hostname.encode()
    files = {"/etc/hosts": b"127.0.0.1\tlocalhost " + host + b"\n::1\tlocalhost ip6-localhost\n"}
    if host_network:
        files["/etc/hosts"] = read_text("/etc/hosts").rstrip(b"\n") + b"\n127.0.1.1\t" + host + b"\n"
        files["/etc/resolv.conf"] = read_text("/etc/resolv.conf")
    return HostParts(workspace=workspace_fd, files=files)


def _populate(parts: HostParts) -> None:
    linux.mount("proc", _mount_point("/proc"), "proc", _LOCKED)
    linux.mount("sysfs", _mount_point("/sys"), "sysfs", _LOCKED | linux.MS_RDONLY)
    dev = _mount_point("/dev")
    _make_dev(dev, parts.files)
    if parts.workspace is not None:
        _attach(parts.workspace, _mount_point(WORKSPACE))
    for path in _READ_ONLY:
        if Path(path).exists():
            linux.mount(path, path, "", linux.MS_BIND | linux.MS_REC)
            linux.mount("", path, "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | _LOCKED)
    _mask(f"{dev}/null", f"{dev}/shm")


def _mask(null: str, empty: str) -> None:
    """`empty` is for a moment a directory that nobody can fill; what it covers comes back."""
    linux.mount("tmpfs", empty, "tmpfs", _LOCKED | linux.MS_RDONLY, "size=4k,mode=555")
    for path in _MASKED:
        with suppress(FileNotFoundError):
            _attach(linux.open_tree(empty if stat.S_ISDIR(Path(path).stat().st_mode) else null), path)
    linux.umount(empty)


def _make_dev(dev: str, files: Mapping[str, bytes]) -> None:
    """A /dev in which only these devices open, whatever node the workload makes, and where none is the host's own.

    Nodes and files come from a tmpfs that allows devices; a second one, which does not, then hides it for good.
    """
    linux.mount("tmpfs", dev, "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=16m")
    devices = {}
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"{dev}/{name}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        Path(dev, name).chmod(0o666)
        devices[name] = linux.open_tree(f"{dev}/{name}")
    for path, text in files.items():
        _place(path, text, f"{dev}/file")
    linux.mount("tmpfs", dev, "tmpfs", _LOCKED, "mode=755,size=16m")
    for name in ("pts", "shm", "mqueue"):
        Path(dev, name).mkdir(0o755)
    pts_options = "newinstance,ptmxmode=0666,mode=620,gid=5"
    linux.mount("devpts", f"{dev}/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, pts_options)
    linux.mount("tmpfs", f"{dev}/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
    linux.mount("mqueue", f"{dev}/mqueue", "mqueue", _LOCKED)
    for name, fd in devices.items():
        _touch(f"{dev}/{name}")
        _attach(fd, f"{dev}/{name}")
    for name, target in _LINKS.items():
        Path(dev, name).symlink_to(target)


def _place(path: str, text: bytes, scratch: str) -> None:
    """Puts the stage's own writable copy over `path`; its bytes live in memory and never become a change of the stage.

    An image whose /etc is not a directory goes without.
    """
    real = os.path.realpath(path)
    try:
        Path(real).parent.mkdir(0o755, parents=True, exist_ok=True)
        if not os.path.lexists(real):  # opening what exists would copy it up, which is a change
            _touch(real)
    except OSError:
        return
    if not stat.S_ISREG(os.lstat(real).st_mode):
        return
    with open(scratch, "wb") as file:
        file.write(text)
    Path(scratch).chmod(0o644)
    _attach(linux.open_tree(scratch), real)
    Path(scratch).unlink()


def _mount_point(path: str) -> str:
    real = ensure_directory(path)
    if real == "/":
        raise StageSetupError(f"the image's {path} is a link to /, where nothing can be mounted")
    return real


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _attach(fd: int, target: str) -> None:
    try:
        linux.move_mount(fd, target)
    finally:
        os.close(fd)
