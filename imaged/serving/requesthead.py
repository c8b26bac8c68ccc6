"""The head of an HTTP request, as far as one has to look who answers only the plainest requests by himself.

Everything that is not plain is None here and left to a complete HTTP implementation: this one never has to be lenient,
and what it takes for the end of a request must be what the other takes for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

HEAD_LIMIT_BYTES = 4096
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ ]?([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)\r\n")
_HARMLESS = frozenset({b"host", b"user-agent", b"accept", b"accept-encoding", b"accept-language"})
"""They change nothing in an answer about chunks."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"upgrade", b"connection", b"expect", b"te", b"trailer"})
_LENGTH = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class PlainHeaders:
    """Headers of a request that keeps its connection: each known, each there once."""

    authorization: str
    content_type: bytes
    content_length: int
    """-1 without one"""


@lru_cache(maxsize=512)
def plain_headers(lines: bytes) -> PlainHeaders | None:
    """From the lines after the request line, the empty one included. Clients send the same ones again and again."""
    found = _split(lines)
    if found is None or b"host" not in found or found.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    if not found.keys() <= _HARMLESS | {b"authorization", b"content-type", b"content-length", b"connection"}:
        return None
    length = found.get(b"content-length")
    if length is not None and _LENGTH.fullmatch(length) is None:
        return None
    return PlainHeaders(
        found.get(b"authorization", b"").decode(),
        found.get(b"content-type", b""),
        -1 if length is None else int(length),
    )


def body_bytes(data: bytes, end: int) -> int | None:
    """How long the body of the request is whose head is `data` to `end` (the empty line included).

    None when that takes more than a Content-Length to know, or the head is in any way out of the ordinary.
    """
    line_end = data.find(b"\r\n")
    if data.count(b"\r\n", 0, end) > 64 or end > 2 * HEAD_LIMIT_BYTES:
        return None
    found = _split(data[line_end + 2 : end])
    if found is None or not data.startswith((b"GET /", b"HEAD /", b"POST /", b"PUT /", b"DELETE /")):
        return None
    framing = found.keys() & _FRAMING
    if found.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    if not framing - {b"connection"}:
        return 0
    if framing - {b"connection"} != {b"content-length"} or _LENGTH.fullmatch(found[b"content-length"]) is None:
        return None
    return int(found[b"content-length"])


def _split(lines: bytes) -> dict[bytes, bytes] | None:
    """Header lines up to an empty one, names in lower case. None when one is there twice or not plainly written."""
    found: dict[bytes, bytes] = {}
    at = 0
    while not (lines.startswith(b"\r\n", at) and at + 2 == len(lines)):
        match = _LINE.match(lines, at)
        if match is None:
            return None
        name = match.group(1).lower()
        if name in found:
            return None
        found[name] = match.group(2)
        at = match.end()
    return found
