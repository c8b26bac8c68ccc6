"""Tar archives written byte by byte, so that tests can say what no archiver would."""

from __future__ import annotations

END = bytes(1024)


def octal(value: int, width: int) -> bytes:
    """A numeric field: octal when it fits, else base 256."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return bytes([0x80 if value >= 0 else 0xFF]) + (value % (1 << (8 * (width - 1)))).to_bytes(width - 1, "big")


def seal(block: bytes) -> bytes:
    """The header block with its checksum."""
    blank = block[:148] + b" " * 8 + block[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def header(
    name: bytes,
    kind: bytes = b"0",
    *,
    size: int = 0,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 0,
    link: bytes = b"",
    major: int = 0,
    minor: int = 0,
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
    tail: bytes = b"",
) -> bytes:
    """One sealed header block. `tail`, from offset 345 on, replaces the prefix."""
    block = b"".join(
        (
            name.ljust(100, b"\0"),
            octal(mode, 8),
            octal(uid, 8),
            octal(gid, 8),
            octal(size, 12),
            octal(mtime, 12),
            b" " * 8,
            kind,
            link.ljust(100, b"\0"),
            magic,
            bytes(64),
            octal(major, 8),
            octal(minor, 8),
            (tail or prefix).ljust(167, b"\0"),
        )
    )
    assert len(block) == 512
    return seal(block)


def pax_body(records: list[tuple[bytes, bytes]]) -> bytes:
    body = b""
    for key, value in records:
        length = len(key) + len(value) + 3
        while len(b"%d" % length) + len(key) + len(value) + 3 != length:
            length = len(b"%d" % length) + len(key) + len(value) + 3
        body += b"%d %s=%s\n" % (length, key, value)
    return body


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """A pax extension header with these records."""
    body = pax_body(list(records))
    return header(b"pax", kind, size=len(body)) + pad(body)


def member(name: bytes, data: bytes = b"", kind: bytes = b"0", **fields: int | bytes) -> bytes:
    """A header (with a pax one before it for a long name or link) and its data."""
    link = fields.pop("link", b"")
    assert isinstance(link, bytes)
    records = []
    if len(name) > 100:
        records.append((b"path", name))
    if len(link) > 100:
        records.append((b"linkpath", link))
    before = pax(*records) if records else b""
    fields.setdefault("size", len(data))
    return before + header(name[:100], kind, link=link[:100], **fields) + pad(data)  # type: ignore[arg-type]


def directory(name: bytes, mode: int = 0o755, **fields: int | bytes) -> bytes:
    return member(name, kind=b"5", mode=mode, **fields)


def symlink(name: bytes, target: bytes, **fields: int | bytes) -> bytes:
    return member(name, kind=b"2", link=target, mode=0o777, **fields)


def hard_link(name: bytes, target: bytes) -> bytes:
    return member(name, kind=b"1", link=target)


def archive(*members: bytes) -> bytes:
    """The members and the end blocks."""
    return b"".join(members) + END
