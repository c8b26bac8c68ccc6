"""A chunk as it is stored and as it travels: one header and one payload.

Pack files, `GET /v1/chunks/ID` and `POST /v1/chunks/batch` all carry these bytes; see docs/formats/frame.md.

    offset  size  field
         0     4  magic "pvF1"
         4     1  codec: 0 raw, 1 zstd (one zstd frame), 255 missing (on the wire only: "I do not have this id")
         5     3  zero
         8     4  size_bytes: length of the uncompressed chunk, little endian
        12     4  payload_bytes: length of the payload, little endian
        16    32  id: BLAKE3-256 of the uncompressed chunk
        48     -  payload
"""

from __future__ import annotations

import enum
import struct
import threading
from dataclasses import dataclass
from typing import Self

import zstandard

from imaged.errors import ChunkCorruptError, FormatError
from imaged.ids import ChunkId

HEADER = struct.Struct("<4sB3sII32s")
HEADER_BYTES = HEADER.size
MAGIC = b"pvF1"
FRAME_TYPE = "application/vnd.pvisor.frame"
IMMUTABLE = "public, max-age=31536000, immutable"
"""For `Cache-Control`: what an id names never changes."""
CHUNK_LIMIT_BYTES = 1 << 20
"""No chunk of any image is longer; readers refuse a header that says so before they allocate."""
ZSTD_LEVEL = 3
ZSTD_DENSE_LEVEL = 18
"""For what every cold start of an image fetches whole. Of the 1 MB of EROFS metadata of a Debian root it makes 102.6 KB
in 83 ms, with less search than zstd's own level 18 (98.6 KB in 436 ms); level 3 makes 128.5 KB in 2 ms, 9 115.3 in 16,
15 112.8 in 136, 19 97.3 in 434."""
_DENSE = zstandard.ZstdCompressionParameters.from_level(
    ZSTD_DENSE_LEVEL, source_size=CHUNK_LIMIT_BYTES, search_log=2, target_length=32, write_content_size=True
)
_PADDING = b"\0\0\0"


class Codec(enum.IntEnum):
    """How a payload holds its chunk."""

    RAW = 0
    ZSTD = 1
    MISSING = 255


class _Contexts(threading.local):
    """One zstd context per thread: a shared one returns wrong bytes without an exception."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor()

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        found = self.compressors.get(level)
        if found is None:
            if level == ZSTD_DENSE_LEVEL:
                found = zstandard.ZstdCompressor(compression_params=_DENSE)
            else:
                found = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False)
            self.compressors[level] = found
        return found


_contexts = _Contexts()


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The 48 bytes before a payload."""

    id: ChunkId
    codec: Codec
    size_bytes: int
    payload_bytes: int

    @classmethod
    def parse(cls, raw: bytes | memoryview) -> Self:
        """From 48 bytes; FormatError for a wrong magic, an unknown codec a length over the limit, or none."""
        if len(raw) != HEADER_BYTES:
            raise FormatError("frame header", expected=f"{HEADER_BYTES} bytes", found=f"{len(raw)} bytes")
        magic, codec, padding, size_bytes, payload_bytes, chunk = HEADER.unpack(raw)
        if magic != MAGIC or padding != _PADDING:
            raise FormatError("frame header", expected=f"magic {MAGIC!r}", found=repr(bytes(raw[:8])))
        try:
            known = Codec(codec)
        except ValueError:
            raise FormatError("frame header", expected="codec 0, 1 or 255", found=str(codec)) from None
        if size_bytes > CHUNK_LIMIT_BYTES or payload_bytes > CHUNK_LIMIT_BYTES:
            found = f"{size_bytes} bytes in {payload_bytes}"
            raise FormatError("frame header", expected=f"at most {CHUNK_LIMIT_BYTES} bytes", found=found)
        if known is not Codec.MISSING and not (size_bytes and payload_bytes):
            found = f"{size_bytes} bytes in {payload_bytes}"
            raise FormatError("frame header", expected="a chunk of at least one byte", found=found)
        if known is Codec.RAW and size_bytes != payload_bytes:
            raise FormatError("raw frame", expected=f"payload of {size_bytes} bytes", found=f"{payload_bytes}")
        if known is Codec.MISSING and (size_bytes or payload_bytes):
            raise FormatError("missing frame", expected="no payload", found=f"{payload_bytes} bytes")
        return cls(ChunkId(chunk), known, size_bytes, payload_bytes)

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, self.codec, _PADDING, self.size_bytes, self.payload_bytes, self.id)


@dataclass(frozen=True, slots=True)
class Frame:
    """One stored chunk. Not verified until `open`: a frame may come from a disk or a server that lies."""

    header: FrameHeader
    payload: bytes

    @property
    def id(self) -> ChunkId:
        return self.header.id

    @property
    def stored_bytes(self) -> int:
        """Header and payload: what a pack or the wire carries."""
        return HEADER_BYTES + len(self.payload)

    @classmethod
    def of(cls, data: bytes, *, chunk: ChunkId | None = None, level: int = ZSTD_LEVEL) -> Self:
        """Compress data; raw when zstd saves less than one part in 32. `chunk` is its id if already known."""
        chunk = chunk if chunk is not None else ChunkId.of(data)
        packed = _contexts.compressor(level).compress(data)
        if len(packed) > len(data) - len(data) // 32:
            return cls(FrameHeader(chunk, Codec.RAW, len(data), len(data)), data)
        return cls(FrameHeader(chunk, Codec.ZSTD, len(data), len(packed)), packed)

    @classmethod
    def missing(cls, chunk: ChunkId) -> Self:
        """The answer to a batch for an id that is not there."""
        return cls(FrameHeader(chunk, Codec.MISSING, 0, 0), b"")

    @classmethod
    def parse(cls, raw: bytes | memoryview) -> Self:
        """From the whole frame; FormatError when the length differs from what its header says."""
        header = FrameHeader.parse(raw[:HEADER_BYTES])
        payload = bytes(raw[HEADER_BYTES:])
        if len(payload) != header.payload_bytes:
            raise FormatError("frame", expected=f"payload of {header.payload_bytes} bytes", found=f"{len(payload)}")
        return cls(header, payload)

    def pack(self) -> bytes:
        return self.header.pack() + self.payload

    def open(self) -> bytes:
        """The chunk's bytes, verified against its id; ChunkCorruptError otherwise."""
        header = self.header
        if header.codec is Codec.RAW:
            data = self.payload
        elif header.codec is Codec.ZSTD:
            data = self._decompress()
        else:
            raise ChunkCorruptError(header.id, "a missing frame has no bytes")
        if len(data) != header.size_bytes or ChunkId.of(data) != header.id:
            raise ChunkCorruptError(header.id, "stored bytes do not match the id")
        return data

    def _decompress(self) -> bytes:
        try:
            declared = zstandard.frame_content_size(self.payload) if self.payload else -1
        except zstandard.ZstdError as error:
            raise ChunkCorruptError(self.header.id, f"zstd: {error}") from error
        if declared != self.header.size_bytes:
            raise ChunkCorruptError(
                self.header.id, f"zstd frame declares {declared} bytes, its header {self.header.size_bytes}"
            )
        try:
            return _contexts.decompressor.decompress(self.payload)
        except zstandard.ZstdError as error:
            raise ChunkCorruptError(self.header.id, f"zstd: {error}") from error
