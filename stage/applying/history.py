"""What was applied from a stage before, name by name: as the stage has it, and as the host got it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stage.edits.tree import Node, parents


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One state of one name; of a directory, without what changes when an entry does."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, node: Node) -> Identity:
        """As it is, times included: any change makes another one."""
        return cls(inode=node.inode, size_bytes=node.size_bytes, mtime_ns=node.mtime_ns, ctime_ns=node.ctime_ns)

    @classmethod
    def in_stage(cls, node: Node) -> Identity:
        """A directory of the stage is the same while its inode, mode, owner and attributes are."""
        if not node.is_directory:
            return cls.of(node)
        parts = repr((node.mode, node.uid, node.gid, sorted(node.xattrs.items()))).encode()
        digest = int.from_bytes(hashlib.blake2b(parts, digest_size=6).digest())
        return cls(inode=node.inode, size_bytes=digest, mtime_ns=0, ctime_ns=0)


# Of a name that was not applied itself: equal to no state that there is.
UNKNOWN = Identity(inode=0, size_bytes=0, mtime_ns=0, ctime_ns=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name that was applied: as the stage had it (None: a deletion), as the host had it then (None: not there)."""

    stage: Identity | None
    host: Identity | None


@dataclass(slots=True)
class History:
    """Everything that was applied from one stage. Not for sharing between threads."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    files: dict[int, Identity] = field(default_factory=dict)
    """The host's files with several names that an apply has left so, by their inodes: every name has the same ctime."""
    _settled: set[bytes] = field(default_factory=set)

    def settled(self, path: bytes, upper: Node | None) -> bool:
        """Whether nothing is pending under this name, for its entry of the upper directory is what was applied.

        None is what an opaque directory hides: settled when that deletion was applied, or when it came to the host
        after the directory was. Asked for directories before what is in them.
        """
        entry = self.entries.get(path)
        if upper is None and entry is None:
            return self._is_hidden(path)
        if entry is None:
            return False
        if upper is None or (upper.type == "char" and upper.rdev == 0):
            return entry.stage is None  # overlayfs links its whiteouts to each other, so their times mean nothing
        same = entry.stage == Identity.in_stage(upper)
        if same and upper.is_directory:
            self._settled.add(path)
        return same

    def _is_hidden(self, path: bytes) -> bool:
        while b"/" in path:
            path = path.rpartition(b"/")[0]
            entry = self.entries.get(path)
            if entry is not None and entry.stage != UNKNOWN:
                return path in self._settled
        return False

    def ours(self, path: bytes, host: Node) -> bool:
        """Whether the host has there what the last apply left, under this name or another one of the same file."""
        entry, found = self.entries.get(path), Identity.of(host)
        return (entry is not None and entry.host == found) or self.files.get(host.inode) == found

    def touch(self, path: bytes, host: Node) -> None:
        """The host has another state of this name, by an apply of something else."""
        entry = self.entries.get(path)
        self.entries[path] = Entry(stage=entry.stage if entry is not None else UNKNOWN, host=Identity.of(host))
        self.keep(host)

    def keep(self, host: Node) -> None:
        """The host's file is in this state by an apply, under all its names."""
        if host.link_count > 1 and not host.is_directory:
            self.files[host.inode] = Identity.of(host)

    def move(self, moved: Iterable[tuple[bytes, bytes]]) -> None:
        """Directories have other paths, all at once; so has what was applied below them: the nearest one counts."""
        to, found = dict(moved), {}
        for path in list(self.entries):
            above = next((directory for directory in parents(path) if directory in to), None)
            if above is not None:
                found[to[above] + path[len(above) :]] = self.entries.pop(path)
        self.entries.update(found)

    def pack(self) -> dict[str, list[list[int] | None]]:
        """For JSON."""
        return {os.fsdecode(path): [numbers(entry.stage), numbers(entry.host)] for path, entry in self.entries.items()}

    def pack_files(self) -> list[list[int] | None]:
        """For JSON."""
        return [numbers(found) for found in self.files.values()]

    @classmethod
    def unpack(cls, fields: Mapping[str, list[list[int] | None]], files: Iterable[list[int] | None] = ()) -> History:
        """Raises what wrong JSON does: KeyError, TypeError, ValueError."""
        return cls(
            {
                os.fsencode(path): Entry(stage=identity(stage), host=identity(host))
                for path, (stage, host) in fields.items()
            },
            {found.inode: found for found in map(identity, files) if found is not None},
        )


def numbers(identity: Identity | None) -> list[int] | None:
    if identity is None:
        return None
    return [identity.inode, identity.size_bytes, identity.mtime_ns, identity.ctime_ns]


def identity(numbers: list[int] | None) -> Identity | None:
    if numbers is None:
        return None
    inode, size_bytes, mtime_ns, ctime_ns = map(int, numbers)
    return Identity(inode=inode, size_bytes=size_bytes, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
