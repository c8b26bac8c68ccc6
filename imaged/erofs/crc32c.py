"""CRC-32C (Castagnoli), as EROFS seals its superblock: seed all ones, no final inversion."""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78
"""0x1EDC6F41 with its bits reversed."""


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, seed: int = 0xFFFFFFFF) -> int:
    """The running value after `data`, as the kernel's crc32c(seed, data); the usual checksum is its complement.

    One byte a step, about 15 MB/s: only ever used for one block.
    """
    table = _TABLE
    value = seed
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value
