"""Ids and digests as types: what names a chunk, what names an OCI blob."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from blake3 import blake3

from imaged.errors import FormatError

BLOCK_BYTES = 4096
"""Every extent and every chunk is counted in blocks of this size."""
_HEX_DIGITS = {"sha256": 64, "sha512": 128}


class ChunkId(bytes):
    """BLAKE3-256 of a chunk's uncompressed bytes: 32 bytes, shown as 64 hex digits.

    Block images and image records are named by the id of their root chunk, so one id verifies every byte below it.
    """

    __slots__ = ()
    SIZE_BYTES = 32

    def __new__(cls, raw: bytes) -> Self:
        if len(raw) != cls.SIZE_BYTES:
            raise FormatError("chunk id", expected=f"{cls.SIZE_BYTES} bytes", found=f"{len(raw)} bytes")
        return super().__new__(cls, raw)

    @classmethod
    def of(cls, data: bytes | memoryview) -> Self:
        """The id of these bytes."""
        return cls(blake3(data).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """From 64 lower-case hex digits; FormatError otherwise."""
        if not cls.is_id(text):
            raise FormatError("chunk id", expected="64 lower-case hex digits", found=repr(text[:80]))
        return cls(bytes.fromhex(text))

    @classmethod
    def several(cls, raw: bytes, start: int = 0) -> list[Self]:
        """Ids that follow one another, without gaps, from `start` to the end. FormatError when one is cut off."""
        size = cls.SIZE_BYTES
        if (len(raw) - start) % size:
            raise FormatError("chunk ids", expected=f"{size} bytes each", found=f"{len(raw) - start} bytes")
        new = bytes.__new__
        return [new(cls, raw[at : at + size]) for at in range(start, len(raw), size)]

    @staticmethod
    def is_id(text: str) -> bool:
        """Whether text has the form of an id."""
        return re.fullmatch(r"[0-9a-f]{64}", text) is not None

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"ChunkId({self.hex()[:12]})"


@dataclass(frozen=True, slots=True)
class OciDigest:
    """`sha256:<hex>` or `sha512:<hex>` of an OCI blob or of an uncompressed layer (its diff_id)."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: str) -> Self:
        algorithm, _, digits = text.partition(":")
        if _HEX_DIGITS.get(algorithm) != len(digits) or re.fullmatch(r"[0-9a-f]+", digits) is None:
            raise FormatError("OCI digest", expected="sha256:<64 hex> or sha512:<128 hex>", found=repr(text[:160]))
        return cls(algorithm, digits)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"
