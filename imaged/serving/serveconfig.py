"""What `pvisor serve` was asked for: one frozen object, which travels to the serving processes as JSON on stdin."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from imaged.errors import FormatError

LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Paths are absolute text, None is "not asked for". Secrets are not in here: only the files that hold them.

    `store` is a directory or s3://BUCKET/PREFIX; host "" is every address, port 0 a free one. Every field has a JSON
    type, so a new one needs a line here and an option in `cli/serve.py`.
    """

    store: str
    host: str = "127.0.0.1"
    port: int = 7878
    workers: int = 1
    drain_s: float = 0.0
    """After SIGTERM /readyz says no for this long before connections are refused."""
    log_format: LogFormat = "text"
    log_requests: bool = False
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    rate_limit: float = 0.0
    """Requests a second of each client; 0 is any number."""
    cache_max_bytes: int | None = None
    upstreams: tuple[str, ...] = ()
    gc_command: tuple[str, ...] = ()
    """How a collection that knows what else uses the store begins (`imaged.jobs.jobprocess`); () is the store alone."""

    @property
    def is_s3(self) -> bool:
        return self.store.startswith("s3:")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `to_json`. FormatError."""
        known = {field.name for field in fields(cls)}
        try:
            found: dict[str, Any] = json.loads(text)
            given: dict[str, Any] = {}
            for key, value in found.items():
                given[key] = tuple(value) if isinstance(value, list) else value
            return cls(**given)
        except (ValueError, TypeError, AttributeError) as error:
            expected = f"JSON with {', '.join(sorted(known))}"
            raise FormatError("options of a server", expected=expected, found=str(error)) from error
