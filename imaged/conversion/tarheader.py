"""The bytes of a tar header and of its extensions: POSIX ustar and pax, old GNU, and GNU sparse maps.

    offset  size  field                     offset  size  field
         0   100  name                         257     6  magic "ustar\\0" (POSIX) or "ustar " (GNU)
       100     8  mode                         263     2  version
       108     8  uid                          265    32  user name (not used here: ids decide)
       116     8  gid                          297    32  group name
       124    12  size                         329     8  device major
       136    12  mtime                        337     8  device minor
       148     8  checksum                     345   155  prefix (POSIX; 131 bytes in star archives)
       156     1  type flag                    386    96  GNU sparse: four pairs of offset and length
       157   100  link name                    482     1  GNU sparse: more pairs in the next block
                                               483    12  GNU sparse: size of the file with its holes

Numbers are octal text, or base 256 (two's complement, big endian) when the first bit is set. Everything here raises
ValueError for bytes that do not follow the format; the reader adds where that was.

https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html and "Basic Tar Format" of the GNU tar manual.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

BLOCK_BYTES = 512
ZERO_BLOCK = bytes(BLOCK_BYTES)
HEADER = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12s")
MAGIC_POSIX = b"ustar\0"
STAR_TRAILER = b"tar\0"
STAR_PREFIX_BYTES = 131
SPARSE_OFFSET, SPARSE_PAIRS, SPARSE_MORE_OFFSET, SPARSE_SIZE_OFFSET = 386, 4, 482, 483
SPARSE_EXTENSION_PAIRS, SPARSE_EXTENSION_MORE_OFFSET = 21, 504
NANOSECONDS = 1_000_000_000
SparseMap = tuple[tuple[int, int], ...]
"""(offset, length) of each stored piece, ascending; what is between reads as zeros."""

_CHECKSUM_OFFSET, _CHECKSUM_BYTES = 148, 8
_ADLER_MODULUS = 65521
_XATTR, _XATTR_BASE64 = b"SCHILY.xattr.", b"LIBARCHIVE.xattr."
_MTIME_LIMIT_S = 1 << 62


def number(field: bytes) -> int:
    """A numeric header field: octal or base 256. Empty is 0."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    text = field.partition(b"\0")[0].strip(b" ")
    if not text:
        text = field.strip(b" \0") or b"0"
    if not text.isdigit():
        raise ValueError(f"{text!r} is not an octal number")
    return int(text, 8)


def check(block: bytes) -> None:
    """Compare the header checksum, as unsigned bytes or, as some old archivers wrote it, signed ones.

    Adler-32's low half is 1 + the sum of the bytes modulo 65521, and far cheaper than `sum`.
    """
    stored_field = block[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + _CHECKSUM_BYTES]
    stored = number(stored_field)
    expected = stored + sum(stored_field) - _CHECKSUM_BYTES * 0x20
    if (expected + 1) % _ADLER_MODULUS == zlib.adler32(block) & 0xFFFF:
        return
    signed = sum(block) - sum(stored_field) + _CHECKSUM_BYTES * 0x20 - 256 * sum(byte > 127 for byte in block)
    if stored != signed:
        raise ValueError(f"header checksum is {stored}, not the sum of the header's bytes")


def pax_records(body: bytes) -> list[tuple[bytes, bytes]]:
    """The `length key=value\\n` records of a pax header, in order. Values may hold any byte."""
    records = []
    position = 0
    while position < len(body):
        space = body.find(b" ", position, position + 20)
        digits = body[position:space] if space > position else b""
        if not digits.isdigit():
            if not body[position:].strip(b"\0"):
                break
            raise ValueError(f"pax record at byte {position} has no length")
        end = position + int(digits)
        equals = body.find(b"=", space + 1, end)
        if end > len(body) or equals <= space + 1 or body[end - 1] != 0x0A:
            raise ValueError(f"pax record at byte {position} is malformed")
        records.append((body[space + 1 : equals], body[equals + 1 : end - 1]))
        position = end
    return records


def pax_number(text: bytes) -> int:
    """A non-negative decimal number of a pax record or a sparse map."""
    if not text.isdigit() or len(text) > 20:
        raise ValueError(f"{text[:40]!r} is not a decimal number")
    return int(text)


def pax_time_ns(text: bytes) -> int:
    """Decimal seconds with any fraction, maybe negative, as integer nanoseconds; digits after the ninth are cut."""
    seconds, _, fraction = text.partition(b".")
    negative = seconds.startswith(b"-")
    digits = seconds[1:] if negative else seconds
    if not digits.isdigit() or len(digits) > 20 or (fraction and not fraction.isdigit()):
        raise ValueError(f"{text[:40]!r} is not a time in seconds")
    value = int(digits) * NANOSECONDS + int(fraction[:9].ljust(9, b"0"))
    return checked_time_ns(-value if negative else value)


def checked_time_ns(value: int) -> int:
    """The value, if its seconds fit what file systems store."""
    if abs(value) >= _MTIME_LIMIT_S * NANOSECONDS:
        raise ValueError(f"modification time {value // NANOSECONDS} s is out of range")
    return value


def xattrs(records: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Extended attributes of a pax header: star's raw values, and libarchive's base64 ones where star's are absent."""
    found: dict[bytes, bytes] = {}
    encoded: dict[bytes, bytes] = {}
    for key, value in records:
        if key.startswith(_XATTR):
            found[key.removeprefix(_XATTR)] = value
        elif key.startswith(_XATTR_BASE64):
            encoded[unquote_to_bytes(key.removeprefix(_XATTR_BASE64))] = value
    for name, text in encoded.items():
        if name not in found:
            try:
                found[name] = base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
            except binascii.Error as error:
                raise ValueError(f"xattr {name!r} is not base64: {error}") from None
    return found


def old_sparse_pairs(block: bytes, offset: int, pairs: int) -> list[tuple[int, int]]:
    """Pairs of an old GNU sparse header or of its extension block; the first empty one ends them."""
    found = []
    for start in range(offset, offset + pairs * 24, 24):
        where, length = block[start : start + 12], block[start + 12 : start + 24]
        if not where[0] or not length[0]:
            break
        found.append((number(where), number(length)))
    return found


def sparse_pairs(numbers: Sequence[bytes]) -> list[tuple[int, int]]:
    """Pairs from decimal texts: offset, length, offset, length, ..."""
    if len(numbers) % 2:
        raise ValueError(f"sparse map has {len(numbers)} numbers, not pairs")
    values = [pax_number(text) for text in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def sparse_map(pairs: Iterable[tuple[int, int]], size_bytes: int, stored_bytes: int) -> SparseMap:
    """The pairs as a map, when they ascend, stay inside the file and add up to what is stored."""
    position = total = 0
    kept = []
    for offset, length in pairs:
        if offset < position or length < 0 or offset + length > size_bytes:
            raise ValueError(f"sparse piece {offset}+{length} overlaps or is outside the file of {size_bytes} bytes")
        position = offset + length
        total += length
        if length:
            kept.append((offset, length))
    if total != stored_bytes:
        raise ValueError(f"sparse map covers {total} bytes, {stored_bytes} are stored")
    return tuple(kept)
