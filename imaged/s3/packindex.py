"""The table of contents of a pack in a bucket; see docs/formats/packindex.md.

offset  size  field
     0     4  magic "pvX1"
     4     4  count of rows, little endian
     8     8  length of the pack object
    16     -  rows in the order of the pack, of 52 bytes each:
                 32  id of the chunk
                  8  offset of its frame
                  4  size_bytes
                  4  payload_bytes
                  1  codec
                  3  zero
 end - 32    32  BLAKE3-256 of all that comes before
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from imaged.chunkstore.pack import PACK_HEADER_BYTES
from imaged.errors import FormatError
from imaged.frame import CHUNK_LIMIT_BYTES, HEADER_BYTES, Codec
from imaged.ids import ChunkId

MAGIC = b"pvX1"
HEADER = struct.Struct("<4sIQ")
ROW = struct.Struct("<32sQIIB3s")
DIGEST_BYTES = 32


class Row(NamedTuple):
    """One frame of a pack."""

    chunk: ChunkId
    offset: int
    size_bytes: int
    payload_bytes: int
    codec: Codec

    @property
    def end(self) -> int:
        return self.offset + HEADER_BYTES + self.payload_bytes


class PackIndex(NamedTuple):
    """The frames of a pack object that count, in its order."""

    pack_bytes: int
    rows: tuple[Row, ...]


def pack(pack_bytes: int, rows: Sequence[Row]) -> bytes:
    parts = [HEADER.pack(MAGIC, len(rows), pack_bytes)]
    parts += [ROW.pack(row.chunk, row.offset, row.size_bytes, row.payload_bytes, row.codec, bytes(3)) for row in rows]
    body = b"".join(parts)
    return body + blake3(body).digest()


def parse(raw: bytes) -> PackIndex:
    """FormatError for what was cut, changed, or names frames that can not be there."""
    if len(raw) < HEADER.size + DIGEST_BYTES:
        raise FormatError("pack index", expected=f"at least {HEADER.size + DIGEST_BYTES} bytes", found=f"{len(raw)}")
    magic, count, pack_bytes = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise FormatError("pack index", expected=f"magic {MAGIC!r}", found=repr(magic))
    expected = HEADER.size + count * ROW.size + DIGEST_BYTES
    if len(raw) != expected:
        raise FormatError("pack index", expected=f"{expected} bytes for {count} rows", found=f"{len(raw)}")
    if blake3(raw[:-DIGEST_BYTES]).digest() != raw[-DIGEST_BYTES:]:
        raise FormatError("pack index", expected="bytes of its digest", found="others")
    rows = []
    end = PACK_HEADER_BYTES
    for chunk, offset, size_bytes, payload_bytes, codec, _ in ROW.iter_unpack(raw[HEADER.size : -DIGEST_BYTES]):
        if codec not in (Codec.RAW, Codec.ZSTD):
            raise FormatError("pack index row", expected="codec 0 or 1", found=str(codec))
        if not 0 < size_bytes <= CHUNK_LIMIT_BYTES or not 0 < payload_bytes <= CHUNK_LIMIT_BYTES:
            raise FormatError("pack index row", expected="a chunk", found=f"{size_bytes} bytes in {payload_bytes}")
        row = Row(ChunkId(chunk), offset, size_bytes, payload_bytes, Codec(codec))
        if row.offset < end or row.end > pack_bytes:
            raise FormatError("pack index row", expected=f"a frame from {end} to {pack_bytes}", found=f"{row.offset}")
        end = row.end
        rows.append(row)
    return PackIndex(pack_bytes, tuple(rows))
