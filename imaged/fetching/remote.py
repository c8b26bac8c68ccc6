"""What a chunk server says of its images, snapshots and conversions: its JSON, checked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imaged.document import canonical
from imaged.errors import FormatError
from imaged.ids import ChunkId
from imaged.record import ImageRecord
from imaged.signature import SIGNATURE_LIMIT, Signature
from imaged.snapshot import SnapshotRecord

_NUMBER_LIMIT = 1 << 53
"""What JSON's numbers count exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImage:
    """An image as a server lists it. `name` is the server's full name, "" for an image asked for by id only.

    `signatures` are what the server says they are: nothing was checked. `complete` unless the server says that it may
    lack chunks of it.
    """

    name: str
    id: ChunkId
    record: ImageRecord
    source: str = ""
    chunks: int = 0
    stored_bytes: int = 0
    created_at: int = 0
    signatures: tuple[Signature, ...] = ()
    complete: bool = True

    @classmethod
    def parse(cls, document: Mapping[str, Any], record: ImageRecord | None = None) -> RemoteImage:
        """From the server's JSON; the record must hash to the id. FormatError otherwise."""
        try:
            chunk = ChunkId.parse(document["id"])
            if record is None:
                record = ImageRecord.from_json(document["record"])
            image = cls(
                name=str(document.get("name", "")),
                id=chunk,
                record=record,
                source=str(document.get("source", "")),
                chunks=int(document.get("chunks", 0)),
                stored_bytes=int(document.get("stored_bytes", 0)),
                created_at=int(document.get("created_at", 0)),
                signatures=_signatures(document.get("signatures")),
                complete=document.get("complete") is not False,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FormatError("image from the server", expected="name, id and record", found=repr(error)) from error
        _check("image", image)
        return image


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSnapshot:
    """A snapshot as a server lists it. `complete` unless the server says that it may lack chunks of it."""

    name: str
    id: ChunkId
    record: SnapshotRecord
    chunks: int = 0
    stored_bytes: int = 0
    created_at: int = 0
    complete: bool = True

    @classmethod
    def parse(cls, document: Mapping[str, Any], record: SnapshotRecord | None = None) -> RemoteSnapshot:
        """From the server's JSON; the record must hash to the id. FormatError otherwise."""
        try:
            chunk = ChunkId.parse(document["id"])
            if record is None:
                record = SnapshotRecord.parse(canonical(document["record"]))
            snapshot = cls(
                name=str(document["name"]),
                id=chunk,
                record=record,
                chunks=int(document.get("chunks", 0)),
                stored_bytes=int(document.get("stored_bytes", 0)),
                created_at=int(document.get("created_at", 0)),
                complete=document.get("complete") is not False,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FormatError("snapshot from the server", expected="name, id and record", found=repr(error)) from error
        _check("snapshot", snapshot)
        return snapshot


def _signatures(documents: Any) -> tuple[Signature, ...]:
    """Those that can be parsed: what another version of pVisor signs with is as good as no signature."""
    found = []
    for document in documents[:SIGNATURE_LIMIT] if isinstance(documents, list) else ():
        with contextlib.suppress(FormatError):
            found.append(Signature.parse(document))
    return tuple(found)


def _check(what: str, found: RemoteImage | RemoteSnapshot) -> None:
    for field, value in (("created_at", found.created_at), ("chunks", found.chunks), ("bytes", found.stored_bytes)):
        if not 0 <= value < _NUMBER_LIMIT:
            raise FormatError(f"{what} from the server", expected=f"{field} from 0 to 2^53", found=repr(value)[:40])
    if found.record.id != found.id:
        raise FormatError(f"{what} record from the server", expected=f"id {found.id}", found=str(found.record.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job on the server. `state` is queued, running, done, failed or cancelled; `image` is a conversion's name, id
    and warnings, `report` what a collection did."""

    id: str
    state: str
    source: str
    progress: Mapping[str, Any]
    kind: str = "convert"
    name: str = ""
    created_at: int = 0
    image: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    error: str = ""
    hint: str = ""

    @property
    def finished(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Job:
        try:
            return cls(
                id=str(document["id"]),
                state=str(document["state"]),
                source=str(document["source"]),
                progress=dict(document.get("progress") or {}),
                kind=str(document.get("kind", "convert")),
                name=str(document.get("name") or ""),
                created_at=min(max(0, int(document.get("created_at", 0))), _NUMBER_LIMIT),
                image=_object(document.get("image")),
                report=_object(document.get("report")),
                error=str(document.get("error", "")),
                hint=str(document.get("hint", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FormatError("job from the server", expected="id, state and source", found=repr(error)) from error


def _object(value: Any) -> Mapping[str, Any] | None:
    return dict(value) if value is not None else None
