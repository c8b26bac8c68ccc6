"""Rows of a store's index: where a chunk's frame lies, what a pack holds. docs/formats/pack.md has the bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple, Self

from imaged.chunkstore.pack import PACK_HEADER_BYTES
from imaged.frame import HEADER_BYTES, Codec

LOCATION = struct.Struct("<IQIIB")
"""pack, offset, size_bytes, payload_bytes, codec"""
PACK_NUMBER = struct.Struct(">I")
FOREIGN_PACKS = 1 << 31
"""Packs of other servers of a bucket have greater numbers (imaged/s3/packtable.py), those of this host lesser ones."""
_PACK_ROW = struct.Struct("<QBIQQ")


class Location(NamedTuple):
    """Where a chunk's frame lies, and what its header says."""

    pack: int
    offset: int
    size_bytes: int
    payload_bytes: int
    codec: Codec

    @property
    def stored_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        pack, offset, size_bytes, payload_bytes, codec = LOCATION.unpack(raw)
        return cls(pack, offset, size_bytes, payload_bytes, Codec(codec))

    def pack_bytes(self) -> bytes:
        return LOCATION.pack(self.pack, self.offset, self.size_bytes, self.payload_bytes, self.codec)


class PackRow(NamedTuple):
    """One pack: how much of the file counts, and what of it is live (is the one place of a chunk)."""

    committed_bytes: int = PACK_HEADER_BYTES
    sealed: bool = False
    live_chunks: int = 0
    live_bytes: int = 0
    live_size_bytes: int = 0

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        committed_bytes, sealed, live_chunks, live_bytes, live_size_bytes = _PACK_ROW.unpack(raw)
        return cls(committed_bytes, bool(sealed), live_chunks, live_bytes, live_size_bytes)

    def pack_bytes(self) -> bytes:
        return _PACK_ROW.pack(*self)

    def changed(self, location: Location, sign: int) -> PackRow:
        """With one live chunk more (sign 1) or less (-1)."""
        return self._replace(
            live_chunks=self.live_chunks + sign,
            live_bytes=self.live_bytes + sign * location.stored_bytes,
            live_size_bytes=self.live_size_bytes + sign * location.size_bytes,
        )

    @property
    def dead_bytes(self) -> int:
        return self.committed_bytes - PACK_HEADER_BYTES - self.live_bytes


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """`logical_bytes` uncompressed and `stored_bytes` as frames of what is live.

    `dead_bytes` are of the packs' bytes on disk those that no chunk lies in, nor will: gc frees them, but for parts of
    blocks.
    """

    logical_bytes: int
    stored_bytes: int
    chunks: int
    packs: int
    dead_bytes: int
