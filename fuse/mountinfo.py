"""What is mounted in this mount namespace, as /proc/self/mountinfo tells it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


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
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            head, _, tail = line.partition(b" - ")
            fstype, source = tail.split(b" ")[:2]
            fields = head.split(b" ")
            major, _, minor = fields[2].partition(b":")
            device = os.makedev(int(major), int(minor))
            path = Path(os.fsdecode(_unescape(fields[4])))
            found.append(MountPoint(int(fields[0]), device, path, fstype.decode(), os.fsdecode(_unescape(source))))
    return found


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


def is_mount_point(path: Path) -> bool:
    """Whether a file system begins at this directory; does not notice a bind mount of its own parent's system."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except OSError:
        return False


def _unescape(raw: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), raw)
