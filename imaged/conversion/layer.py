"""A layer: what one layer tar says, with file data already in chunks. Kept as a memo under the layer's diff_id.

The memo is a msgpack map {"version": 2, "chunks": ids of 32 bytes each, "entries": [...], "warnings": [texts]}; version
1 has no warnings. An entry is a list that begins with its kind and path:

    [1, path, mode, uid, gid, mtime seconds, mtime nanoseconds, payload, xattrs]    an inode under a name
    [2, path, target path]                                                          another name of a file
    [3, path]                                                                       a whiteout
    [4, path]                                                                       an opaque directory

`payload` is [size, block count, chunk number, first block, block count, ...] of a regular file (chunk number -1 is a
hole), the target of a symlink, [major, minor] of a device, nil otherwise. Paths are clean: no leading slash, no empty
component, no `.` and no `..`; the root is the empty path.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgpack  # type: ignore[import-untyped]

from imaged.erofs.tree import Inode
from imaged.errors import FormatError, LayerError
from imaged.extent import Extent
from imaged.frame import CHUNK_LIMIT_BYTES
from imaged.ids import BLOCK_BYTES, ChunkId

LAYER_VERSION = 2
_WITHOUT_WARNINGS = 1
NAME_LIMIT_BYTES = 255
PATH_LIMIT_BYTES = 4095
XATTR_NAME_LIMIT_BYTES = 255
XATTR_VALUE_LIMIT_BYTES = 65536
ID_LIMIT = (1 << 32) - 2
"""The highest user or group id; 2**32 - 1 means "none" to Linux."""
WHITEOUT_PREFIX = b".wh."
OPAQUE_NAME = b".wh..wh..opq"
_WHITEOUT_META_PREFIX = b".wh..wh."
_NODE, _HARD_LINK, _WHITEOUT, _OPAQUE = 1, 2, 3, 4
_NANOSECONDS = 1_000_000_000
_DEVICES = (stat.S_IFCHR, stat.S_IFBLK)
_TYPES = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, *_DEVICES)


@dataclass(slots=True, eq=False)
class NodeEntry:
    """An inode under a name."""

    path: bytes
    inode: Inode


@dataclass(slots=True, eq=False)
class HardLink:
    """Another name of the file that is called `target`."""

    path: bytes
    target: bytes


@dataclass(slots=True, eq=False)
class Whiteout:
    """What lower layers have under this name is gone."""

    path: bytes


@dataclass(slots=True, eq=False)
class Opaque:
    """What lower layers have inside this directory is gone."""

    path: bytes


LayerEntry = NodeEntry | HardLink | Whiteout | Opaque


def clean_path(raw: bytes) -> bytes:
    """The path inside the root that an archive's name means; ValueError for names no file system takes.

    As every image tool reads it: `.`, empty components and a leading slash do not count, and `..` takes back the
    component before it and stops at the root.
    """
    if not raw:
        raise ValueError("the name is empty")
    if b"\0" in raw:
        raise ValueError("the name has a zero byte")
    path = raw.removeprefix(b"./").rstrip(b"/")
    if not path or path[0] in b"./" or b"/." in path or b"//" in path:
        components: list[bytes] = []
        for component in path.split(b"/"):
            if component == b"..":
                del components[-1:]
            elif component not in (b"", b"."):
                components.append(component)
        path = b"/".join(components)
    if len(path) > NAME_LIMIT_BYTES:
        _check_lengths(path)
    return path


def _check_lengths(path: bytes) -> None:
    if len(path) > PATH_LIMIT_BYTES:
        raise ValueError(f"the path has {len(path)} bytes, more than {PATH_LIMIT_BYTES}")
    for component in path.split(b"/"):
        # A whiteout's own name is longer than the name it removes.
        if len(component.removeprefix(WHITEOUT_PREFIX)) > NAME_LIMIT_BYTES:
            raise ValueError(f"a component of the path has {len(component)} bytes, more than {NAME_LIMIT_BYTES}")


def marker(path: bytes) -> Whiteout | Opaque | None:
    """The whiteout or opaque directory that an entry of this clean path stands for, if it is one."""
    directory, _, name = path.rpartition(b"/")
    if not name.startswith(WHITEOUT_PREFIX):
        return None
    if name == OPAQUE_NAME:
        return Opaque(directory)
    target = name.removeprefix(WHITEOUT_PREFIX)
    if target in (b"", b".", b".."):
        raise ValueError(f"a whiteout of {target!r} means nothing")
    return Whiteout(directory + b"/" + target if directory else target)


def is_aufs_metadata(path: bytes) -> bool:
    """Whether this is bookkeeping of AUFS that old image tools left in layers: never part of the image."""
    return any(
        component.startswith(_WHITEOUT_META_PREFIX) and component != OPAQUE_NAME for component in path.split(b"/")
    )


@dataclass(slots=True, eq=False)
class Layer:
    """The entries of one layer in the order of its archive. `warnings` are sentences for the user about what in it has
    no place in an image; they belong to the layer, so that who takes it from a memo is told as well."""

    entries: list[LayerEntry]
    warnings: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """The memo. Equal layers have equal bytes."""
        table: dict[ChunkId, int] = {}
        rows: list[tuple[Any, ...]] = []
        for entry in self.entries:
            if isinstance(entry, NodeEntry):
                rows.append(_node_row(entry, table))
            elif isinstance(entry, HardLink):
                rows.append((_HARD_LINK, entry.path, entry.target))
            else:
                rows.append((_WHITEOUT if isinstance(entry, Whiteout) else _OPAQUE, entry.path))
        document = {
            "version": LAYER_VERSION,
            "chunks": b"".join(table),
            "entries": rows,
            "warnings": self.warnings,
        }
        packed: bytes = msgpack.packb(document)
        return packed

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """From a memo; FormatError for anything that `to_bytes` does not write, or wrote in version 1."""
        document, chunks = _unpack(raw)
        entries: list[LayerEntry] = []
        for row in document["entries"]:
            try:
                entries.append(_entry(row, chunks))
            except (ValueError, TypeError, IndexError, LayerError) as error:
                raise FormatError("layer memo, entry", expected="a valid entry", found=f"{error}") from None
        return cls(entries, document["warnings"])

    def chunk_ids(self) -> Iterator[ChunkId]:
        """The chunks of the layer's file data, each once."""
        seen: set[ChunkId] = set()
        for entry in self.entries:
            if isinstance(entry, NodeEntry):
                for extent in entry.inode.extents:
                    if extent.chunk is not None and extent.chunk not in seen:
                        seen.add(extent.chunk)
                        yield extent.chunk


