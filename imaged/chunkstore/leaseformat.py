"""The file of a lease: lines of JSON, each of which changes what those before it say (docs/formats/lease.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from imaged.errors import FormatError
from imaged.ids import ChunkId

VERSION = 1
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
    state: LeaseState | None = None
    try:
        for line in lines:
            state = _changed(name, state, json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"lease {name}", expected="lines of JSON", found=str(error)[:80]) from error
    assert state is not None
    return state


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _texts(records: Iterable[ChunkId]) -> list[str]:
    return [str(record) for record in sorted(records)]


def _changed(name: str, state: LeaseState | None, change: dict[str, Any]) -> LeaseState:
    if state is None:
        if change["version"] != VERSION:
            raise FormatError(f"lease {name}", expected=f"version {VERSION}", found=repr(change["version"])[:80])
        namespace = change.get("namespace")
        state = LeaseState(id=name, holder=str(change["holder"]), epoch=None, keeps=frozenset(), namespace=namespace)
    fields: dict[str, Any] = {}
    if "epoch" in change:
        fields["epoch"] = None if change["epoch"] is None else int(change["epoch"])
    if "expires_at" in change:
        expires_at = float(change["expires_at"])
        fields["expires_at"] = expires_at if math.isfinite(expires_at) else 0.0
    drops = {ChunkId.parse(text) for text in change.get("drops", ())}
    keeps = {ChunkId.parse(text) for text in change.get("keeps", ())}
    if drops or keeps:
        fields["keeps"] = (state.keeps - drops) | keeps
    return replace(state, **fields)
