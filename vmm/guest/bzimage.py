"""The x86 kernel image (bzImage): which release it is.

Format: Documentation/arch/x86/boot.rst of Linux. Numbers are little-endian.

    offset  size
    0x202   4     "HdrS"
    0x20E   2     where the release text is, less 0x200
"""

from __future__ import annotations

import struct

from imaged.errors import FormatError

_MAGIC_AT, _MAGIC = 0x202, b"HdrS"
_RELEASE = struct.Struct("<H")
_RELEASE_AT, _RELEASE_BASE = 0x20E, 0x200
_RELEASE_BYTES = 256


def release(image: bytes) -> str:
    """As `uname -r` will say it. FormatError."""
    if not image.startswith(_MAGIC, _MAGIC_AT) or len(image) < _RELEASE_AT + _RELEASE.size:
        found = image[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)].hex() or f"{len(image)} bytes"
        raise FormatError("kernel image", expected="a bzImage of x86 (HdrS at 0x202)", found=found)
    start = _RELEASE.unpack_from(image, _RELEASE_AT)[0] + _RELEASE_BASE
    words = image[start : start + _RELEASE_BYTES].partition(b"\0")[0].split()
    if not words:
        raise FormatError("kernel image", expected="a release text", found="none")
    return words[0].decode(errors="replace")
