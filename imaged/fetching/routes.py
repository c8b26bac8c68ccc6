"""Which chunk servers there are, in which order they are asked, and what is known of the way to each.

The servers that were given are tiers: peers, a cache in the rack, the origin, each asked before the next. A chunk that
one lacks is asked of the next at once. Who lacked most of what it was last asked for, failed, or lied comes behind
those that did not for a while, so that a fetch is one request as a rule, and not one of each tier.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from imaged.fetching.download import Outcome
from imaged.fetching.httpcall import Call
from imaged.fetching.link import Link
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId


class Routes:
    """The servers that were given, and those that images came from. Threads may share it."""

    def __init__(self, upstreams: Sequence[HttpUpstream], retry: RetryPolicy) -> None:
        self._upstreams = tuple(upstreams)
        self._retry = retry
        self._lock = threading.Lock()
        self._servers = {upstream.url: upstream for upstream in upstreams}
        self._links: dict[str, Link] = {}
        self._origins: dict[ChunkId, str] = {}
        self._ask_all = False

    def ask_all(self, urls: Iterable[str]) -> None:
        """From now on ask also these, and every server that anything came from, before a chunk is given up.

        For a store that gives away what a server has: what shares a chunk with it may come from nowhere.
        """
        for url in urls:
            self.upstream(url)
        self._ask_all = True

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
        """The servers as they were given; before them the origin if it is none of those. Behind them those that lacked,
        failed or lied lately, and last those that the caller is waiting for already."""
        servers = list(self._upstreams)
        if origin and all(server.url != origin for server in servers):
            servers.insert(0, self.upstream(origin))
        if len(servers) > 1:
            servers.sort(key=lambda server: (server in avoid, self.link(server).rank))
        if self._ask_all:
            with self._lock:
                servers += [server for server in self._servers.values() if server not in servers]
        return servers

    def link(self, server: HttpUpstream) -> Link:
        with self._lock:
            return self._links.setdefault(server.url, Link())

    def note(self, server: HttpUpstream, call: Call) -> None:
        """Learn from a request that is over: nothing from one that was given up, however it began."""
        if call.first_byte_s and not call.cancelled:
            transfer_s = call.heard_s - call.first_byte_s
            self.link(server).note(call.first_byte_s - call.sent_s, call.received_bytes, transfer_s)

    def judge(self, server: HttpUpstream, outcome: Outcome) -> None:
        """Learn from what one request brought; from one that was given up, only of lies."""
        link = self.link(server)
        if outcome.lied:
            link.lied()
        elif outcome.failed:
            link.failed()
        elif not outcome.given_up:
            link.answered(outcome.asked, outcome.came)
