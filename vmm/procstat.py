"""What the kernel says of a process: its line of /proc/PID/stat, and how it ended, where a descriptor still tells."""

from __future__ import annotations

import fcntl
import struct
from pathlib import Path
from typing import NamedTuple

# struct pidfd_info of <linux/pidfd.h>, first version: mask, cgroup id, eleven ids, wait status.
_PIDFD_INFO = struct.Struct("<QQ11Ii")
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


class Stat(NamedTuple):
    """What we want of proc(5) /proc/PID/stat; `started` in clock ticks since boot."""

    pid: int
    state: str
    started: int
    exit_status: int

    @classmethod
    def parse(cls, text: str) -> Stat:
        fields = text.rpartition(")")[2].split()
        return cls(
            pid=int(text.partition(" ")[0]), state=fields[0], started=int(fields[19]), exit_status=int(fields[49])
        )


def stat(pid: int) -> Stat | None:
    try:
        return Stat.parse(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def status_of_descriptor(pidfd: int) -> int | None:
    """What the kernel keeps for open descriptors of a process that was reaped; None before Linux 6.15."""
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(info)
    return int(status) if mask & _PIDFD_INFO_EXIT else None
