"""A streaming tar reader: entries one by one, file data as it arrives, nothing kept.

Why not `tarfile`: it ends silently at a corrupt header (a damaged layer would become a smaller image), it turns
modification times into floats that lose nanoseconds, and it costs several times more per entry.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from imaged.conversion import tarheader
from imaged.conversion.tarheader import BLOCK_BYTES, HEADER, NANOSECONDS, SparseMap, number
from imaged.errors import LayerError

READ_BYTES = 1 << 20
HARD_LINK = 0
"""`TarEntry.file_type` of a hard link; every other value is a stat.S_IF* one."""

_EXTENSION_LIMIT_BYTES = 8 << 20
_NUMBER_MEMO_ENTRIES = 4096
_FILE_TYPES = {
    b"0": stat.S_IFREG,
    b"\0": stat.S_IFREG,
    b"7": stat.S_IFREG,
    b"S": stat.S_IFREG,
    b"1": HARD_LINK,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"D": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
}
_EXTENSIONS = b"xXgLKNV"


class Readable(Protocol):
    """A binary stream; `read` gives at least one byte until the end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True, eq=False)
class TarEntry:
    """One member. `path` and `link` are the archive's bytes, not cleaned; `mode` has no type bits.

    Regular files: `size_bytes` is the file's length with its holes, `stored_bytes` what follows in the archive, and
    `sparse` says where those pieces belong (None: the whole file, in order).
    """

    offset: int
    path: bytes
    file_type: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size_bytes: int
    stored_bytes: int
    link: bytes
    major: int
    minor: int
    xattrs: dict[bytes, bytes]
    sparse: SparseMap | None


@dataclass(slots=True)
class _Overrides:
    """What extension headers say about the entry after them."""

    path: bytes | None = None
    link: bytes | None = None
    records: list[tuple[bytes, bytes]] = field(default_factory=list)


