"""The file tree of an image as it is built up from layers: inodes with their extents, before any on-disk layout."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from imaged.extent import Extent


@dataclass(slots=True, eq=False)
class Inode:
    """One inode. Hard links are the same object under several names; identity is equality.

    `mode` is the whole st_mode (type and permission bits). `mtime_ns` counts from 1970 and may be negative.
    Regular files: `size_bytes` and `extents` (together ceil(size / 4096) blocks). Symlinks: `target`. Devices:
    `major`, `minor`. Directories: `children`. xattr names are full ones, such as b"user.a".
    """

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    extents: list[Extent] = field(default_factory=list)
    target: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    children: dict[bytes, Inode] = field(default_factory=dict)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


def walk(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    """Every name of the tree with its inode, parents first, children by name: (b"", root), (b"bin", ...), ...

    A hard-linked inode comes once for each of its names. Not recursive, so depth is bounded by memory alone.
    """
    pending: list[tuple[bytes, Inode]] = [(b"", root)]
    while pending:
        path, inode = pending.pop()
        yield path, inode
        prefix = path + b"/" if path else b""
        pending.extend((prefix + name, inode.children[name]) for name in sorted(inode.children, reverse=True))
