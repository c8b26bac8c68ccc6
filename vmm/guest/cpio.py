"""Archives in the "newc" form of cpio, as the kernel unpacks them into its first root file system.

Format: Documentation/driver-api/early-userspace/buffer-format.rst of Linux. Every entry is a header of ASCII text, the
name with a zero byte, and the data; each of the two is padded to 4 bytes.

    offset  size
    0       6     "070701"
    6       104   13 numbers of 8 hexadecimal digits: inode, mode, uid, gid, links, mtime, data size, major and minor
                  of the file system, major and minor of a device node, name size with its zero byte, checksum
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from imaged.errors import FormatError

MAGIC = b"070701"
TRAILER = "TRAILER!!!"
_ALIGN = 4
_SIZE_LIMIT = 1 << 32


class Entry(NamedTuple):
    """A file of the archive; a symbolic link's data is its target. All belong to root, with no time."""

    name: str
    mode: int
    data: bytes


def file(name: str, data: bytes, *, mode: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | mode, data)


def directory(name: str, *, mode: int = 0o755) -> Entry:
    return Entry(name, stat.S_IFDIR | mode, b"")


def link(name: str, target: str) -> Entry:
    return Entry(name, stat.S_IFLNK | 0o777, target.encode())


def archive(entries: Iterable[Entry]) -> bytes:
    """The entries in their order, each after the directories it is in; those not named are made, once. FormatError."""
    return b"".join(_records(entries))


def _records(entries: Iterable[Entry]) -> Iterator[bytes]:
    made: set[str] = set()
    for entry in entries:
        for parent in reversed(PurePosixPath(entry.name).parents[:-1]):
            if str(parent) not in made:
                made.add(str(parent))
                yield from _record(directory(str(parent)), len(made))
        if entry.name in made:
            if stat.S_ISDIR(entry.mode):
                continue
            raise FormatError(f"initramfs entry {entry.name}", expected="one file of a name", found="two")
        made.add(entry.name)
        yield from _record(entry, len(made))
    yield from _record(Entry(TRAILER, 0, b""), 0)


def _record(entry: Entry, inode: int) -> Iterator[bytes]:
    name = entry.name.encode()
    if not name or name.startswith(b"/") or b"\0" in name:
        raise FormatError("initramfs entry", expected="a relative path", found=repr(entry.name))
    if len(entry.data) >= _SIZE_LIMIT:
        raise FormatError(f"initramfs entry {entry.name}", expected="less than 4 GiB", found=f"{len(entry.data)} bytes")
    fields = (inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name) + 1, 0)
    head = MAGIC + b"".join(b"%08x" % field for field in fields) + name + b"\0"
    yield head + bytes(-len(head) % _ALIGN)
    yield entry.data
    yield bytes(-len(entry.data) % _ALIGN)
