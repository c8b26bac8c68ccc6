"""Which chunk servers there are, in which order they are asked, and what is known of the way to each."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from imaged.httppool import Call
from imaged.ids import ChunkId
from imaged.link import Link
from imaged.upstream import HttpUpstream, RetryPolicy


class Routes:
    """The servers that were given, and those that images came from. Threads may share it."""

    def __init__(self, upstreams: Sequence[HttpUpstream], retry: RetryPolicy) -> None:
        self._upstreams = tuple(upstreams)
        self._retry = retry
        self._lock = threading.Lock()
        self._servers = {upstream.url: upstream for upstream in upstreams}
        self._links: dict[str, Link] = {}
        self._origins: dict[ChunkId, str] = {}

    def close(self) -> None:
        """Close idle connections."""
        for server in list(self._servers.values()):
            server.close()

    def upstream(self, url: str) -> HttpUpstream:
        """The server at this URL, with one connection pool for all who ask."""
        with self._lock:
            server = self._servers.get(url)
            if server is None:
                server = self._servers[url] = HttpUpstream(url, retry=self._retry)
            return server

    def remember(self, block_image: ChunkId, url: str) -> None:
        with self._lock:
            self._origins[block_image] = url

    def remembered(self, block_image: ChunkId) -> str | None:
        return self._origins.get(block_image)

    def order(self, origin: str, *, avoid: Collection[HttpUpstream] = ()) -> list[HttpUpstream]:
        """The origin, then the others as they were given; behind them those that hung lately, and last those that the
        caller is waiting for already."""
        first = [self.upstream(origin)] if origin else []
        servers = first + [server for server in self._upstreams if server.url != origin]
        if len(servers) > 1:
            servers.sort(key=lambda server: (server in avoid, self.link(server).is_resting))
        return servers

    def link(self, server: HttpUpstream) -> Link:
        with self._lock:
            return self._links.setdefault(server.url, Link())

    def note(self, server: HttpUpstream, call: Call) -> None:
        """Learn from a request that is over: nothing from one that was given up, however it began."""
        if call.first_byte_s and not call.cancelled:
            transfer_s = call.heard_s - call.first_byte_s
            self.link(server).note(call.first_byte_s - call.sent_s, call.received_bytes, transfer_s)