def chunk_ids(raw: bytes) -> list[ChunkId]:
    """The chunks that a memo names, each once, without building its entries."""
    return _unpack(raw)[1]


def _unpack(raw: bytes) -> tuple[dict[str, Any], list[ChunkId]]:
    try:
        document = msgpack.unpackb(raw, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError("layer memo", expected="msgpack", found=f"{type(error).__name__}: {error}"[:200]) from None
    version = document.get("version") if isinstance(document, dict) else None
    if version not in (_WITHOUT_WARNINGS, LAYER_VERSION):
        raise FormatError("layer memo", expected=f"version {LAYER_VERSION}", found=repr(document)[:80])
    table, rows = document.get("chunks"), document.get("entries")
    if not isinstance(table, bytes) or len(table) % ChunkId.SIZE_BYTES or not isinstance(rows, tuple):
        raise FormatError("layer memo", expected="a chunk table and entries", found=repr(document)[:80])
    texts = document.get("warnings") if version != _WITHOUT_WARNINGS else ()
    if not isinstance(texts, tuple) or not all(isinstance(text, str) for text in texts):
        raise FormatError("layer memo", expected="warnings", found=repr(texts)[:80])
    document["warnings"] = texts
    size = ChunkId.SIZE_BYTES
    return document, [ChunkId(table[start : start + size]) for start in range(0, len(table), size)]


def _node_row(entry: NodeEntry, table: dict[ChunkId, int]) -> tuple[Any, ...]:
    inode = entry.inode
    file_type = stat.S_IFMT(inode.mode)
    payload: object = None
    if file_type == stat.S_IFREG:
        numbers = [inode.size_bytes]
        for extent in inode.extents:
            chunk = -1 if extent.chunk is None else table.setdefault(extent.chunk, len(table))
            numbers += (extent.block_count, chunk, extent.first_block)
        payload = numbers
    elif file_type == stat.S_IFLNK:
        payload = inode.target
    elif file_type in _DEVICES:
        payload = (inode.major, inode.minor)
    seconds, nanoseconds = divmod(inode.mtime_ns, _NANOSECONDS)
    return _NODE, entry.path, inode.mode, inode.uid, inode.gid, seconds, nanoseconds, payload, inode.xattrs


def _entry(row: Sequence[Any], chunks: Sequence[ChunkId]) -> LayerEntry:
    kind, path = row[0], row[1]
    if type(path) is not bytes or (path and clean_path(path) != path):
        raise ValueError(f"path {path!r} is not clean")
    if kind == _NODE and len(row) == 9:
        return NodeEntry(path, _inode(row, chunks))
    if kind == _HARD_LINK and len(row) == 3 and type(row[2]) is bytes and clean_path(row[2] or b"/") == row[2]:
        return HardLink(path, row[2])
    if kind == _WHITEOUT and len(row) == 2 and path:
        return Whiteout(path)
    if kind == _OPAQUE and len(row) == 2:
        return Opaque(path)
    raise ValueError(f"kind {kind!r} with {len(row)} fields")


def _inode(row: Sequence[Any], chunks: Sequence[ChunkId]) -> Inode:
    mode, uid, gid, seconds, nanoseconds, payload, xattrs = row[2:]
    for value in (mode, uid, gid, seconds, nanoseconds):
        if type(value) is not int:
            raise ValueError(f"{value!r} is not a number")
    if not 0 <= nanoseconds < _NANOSECONDS or type(xattrs) is not dict:
        raise ValueError("wrong time or xattrs")
    inode = Inode(mode, uid, gid, seconds * _NANOSECONDS + nanoseconds)
    inode.xattrs = xattrs
    file_type = stat.S_IFMT(mode)
    if file_type == stat.S_IFREG:
        _set_extents(inode, payload, chunks)
    elif file_type == stat.S_IFLNK:
        inode.target = payload
    elif file_type in _DEVICES:
        inode.major, inode.minor = payload
    elif payload is not None:
        raise ValueError("payload of an inode that has none")
    check_inode(inode)
    return inode


def _set_extents(inode: Inode, numbers: Sequence[Any], chunks: Sequence[ChunkId]) -> None:
    if type(numbers) is not tuple or len(numbers) % 3 != 1 or any(type(one) is not int for one in numbers):
        raise ValueError("extents are not groups of three numbers after the size")
    inode.size_bytes = numbers[0]
    if inode.size_bytes < 0:
        raise ValueError(f"size {inode.size_bytes} is negative")
    blocks = 0
    for at in range(1, len(numbers), 3):
        count, chunk, first = numbers[at : at + 3]
        if count < 1 or first < 0 or not -1 <= chunk < len(chunks):
            raise ValueError(f"extent of {count} blocks in chunk {chunk} of {len(chunks)}")
        if chunk == -1:
            if first:
                raise ValueError("hole with a first block")
            inode.extents.append(Extent(count, None))
        else:
            if (first + count) * BLOCK_BYTES > CHUNK_LIMIT_BYTES:
                raise ValueError(f"extent of {count} blocks from {first} is outside any chunk")
            inode.extents.append(Extent(count, chunks[chunk], first))
        blocks += count
    if blocks != -(-inode.size_bytes // BLOCK_BYTES):
        raise ValueError(f"extents of {blocks} blocks for {inode.size_bytes} bytes")


def check_inode(inode: Inode) -> None:
    """ValueError for what no file system holds; sizes and extents are the cutter's."""
    file_type = stat.S_IFMT(inode.mode)
    if file_type not in _TYPES:
        raise ValueError(f"mode {inode.mode:o} has no known file type")
    if not (0 <= inode.uid <= ID_LIMIT and 0 <= inode.gid <= ID_LIMIT):
        raise ValueError(f"owner {inode.uid}:{inode.gid} is not in 0 to {ID_LIMIT}")
    if file_type == stat.S_IFLNK:
        target = inode.target
        if type(target) is not bytes or not target or b"\0" in target:
            raise ValueError("the symlink target is empty or has a zero byte")
        if len(target) > PATH_LIMIT_BYTES:
            raise ValueError(f"the symlink target has {len(target)} bytes, more than {PATH_LIMIT_BYTES}")
    elif file_type in _DEVICES and not (0 <= inode.major < 1 << 12 and 0 <= inode.minor < 1 << 20):
        raise ValueError(f"device number {inode.major}:{inode.minor} is out of range")
    for name, value in inode.xattrs.items():
        if type(name) is not bytes or type(value) is not bytes:
            raise ValueError("an xattr is not bytes")
        if not 0 < len(name) <= XATTR_NAME_LIMIT_BYTES or b"\0" in name or len(value) > XATTR_VALUE_LIMIT_BYTES:
            raise ValueError(f"xattr {name[:80]!r} of {len(value)} bytes is out of range")
