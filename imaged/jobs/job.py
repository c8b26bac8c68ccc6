"""One job of a server, as its document says it: a conversion or a collection."""

from __future__ import annotations

import enum
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from imaged.errors import FormatError

_VERSION = 1
_ID = re.compile(r"[0-9a-f]{20}")
Key = tuple[str, ...]


class Kind(enum.StrEnum):
    """What a job does."""

    CONVERT = "convert"
    GC = "gc"


class State(enum.StrEnum):
    """queued -> running -> done | failed | cancelled. A running one is queued again when its server ends."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_FINISHED = frozenset({State.DONE, State.FAILED, State.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and how far it is. Ids sort by the time of asking. Times are Unix seconds.

    `namespace` is that of the token that asked for it, None for one without. `starts` counts how often it was begun
    and not put back by a server that ended in order. `progress` has `step`, `done_bytes` and `total_bytes`. `image`
    (name, id, warnings) is what a conversion came to, `report` what a collection did; `error` and `hint` say why there
    is neither.
    """

    id: str
    kind: Kind
    source: str = ""
    name: str | None = None
    platform: str | None = None
    namespace: str | None = None
    state: State = State.QUEUED
    starts: int = 0
    created_at: int = 0
    started_at: int | None = None
    ended_at: int | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    image: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    error: str = ""
    hint: str = ""

    @classmethod
    def conversion(cls, source: str, *, name: str | None, platform: str | None, namespace: str | None = None) -> Self:
        """Asked for just now."""
        return cls(**_asked_now(), kind=Kind.CONVERT, source=source, name=name, platform=platform, namespace=namespace)

    @classmethod
    def collection(cls) -> Self:
        """Asked for just now."""
        return cls(**_asked_now(), kind=Kind.GC)

    @property
    def key(self) -> Key:
        """Two unfinished jobs of one key are one."""
        return self.kind, self.source, self.name or "", self.platform or "", self.namespace or ""

    @property
    def finished(self) -> bool:
        return self.state in _FINISHED

    @property
    def title(self) -> str:
        """What it does, in a line."""
        return self.source if self.kind is Kind.CONVERT else "collection"

    def is_visible_to(self, namespace: str | None) -> bool:
        """Whether a token of this namespace may know of it; one of none may know everything."""
        return namespace is None or namespace == self.namespace

    def begun(self) -> Self:
        return replace(self, state=State.RUNNING, starts=self.starts + 1, started_at=_now(), progress={})

    def put_back(self) -> Self:
        """As if it had not been begun."""
        return replace(self, state=State.QUEUED, starts=max(0, self.starts - 1), started_at=None, progress={})

    def queued_again(self) -> Self:
        """Whoever ran it is gone; that start counts."""
        return replace(self, state=State.QUEUED, started_at=None, progress={})

    def done(self, *, image: Mapping[str, Any] | None = None, report: Mapping[str, Any] | None = None) -> Self:
        return replace(self, state=State.DONE, ended_at=_now(), image=image, report=report)

    def failed(self, error: str, hint: str = "") -> Self:
        return replace(self, state=State.FAILED, ended_at=_now(), error=error, hint=hint)

    def cancelled(self) -> Self:
        return replace(self, state=State.CANCELLED, ended_at=_now(), error="the job was cancelled")

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        return {**document, "kind": str(self.kind), "state": str(self.state)}

    def to_document(self) -> dict[str, Any]:
        """As it is kept."""
        return {"version": _VERSION, **self.to_json()}

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """FormatError."""
        if not isinstance(document, dict) or document.get("version") != _VERSION:
            raise FormatError("job", expected=f"a JSON object of version {_VERSION}", found=repr(document)[:80])
        for name, kinds in _FIELDS.items():
            value = document.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise FormatError(f"job, field {name}", expected=expected, found=repr(value)[:80])
        values = {name: document[name] for name in _FIELDS}
        if not is_job_id(values["id"]):
            raise FormatError("job, field id", expected="20 hex digits", found=repr(values["id"])[:80])
        try:
            return cls(**{**values, "kind": Kind(values["kind"]), "state": State(values["state"])})
        except ValueError as error:
            raise FormatError("job", expected="a known kind and state", found=str(error)) from error


_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "kind": (str,),
    "source": (str,),
    "name": (str, type(None)),
    "platform": (str, type(None)),
    "namespace": (str, type(None)),
    "state": (str,),
    "starts": (int,),
    "created_at": (int,),
    "started_at": (int, type(None)),
    "ended_at": (int, type(None)),
    "progress": (dict,),
    "image": (dict, type(None)),
    "report": (dict, type(None)),
    "error": (str,),
    "hint": (str,),
}


def is_job_id(text: str) -> bool:
    """Whether the text can be the id of a job, and part of a file's name."""
    return _ID.fullmatch(text) is not None


def _asked_now() -> dict[str, Any]:
    return {"id": f"{time.time_ns() // 1000:013x}{secrets.randbits(28):07x}", "created_at": _now()}


def _now() -> int:
    return int(time.time())
