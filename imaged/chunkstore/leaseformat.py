"""The file of a lease: lines of JSON, each of which changes what those before it say (docs/formats/lease.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from imaged.errors import FormatError
from imaged.ids import ChunkId

VERSION = 1
KEPT_TEXT_BYTES = 67
"""What an id takes in a line."""
_ID_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """What a lease's file says. `expires_at` is in Unix seconds, None for a lease that a process of this host holds.
    `namespace` is the tenant whose client it was granted to."""

    id: str
    holder: str
    epoch: int | None
    keeps: frozenset[ChunkId]
    expires_at: float | None = None
    namespace: str | None = None


def is_lease_id(name: str) -> bool:
    return len(name) == _ID_DIGITS and all(digit in "0123456789abcdef" for digit in name)


def first_line(
    holder: str,
    *,
    epoch: int | None,
    keeps: Iterable[ChunkId] = (),
    expires_at: float | None = None,
    namespace: str | None = None,
) -> bytes:
    """Of a new lease."""
    fields: dict[str, Any] = {"version": VERSION, "holder": holder, "epoch": epoch, "keeps": _texts(keeps)}
    if expires_at is not None:
        fields["expires_at"] = expires_at
    if namespace is not None:
        fields["namespace"] = namespace
    return _line(fields)


def changing_line(
    *,
    epoch: int | None = None,
    keeps: Iterable[ChunkId] = (),
    drops: Iterable[ChunkId] = (),
    expires_at: float | None = None,
) -> bytes:
    """Of one that is there."""
    known = {"epoch": epoch, "keeps": _texts(keeps), "drops": _texts(drops), "expires_at": expires_at}
    return _line({key: value for key, value in known.items() if value is not None and value != []})


def parse(name: str, raw: bytes) -> LeaseState:
    """What the whole lines come to. FormatError."""
    lines = raw.split(b"\n")[:-1]
    if not lines:
        raise FormatError(f"lease {name}", expected="a line", found="none")
    try:
        changes = [json.loads(line) for line in lines]
        first, fields, keeps = changes[0], dict[str, Any](), set[ChunkId]()
        if first["version"] != VERSION:
            raise FormatError(f"lease {name}", expected=f"version {VERSION}", found=repr(first["version"])[:80])
        for change in changes:
            keeps -= {ChunkId.parse(text) for text in change.get("drops", ())}
            keeps |= {ChunkId.parse(text) for text in change.get("keeps", ())}
            fields |= change
        epoch, expires_at = fields.get("epoch"), fields.get("expires_at")
        return LeaseState(
            id=name,
            holder=str(first["holder"]),
            namespace=first.get("namespace"),
            epoch=None if epoch is None else int(epoch),
            keeps=frozenset(keeps),
            expires_at=None if expires_at is None else _finite(float(expires_at)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"lease {name}", expected="lines of JSON", found=str(error)[:80]) from error


def _finite(seconds: float) -> float:
    return seconds if math.isfinite(seconds) else 0.0


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _texts(records: Iterable[ChunkId]) -> list[str]:
    return [str(record) for record in sorted(records)]
