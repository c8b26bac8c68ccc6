"""Extended attributes as EROFS keeps them: behind the inode, each name as a prefix number and the rest."""

from __future__ import annotations

from collections.abc import Mapping

from imaged.erofs.format import XATTR_ENTRY, XATTR_HEADER

_PREFIXES = ((b"user.", 1), (b"trusted.", 4), (b"security.", 6))
_WHOLE_NAMES = {b"system.posix_acl_access": 2, b"system.posix_acl_default": 3}
VALUE_LIMIT_BYTES = 0xFFFF
AREA_LIMIT_BYTES = XATTR_HEADER.size + 4 * 0xFFFE
"""The inode counts its xattr area in 4-byte units, in 16 bits."""


def split_name(name: bytes) -> tuple[int, bytes] | None:
    """The prefix number and the rest; None when EROFS has no number for it."""
    whole = _WHOLE_NAMES.get(name)
    if whole is not None:
        return whole, b""
    for prefix, index in _PREFIXES:
        if name.startswith(prefix) and len(prefix) < len(name) <= len(prefix) + 255 and b"\0" not in name:
            return index, name[len(prefix) :]
    return None


def encode(xattrs: Mapping[bytes, bytes]) -> tuple[bytes, list[tuple[bytes, str]]]:
    """The xattr area of an inode, and the names that have no place in it, each with the reason.

    Names are written in byte order. No attribute, no area.
    """
    if not xattrs:
        return b"", []
    parts = [XATTR_HEADER.pack(0, 0)]
    size_bytes = XATTR_HEADER.size
    dropped: list[tuple[bytes, str]] = []
    for name in sorted(xattrs):
        value = xattrs[name]
        split = split_name(name)
        if split is None:
            dropped.append((name, "EROFS keeps only user., trusted., security. and POSIX ACL attributes"))
            continue
        if len(value) > VALUE_LIMIT_BYTES:
            dropped.append((name, f"value of {len(value)} bytes, EROFS keeps at most {VALUE_LIMIT_BYTES}"))
            continue
        index, rest = split
        entry = XATTR_ENTRY.pack(len(rest), index, len(value)) + rest + value
        entry += bytes(-len(entry) % 4)
        if size_bytes + len(entry) > AREA_LIMIT_BYTES:
            dropped.append((name, f"more than {AREA_LIMIT_BYTES} bytes of attributes on one file"))
            continue
        parts.append(entry)
        size_bytes += len(entry)
    return (b"".join(parts) if len(parts) > 1 else b""), dropped


def unit_count(area: bytes) -> int:
    """i_xattr_icount of an area that `encode` made."""
    return 1 + (len(area) - XATTR_HEADER.size) // 4 if area else 0
