"""What is mounted in this mount namespace, as /proc/self/mountinfo tells it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_OURS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One mount. `device` is the st_dev of its files, `source` what was mounted, as the metadata of an EROFS."""

    id: int
    device: int
    path: Path
    fstype: str
    source: str


def mount_points() -> list[MountPoint]:
    """In the order they were made, so that what hides another comes later."""
    found = []
    with open(_OURS, "rb") as file:
        for line in file:
            head, _, tail = line.partition(b" - ")
            fstype, source = tail.split(b" ")[:2]
            fields = head.split(b" ")
            major, _, minor = fields[2].partition(b":")
            device = os.makedev(int(major), int(minor))
            path = Path(os.fsdecode(_unescape(fields[4])))
            found.append(MountPoint(int(fields[0]), device, path, fstype.decode(), os.fsdecode(_unescape(source))))
    return found


def device_on(path: Path) -> int:
    """The device of what is mounted on just this path, on top; 0 when nothing is. What is mounted is not asked, and the
    other mounts, of which a host may have thousands, are passed over."""
    wanted, device = os.fsencode(path), 0
    with open(_OURS, "rb") as file:
        for line in file:
            fields = line.split(b" ", 5)
            if fields[4] == wanted or (b"\\" in fields[4] and _unescape(fields[4]) == wanted):
                major, _, minor = fields[2].partition(b":")
                device = os.makedev(int(major), int(minor))
    return device


def mount_at(path: Path) -> MountPoint | None:
    """The mount that this path leads into, on top of all that it hides; None when the path leads nowhere."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines())
    finally:
        os.close(fd)
    return next((mount for mount in mount_points() if mount.id == int(told["mnt_id"])), None)


def peer_groups(devices: Collection[int]) -> dict[int, set[bytes]]:
    """Of each of these file systems, the peer groups of its mounts: what is unmounted here is unmounted there too."""
    return {device: groups for device, groups in _groups("self").items() if device in devices}


def users_elsewhere(ours: Mapping[int, set[bytes]]) -> list[int]:
    """The processes that have one of these file systems, given with our peer groups, mounted in another mount namespace
    where an unmount does not reach it; one process of each such namespace."""
    seen = {_namespace("self"), None}  # who can not be asked for it is not known to have another
    found = []
    for pid in sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        namespace = _namespace(str(pid))
        if namespace in seen:
            continue
        seen.add(namespace)
        try:
            theirs = _groups(str(pid))
        except OSError:  # it has just ended, and may not have been the only one there
            seen.discard(namespace)
            continue
        if any(device in theirs and not theirs[device] & groups for device, groups in ours.items()):
            found.append(pid)
    return found


def _groups(process: str) -> dict[int, set[bytes]]:
    """By device, the peer groups of its mounts and of those whose unmounts follow them."""
    found: dict[int, set[bytes]] = {}
    with open(f"/proc/{process}/mountinfo", "rb") as file:
        for line in file:
            fields = line.partition(b" - ")[0].split(b" ")
            major, _, minor = fields[2].partition(b":")
            groups = {field.partition(b":")[2] for field in fields[6:] if field.startswith((b"shared:", b"master:"))}
            found.setdefault(os.makedev(int(major), int(minor)), set()).update(groups)
    return found


def _namespace(process: str) -> str | None:
    try:
        return str(Path(f"/proc/{process}/ns/mnt").readlink())
    except OSError:
        return None


def _unescape(raw: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), raw)
