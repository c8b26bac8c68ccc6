"""File names as git writes them in text: any byte can be told, and a name is one word of a line."""

from __future__ import annotations

_LETTERS = {7: b"a", 8: b"b", 9: b"t", 10: b"n", 11: b"v", 12: b"f", 13: b"r", 34: b'"', 92: b"\\"}
_PLAIN = frozenset(range(0x20, 0x7F)) - {34, 92}
_SPACE = 0x20


def quoted(name: bytes) -> bytes:
    """In double quotes with the escapes of C when it has anything but printable ASCII, as `core.quotePath` has it."""
    return name if _PLAIN.issuperset(name) else _in_quotes(name)


def word(name: bytes) -> bytes:
    """As `quoted`, and with spaces in quotes too: in `diff --git A B`, GNU patch ends a bare name at a space."""
    return quoted(name) if _SPACE not in name else _in_quotes(name)


def _in_quotes(name: bytes) -> bytes:
    parts = []
    for byte in name:
        if byte in _LETTERS:
            parts.append(b"\\" + _LETTERS[byte])
        else:
            parts.append(bytes([byte]) if byte in _PLAIN else b"\\%03o" % byte)
    return b'"' + b"".join(parts) + b'"'
