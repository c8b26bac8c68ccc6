"""Blob streams: bytes as they come, checked against digest and size on the way."""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

from imaged.errors import DigestMismatchError, SourceError
from imaged.ids import OciDigest
from imaged.oci.descriptor import DOCUMENT_LIMIT_BYTES, Descriptor

READ_BYTES = 512 << 10
"""Read size that keeps system calls, hashing and decompression outside the interpreter lock most of the time."""


class ByteStream(Protocol):
    """Something to read from, front to back."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, at least one before the end of the stream; b"" at the end."""
        ...


class FileSlice:
    """A range of an open file. Reads do not move the file's position, so slices of one file may be read by threads."""

    def __init__(self, fd: int, offset: int, size_bytes: int, what: str) -> None:
        self.size_bytes = size_bytes
        self._fd, self._offset, self._end, self._what = fd, offset, offset + size_bytes, what

    def read(self, size: int, /) -> bytes:
        wanted = min(size, self._end - self._offset)
        if wanted <= 0:
            return b""
        data = os.pread(self._fd, wanted, self._offset)
        if not data:
            raise SourceError(
                f"{self._what} ends {self._end - self._offset} bytes early", hint="fetch or export the image again"
            )
        self._offset += len(data)
        return data


class VerifiedStream:
    """Hands a stream through and raises DigestMismatchError when it is not the blob it should be.

    The digest is checked before the last bytes are given out, and again that nothing follows them. Either check may
    be left out: `digest` None for a blob without one, `size_bytes` None for one whose size nobody stated.
    """

    def __init__(self, stream: ByteStream, *, digest: OciDigest | None, size_bytes: int | None, what: str) -> None:
        self._stream, self._digest, self._size_bytes, self._what = stream, digest, size_bytes, what
        self._hash = hashlib.new(digest.algorithm) if digest is not None else None
        self.offset = 0

    @classmethod
    def of(cls, stream: ByteStream, blob: Descriptor, what: str) -> VerifiedStream:
        return cls(stream, digest=blob.digest, size_bytes=blob.size_bytes, what=what)

    def read(self, size: int, /) -> bytes:
        if size == 0:
            return b""
        data = self._stream.read(size)
        self.offset += len(data)
        if self._size_bytes is not None and self.offset > self._size_bytes:
            raise self._mismatch(f"more than the {self._size_bytes} bytes its descriptor says")
        if self._hash is not None:
            self._hash.update(data)
        if not data and self._size_bytes is not None and self.offset < self._size_bytes:
            raise self._mismatch(f"{self.offset} bytes, not the {self._size_bytes} its descriptor says")
        if self._hash is not None and self._digest is not None and (not data or self.offset == self._size_bytes):
            found = f"{self._digest.algorithm}:{self._hash.hexdigest()}"
            if found != str(self._digest):
                raise self._mismatch(f"digest {found}, not {self._digest}")
        return data

    def _mismatch(self, fact: str) -> DigestMismatchError:
        return DigestMismatchError(
            f"{self._what} has {fact}", hint="the source is damaged or was changed: fetch or push the image again"
        )


def read_document(stream: ByteStream, blob: Descriptor, what: str) -> bytes:
    """All of a small blob, verified; SourceError above DOCUMENT_LIMIT_BYTES."""
    if blob.size_bytes > DOCUMENT_LIMIT_BYTES:
        raise SourceError(f"{what} has {blob.size_bytes} bytes, more than the {DOCUMENT_LIMIT_BYTES} allowed")
    verified = VerifiedStream.of(stream, blob, what)
    pieces = []
    while piece := verified.read(READ_BYTES):
        pieces.append(piece)
    return b"".join(pieces)
