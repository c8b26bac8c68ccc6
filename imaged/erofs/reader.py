"""Walks the inodes of a metadata image that `imaged.erofs.writer` wrote, to read or to change where file data is.

Strict: what the writer would not write is FormatError, never a guess.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass

from imaged.erofs import format as erofs
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES

_DOTS = (b".", b"..")


@dataclass(frozen=True, slots=True)
class FoundInode:
    """An inode on disk: what is needed to find its data. `tail_offset` is the byte behind inode and xattrs."""

    nid: int
    mode: int
    layout: int
    size_bytes: int
    union: int
    tail_offset: int


def move_to_primary(image: bytearray, root_nid: int, device: erofs.DeviceSlot) -> None:
    """Make every chunk index name a block of the primary device in place of the data device.

    The superblock is the caller's to change. FormatError.
    """
    for inode in inodes(image, root_nid):
        if not stat.S_ISREG(inode.mode) or not inode.size_bytes:
            continue
        for offset in _indexes(image, inode):
            _, number, start = erofs.CHUNK_INDEX.unpack_from(image, offset)
            if number != erofs.DATA_DEVICE or (start != erofs.HOLE and start >= device.blocks):
                expected = f"a block of device {erofs.DATA_DEVICE} below {device.blocks}"
                raise _error(inode.nid, expected, f"block {start} of device {number}")
            if start != erofs.HOLE:
                start += device.mapped_block
            erofs.CHUNK_INDEX.pack_into(image, offset, 0, erofs.PRIMARY_DEVICE, start)


def inodes(image: bytes | bytearray, root_nid: int) -> Iterator[FoundInode]:
    """Every inode that the root leads to, once. FormatError."""
    seen = {root_nid}
    pending = [root_nid]
    while pending:
        inode = _inode(image, pending.pop())
        yield inode
        if stat.S_ISDIR(inode.mode):
            for nid in _children(image, inode):
                if nid not in seen:
                    seen.add(nid)
                    pending.append(nid)


def _inode(image: bytes | bytearray, nid: int) -> FoundInode:
    offset = nid * erofs.NID_BYTES
    extended = offset < len(image) and image[offset] & 1
    form = erofs.EXTENDED_INODE if extended else erofs.COMPACT_INODE
    if not erofs.METADATA_OFFSET <= offset <= len(image) - form.size:
        raise _error(nid, f"an inode inside {len(image)} bytes", f"offset {offset}")
    fields = form.unpack_from(image, offset)
    kind, xattr_units, mode, _, size_bytes = fields[:5]
    union = fields[5 if extended else 6]
    layout = kind >> 1
    if layout not in (erofs.FLAT_PLAIN, erofs.FLAT_INLINE, erofs.CHUNK_BASED):
        raise _error(nid, "a known data layout", f"format {kind:#x}")
    xattr_bytes = erofs.XATTR_HEADER.size + 4 * (xattr_units - 1) if xattr_units else 0
    return FoundInode(nid, mode, layout, size_bytes, union, offset + form.size + xattr_bytes)


def _indexes(image: bytes | bytearray, inode: FoundInode) -> range:
    """The offsets of a regular file's chunk indexes."""
    bits = inode.union & erofs.CHUNK_BITS_MASK
    if inode.layout != erofs.CHUNK_BASED or inode.union != bits | erofs.CHUNK_INDEXES:
        raise _error(inode.nid, "a file in chunks", f"layout {inode.layout}, chunk format {inode.union:#x}")
    count = -(-inode.size_bytes // (BLOCK_BYTES << bits))
    first = erofs.align_index(inode.tail_offset)
    end = first + count * erofs.CHUNK_INDEX.size
    if end > len(image):
        raise _error(inode.nid, f"{count} chunk indexes inside {len(image)} bytes", f"their end at {end}")
    return range(first, end, erofs.CHUNK_INDEX.size)


def _children(image: bytes | bytearray, inode: FoundInode) -> Iterator[int]:
    """The inode numbers in a directory, without those of `.` and `..`."""
    inline = inode.layout == erofs.FLAT_INLINE
    if inode.layout not in (erofs.FLAT_PLAIN, erofs.FLAT_INLINE) or inode.size_bytes > len(image):
        expected = f"a directory in blocks, of at most {len(image)} bytes"
        raise _error(inode.nid, expected, f"layout {inode.layout}, {inode.size_bytes} bytes")
    for position in range(0, inode.size_bytes, BLOCK_BYTES):
        size_bytes = min(BLOCK_BYTES, inode.size_bytes - position)
        last = position + size_bytes == inode.size_bytes
        offset = inode.tail_offset if inline and last else inode.union * BLOCK_BYTES + position
        if size_bytes > len(image) - offset:
            raise _error(inode.nid, f"names inside {len(image)} bytes", f"{size_bytes} at {offset}")
        yield from _entries(image[offset : offset + size_bytes], inode.nid)


def _entries(block: bytes | bytearray, directory: int) -> Iterator[int]:
    """The numbers in one directory block."""
    size = erofs.DIRENT.size
    if len(block) < size:
        raise _error(directory, f"an entry of {size} bytes", f"{len(block)}")
    names_at = erofs.DIRENT.unpack_from(block)[1]
    if names_at % size or not size <= names_at < len(block):
        raise _error(directory, "names behind the entries", f"names at {names_at}")
    entries = list(erofs.DIRENT.iter_unpack(block[:names_at]))
    ends = [entry[1] for entry in entries[1:]] + [len(block)]
    for (nid, begin, _, _), end in zip(entries, ends, strict=True):
        if not names_at <= begin < end <= len(block):
            raise _error(directory, "a name behind the last", f"{begin} to {end}")
        if bytes(block[begin:end]) not in _DOTS:
            yield nid


def _error(nid: int, expected: str, found: str) -> FormatError:
    return FormatError(f"EROFS inode {nid}", expected=expected, found=found)
