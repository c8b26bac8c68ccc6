"""What was asked of a server and what it answered: numbers for /metrics, and a line for each request if wanted."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, field

from aiohttp import web

log = logging.getLogger(__name__)
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the classes in which durations are counted; there is one more, for what is longer."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})
ROUTE = web.RequestKey("route", str)
"""Of an aiohttp request: the path of its handler, as it was registered."""
OTHER = "other"
"""The method or route of a request that this server does not know: clients can not make labels up."""


@dataclass(slots=True)
class Count:
    """Requests of one kind since these numbers were last taken."""

    requests: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    durations: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))


Kind = tuple[str, str, int]
"""method, route, status"""


class Traffic:
    """For the thread of one event loop: a fast answer has no time for locks."""

    def __init__(self) -> None:
        self._counts: dict[Kind, Count] = {}

    def note(
        self,
        method: str,
        route: str,
        path: str,
        status: int,
        received_bytes: int,
        sent_bytes: int,
        duration_s: float,
        peer: str,
        request_id: str = "",
    ) -> None:
        """One request is over. `path` has no query."""
        kind = (method if method in _METHODS else OTHER, route, status)
        count = self._counts.get(kind)
        if count is None:
            count = self._counts[kind] = Count()
        count.requests += 1
        count.received_bytes += received_bytes
        count.sent_bytes += sent_bytes
        count.seconds += duration_s
        count.durations[bisect_left(BUCKETS_S, duration_s)] += 1
        if log.isEnabledFor(logging.INFO):
            fields = {
                "method": method,
                "path": path,
                "status": status,
                "received_bytes": received_bytes,
                "sent_bytes": sent_bytes,
                "seconds": round(duration_s, 6),
                "peer": peer,
                **({"request_id": request_id} if request_id else {}),
            }
            log.info(
                "%s %s %s %d %d bytes %.1f ms", peer, method, path, status, sent_bytes, duration_s * 1e3,
                extra={"fields": fields},
            )  # fmt: skip

    def take(self) -> dict[Kind, Count]:
        """What was noted since the last time."""
        counts, self._counts = self._counts, {}
        return counts