class TarReader:
    """Iterate for the entries; after each, `data` gives its stored bytes (what is not taken is skipped).

    For one thread. LayerError names the offset and the entry of damage; the end of the archive is two zero blocks or
    the end of the stream between entries. What follows the end is left in the stream: see `drain`.
    """

    def __init__(self, stream: Readable, *, layer: str = "") -> None:
        self._stream = stream
        self._layer = layer
        self._buffer = b""
        self._position = 0
        self._buffer_offset = 0
        self._unread = 0
        self._padding = 0
        self._entry_path: bytes | None = None
        self._global: dict[bytes, bytes] = {}
        self._numbers: dict[bytes, int] = {}

    @property
    def offset(self) -> int:
        """Bytes of the archive taken so far."""
        return self._buffer_offset + self._position

    def __iter__(self) -> Iterator[TarEntry]:
        overrides: _Overrides | None = None
        while True:
            self._skip()
            self._entry_path = None
            offset = self._buffer_offset + self._position
            block = self._take_block()
            if block is None:
                break
            try:
                tarheader.check(block)
                fields = HEADER.unpack(block)
                if fields[7] in _EXTENSIONS:
                    overrides = self._extension(fields, overrides)
                    continue
                entry = self._entry(block, fields, offset, overrides)
            except ValueError as error:
                self._fail(f"corrupt header at byte {offset}: {error}")
            overrides = None
            self._entry_path = entry.path
            yield entry
        if overrides is not None:
            self._fail(f"the archive ends at byte {self.offset}, after an extension header without its entry")

    def data(self) -> Iterator[memoryview]:
        """The stored bytes of the current entry that were not taken yet, in pieces as they arrive."""
        while self._unread:
            if self._position == len(self._buffer):
                self._fill()
            piece = memoryview(self._buffer)[self._position : self._position + self._unread]
            self._position += len(piece)
            self._unread -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read the stream to its end, so that whoever digests it has seen every byte."""
        self._position = len(self._buffer)
        while self._next_buffer():
            self._position = len(self._buffer)

    def _fail(self, message: str) -> NoReturn:
        raise LayerError(
            message,
            layer=self._layer,
            entry=self._entry_path,
            hint="the layer is damaged or not a tar archive; build or push the image again",
        )

    def _next_buffer(self) -> bool:
        self._buffer_offset += self._position
        self._position = 0
        self._buffer = self._stream.read(READ_BYTES)
        return bool(self._buffer)

    def _fill(self) -> None:
        if not self._next_buffer():
            self._fail(f"truncated: the stream ends at byte {self.offset}, {self._unread} bytes of data are missing")

    def _take(self, count: int) -> bytes:
        """Exactly so many bytes, or fewer at the end of the stream."""
        position = self._position
        piece = self._buffer[position : position + count]
        self._position = position + len(piece)
        while len(piece) < count and self._next_buffer():
            more = self._buffer[: count - len(piece)]
            self._position = len(more)
            piece += more
        return piece

    def _take_block(self) -> bytes | None:
        """The next header block, or None at the end of the archive."""
        block = self._take(BLOCK_BYTES)
        if not block:
            return None
        if block == tarheader.ZERO_BLOCK:
            second = self._take(BLOCK_BYTES)
            if second.strip(b"\0"):
                self._fail(f"corrupt: a lone zero block before byte {self.offset}")
            return None
        if len(block) < BLOCK_BYTES:
            if not block.strip(b"\0"):
                return None
            self._fail(f"truncated: the stream ends at byte {self.offset}, inside a header")
        return block

    def _skip(self) -> None:
        """Pass over what is left of the current entry and its padding."""
        remaining = self._unread + self._padding
        available = len(self._buffer) - self._position
        if remaining <= available:
            self._position += remaining
        else:
            for _ in self.data():
                pass
            self._take(self._padding)
        self._unread = self._padding = 0

    def _open_data(self, stored_bytes: int) -> None:
        if stored_bytes < 0:
            raise ValueError(f"size {stored_bytes} is negative")
        self._unread = stored_bytes
        self._padding = -stored_bytes % BLOCK_BYTES

    def _extension(self, fields: tuple[bytes, ...], overrides: _Overrides | None) -> _Overrides | None:
        """Take in a header that says something about those after it."""
        kind = fields[7]
        size = number(fields[4])
        self._open_data(size)
        if kind == b"V":
            return overrides
        if kind == b"N" or size > _EXTENSION_LIMIT_BYTES:
            raise ValueError(f"extension header of type {kind!r} and {size} bytes is not supported")
        body = b"".join(self.data())
        if kind == b"g":
            self._global.update(tarheader.pax_records(body))
            return overrides
        overrides = overrides or _Overrides()
        if kind in b"LK":
            name = body.partition(b"\0")[0]
            if kind == b"L":
                overrides.path = name
            else:
                overrides.link = name
            return overrides
        overrides.records += tarheader.pax_records(body)
        return overrides

    def _number(self, text: bytes) -> int:
        """`number`, remembered: modes and owners repeat."""
        value = self._numbers.get(text)
        if value is None:
            if len(self._numbers) > _NUMBER_MEMO_ENTRIES:
                self._numbers.clear()
            value = self._numbers[text] = number(text)
        return value

    def _entry(self, block: bytes, fields: tuple[bytes, ...], offset: int, overrides: _Overrides | None) -> TarEntry:
        name, mode, uid, gid, size, mtime, _, kind, link, magic, _, _, _, major, minor, prefix, tail = fields
        file_type = _FILE_TYPES.get(kind)
        if file_type is None:
            raise ValueError(f"entry type {kind!r} is not supported")
        path = name.partition(b"\0")[0]
        if magic == tarheader.MAGIC_POSIX and prefix[0]:
            if tail.endswith(tarheader.STAR_TRAILER):
                prefix = prefix[: tarheader.STAR_PREFIX_BYTES]
            path = prefix.partition(b"\0")[0] + b"/" + path
        if kind == b"\0" and path.endswith(b"/"):
            file_type = stat.S_IFDIR
        device = file_type in (stat.S_IFCHR, stat.S_IFBLK)
        entry = TarEntry(
            offset,
            path,
            file_type,
            self._number(mode) & 0o7777,
            self._number(uid),
            self._number(gid),
            tarheader.checked_time_ns(number(mtime) * NANOSECONDS),
            number(size),
            0,
            link.partition(b"\0")[0],
            self._number(major) if device else 0,
            self._number(minor) if device else 0,
            {},
            None,
        )
        stored_bytes = entry.size_bytes
        pairs: list[tuple[int, int]] | None = None
        if overrides is not None or self._global:
            stored_bytes, pairs = self._override(entry, overrides or _Overrides())
        if kind == b"S":
            pairs = self._old_sparse(block)
            entry.size_bytes = number(block[tarheader.SPARSE_SIZE_OFFSET : tarheader.SPARSE_SIZE_OFFSET + 12])
        self._place_data(entry, kind, stored_bytes, pairs)
        return entry

    def _place_data(self, entry: TarEntry, kind: bytes, stored_bytes: int, pairs: list[tuple[int, int]] | None) -> None:
        """Note what data follows the header, and where it belongs."""
        if entry.file_type != stat.S_IFREG:
            # Links, directories and nodes have no data whatever their size says, but for GNU's listed directories.
            entry.size_bytes = 0
            self._open_data(stored_bytes if kind == b"D" else 0)
            return
        self._open_data(stored_bytes)
        if pairs is not None:
            if not pairs and self._unread:
                pairs = self._sparse_map_in_data()
            entry.sparse = tarheader.sparse_map(pairs, entry.size_bytes, self._unread)
        entry.stored_bytes = self._unread

    def _override(self, entry: TarEntry, overrides: _Overrides) -> tuple[int, list[tuple[int, int]] | None]:
        """Apply extension headers; gives the stored size and the sparse pairs (empty: the map is in the data)."""
        if overrides.path is not None:
            entry.path = overrides.path
        if overrides.link is not None:
            entry.link = overrides.link
        values = {**self._global, **dict(overrides.records)} if self._global else dict(overrides.records)
        if not values:
            return entry.size_bytes, None
        numbers: dict[str, int] = {}
        for key, value in values.items():
            if not value:
                continue  # An empty value takes back a global one; xattrs, which may be empty, are read apart.
            if key == b"path":
                entry.path = value
            elif key == b"linkpath":
                entry.link = value
            elif key == b"mtime":
                entry.mtime_ns = tarheader.pax_time_ns(value)
            elif key in (b"uid", b"gid", b"size"):
                numbers[key.decode()] = tarheader.pax_number(value)
        entry.uid = numbers.get("uid", entry.uid)
        entry.gid = numbers.get("gid", entry.gid)
        entry.size_bytes = stored_bytes = numbers.get("size", entry.size_bytes)
        entry.xattrs = tarheader.xattrs(values.items())
        return stored_bytes, self._pax_sparse(entry, values, overrides.records)

    def _pax_sparse(
        self, entry: TarEntry, values: dict[bytes, bytes], records: list[tuple[bytes, bytes]]
    ) -> list[tuple[int, int]] | None:
        """GNU's pax forms of a sparse file: 0.0 repeats records, 0.1 lists numbers, 1.0 has its map in the data."""
        version = values.get(b"GNU.sparse.major"), values.get(b"GNU.sparse.minor")
        size = values.get(b"GNU.sparse.realsize", values.get(b"GNU.sparse.size"))
        if size is None or entry.file_type != stat.S_IFREG:
            return None
        entry.path = values.get(b"GNU.sparse.name", entry.path)
        entry.size_bytes = tarheader.pax_number(size)
        if version == (b"1", b"0"):
            return []
        if version not in ((None, None), (b"0", b"0"), (b"0", b"1")):
            raise ValueError(f"sparse format {version[0]!r}.{version[1]!r} is not supported")
        listed = values.get(b"GNU.sparse.map")
        if listed is not None:
            return tarheader.sparse_pairs(listed.split(b",") if listed else [])
        repeated = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
        return tarheader.sparse_pairs([value for key, value in records if key in repeated])

    def _old_sparse(self, block: bytes) -> list[tuple[int, int]]:
        pairs = tarheader.old_sparse_pairs(block, tarheader.SPARSE_OFFSET, tarheader.SPARSE_PAIRS)
        more = block[tarheader.SPARSE_MORE_OFFSET]
        while more:
            extension = self._take(BLOCK_BYTES)
            if len(extension) < BLOCK_BYTES:
                raise ValueError("the stream ends inside a sparse map")
            pairs += tarheader.old_sparse_pairs(extension, 0, tarheader.SPARSE_EXTENSION_PAIRS)
            more = extension[tarheader.SPARSE_EXTENSION_MORE_OFFSET]
        return pairs

    def _sparse_map_in_data(self) -> list[tuple[int, int]]:
        """The map of pax sparse format 1.0: decimal lines, padded to a whole block, before the data proper."""
        text = b""
        needed = None
        while True:
            lines = text.split(b"\n")
            if len(lines) > 1 and needed is None:
                needed = 1 + 2 * tarheader.pax_number(lines[0])
            if needed is not None and len(lines) > needed:
                return tarheader.sparse_pairs(lines[1:needed])
            block = self._take(BLOCK_BYTES) if self._unread >= BLOCK_BYTES else b""
            if len(block) < BLOCK_BYTES:
                raise ValueError("the data ends inside its sparse map")
            self._unread -= BLOCK_BYTES
            text += block
