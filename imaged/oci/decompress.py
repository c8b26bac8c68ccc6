"""Decompression of layers: plain, gzip (RFC 1952) and zstd (RFC 8878), told apart by content, not by media type.

Media types lie often enough that every tool looks at the first bytes. Output comes in bounded pieces whatever the
ratio, so that a small blob which expands to terabytes costs its reader no memory.
"""

from __future__ import annotations

import gzip
import zlib
from typing import cast

import zstandard
from isal import igzip, isal_zlib

from imaged.errors import LayerError
from imaged.oci.blob import READ_BYTES, ByteStream

_ISAL_ERROR = cast(type[Exception], isal_zlib.error)  # its stub says an instance
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
_OTHER_MAGICS = {b"\xfd7zXZ\x00": "xz", b"BZh91AY&SY": "bzip2", b"\x04\x22\x4d\x18": "lz4"}
_HEAD_BYTES = 10
_ZSTD_BLOCK_LIMIT_BYTES = 128 << 10
_ZSTD_GROUP_BLOCKS = 8
_RAW_BLOCK, _RLE_BLOCK, _COMPRESSED_BLOCK = 0, 1, 2


def decompress(stream: ByteStream) -> ByteStream:
    """The uncompressed bytes of a layer; its reads raise LayerError for corrupt or truncated data.

    The end is only reported once `stream` has reported its own, so a verified stream below is verified to its end.
    """
    source = _Source(stream)
    head = source.head
    if head.startswith(_GZIP_MAGIC):
        return GzipStream(source)
    if head.startswith(_ZSTD_MAGIC) or (head[1:4] == _ZSTD_SKIPPABLE and head[0] >> 4 == 5):
        return ZstdStream(source)
    for magic, name in _OTHER_MAGICS.items():
        if head.startswith(magic):
            raise LayerError(
                f"is compressed with {name}; only gzip, zstd and plain tar can be read",
                hint="`skopeo copy --dest-compress-format gzip` rewrites the image",
            )
    return source


class _Source:
    """The compressed stream with its first bytes looked at, and its offset for messages."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        head = b""
        while len(head) < _HEAD_BYTES and (piece := stream.read(READ_BYTES)):
            head += piece
        self.head = head[:_HEAD_BYTES]
        self.offset = 0
        self._pending = head

    def read(self, size: int, /) -> bytes:
        if self._pending:
            data, self._pending = self._pending[:size], self._pending[size:]
        else:
            data = self._stream.read(size)
        self.offset += len(data)
        return data

    def readinto(self, buffer: memoryview, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class GzipStream:
    """gzip of any member structure. Zero bytes after the last member are padding, as gzip(1) reads them."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._file: gzip.GzipFile = igzip.IGzipFile(fileobj=source, mode="rb")  # type: ignore[no-untyped-call]
        self._produced = 0

    def read(self, size: int, /) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError as error:
            raise self._error("ends in the middle of a gzip member") from error
        except (gzip.BadGzipFile, _ISAL_ERROR, zlib.error) as error:
            raise self._error(f"has corrupt gzip data ({error})") from error
        self._produced += len(data)
        return data

    def _error(self, fact: str) -> LayerError:
        return LayerError(
            f"{fact} at or before compressed byte {self._source.offset}, after {self._produced} uncompressed bytes",
            hint="the layer was damaged when the image was made: build or push it again",
        )


class ZstdStream:
    """zstd of any number of frames, skippable ones included.

    Frame and block headers are walked here and blocks handed to libzstd in small groups. That bounds the output of
    one call to a megabyte, and tells a truncated stream from a finished one, which `stream_reader` does not.
    """

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._input = b""
        self._position = 0
        self._in_frame = False
        self._has_checksum = False
        self._ended = False
        self._produced = 0
        self._ready = memoryview(b"")
        self._decompressor = zstandard.ZstdDecompressor().decompressobj(
            write_size=_ZSTD_GROUP_BLOCKS * _ZSTD_BLOCK_LIMIT_BYTES, read_across_frames=True
        )

    def read(self, size: int, /) -> bytes:
        while size and not self._ready and not self._ended:
            group = self._next_group()
            try:
                self._ready = memoryview(self._decompressor.decompress(group))
            except zstandard.ZstdError as error:
                raise self._error(f"has corrupt zstd data ({error})") from error
            self._produced += len(self._ready)
        data = bytes(self._ready[:size])
        self._ready = self._ready[size:]
        return data

    def _next_group(self) -> bytes:
        """Frame headers, blocks and checksums, of at most _ZSTD_GROUP_BLOCKS blocks; less only at the end."""
        parts: list[bytes] = []
        for _ in range(_ZSTD_GROUP_BLOCKS):
            if not self._in_frame and not self._begin_frame(parts):
                break
            header = self._take(3)
            fields = int.from_bytes(header, "little")
            kind, size = fields >> 1 & 3, fields >> 3
            if kind > _COMPRESSED_BLOCK or size > _ZSTD_BLOCK_LIMIT_BYTES:
                raise self._error(f"has corrupt zstd data (block of type {kind} and size {size})")
            parts += (header, self._take(1 if kind == _RLE_BLOCK else size))
            if fields & 1:
                parts.append(self._take(4 if self._has_checksum else 0))
                self._in_frame = False
        return b"".join(parts)

    def _begin_frame(self, parts: list[bytes]) -> bool:
        """Read up to the first block of the next frame; False at the end of the stream."""
        while True:
            if self._position == len(self._input) and not self._refill():
                self._ended = True
                return False
            magic = self._take(4)
            if magic == _ZSTD_MAGIC:
                break
            if magic[1:] != _ZSTD_SKIPPABLE or magic[0] >> 4 != 5:
                raise self._error(f"has {magic!r} where a zstd frame should begin")
            self._skip(int.from_bytes(self._take(4), "little"))
        flags = self._take(1)
        single_segment = flags[0] >> 5 & 1
        dictionary_bytes = (0, 1, 2, 4)[flags[0] & 3]
        size_bytes = (single_segment, 2, 4, 8)[flags[0] >> 6]
        parts += (magic, flags, self._take(1 - single_segment + dictionary_bytes + size_bytes))
        self._has_checksum = bool(flags[0] & 4)
        self._in_frame = True
        return True

    def _refill(self) -> bool:
        piece = self._source.read(READ_BYTES)
        self._input = self._input[self._position :] + piece
        self._position = 0
        return bool(piece)

    def _take(self, size: int) -> bytes:
        while len(self._input) - self._position < size:
            if not self._refill():
                raise self._error("ends in the middle of a zstd frame")
        self._position += size
        return self._input[self._position - size : self._position]

    def _skip(self, size: int) -> None:
        while size:
            step = min(size, READ_BYTES)
            self._take(step)
            size -= step

    def _error(self, fact: str) -> LayerError:
        offset = self._source.offset - len(self._input) + self._position
        return LayerError(
            f"{fact} at or before compressed byte {offset}, after {self._produced} uncompressed bytes",
            hint="the layer was damaged when the image was made: build or push it again",
        )
