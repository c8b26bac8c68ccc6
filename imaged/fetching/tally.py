"""Counters of what reading one image cost."""

from __future__ import annotations

import threading


class Tally:
    """What reading one image cost. Threads may share it.

    `reads` counts what the caller of `count` says are reads; `hits` chunks that were in memory or in the local store;
    `fetched_chunks` and `fetched_bytes` what came over the wire (frames, without HTTP headers); `requests` HTTP
    requests.
    """

    __slots__ = ("_lock", "fetched_bytes", "fetched_chunks", "hits", "reads", "requests")

    def __init__(self) -> None:
        self.reads = self.hits = self.fetched_chunks = self.fetched_bytes = self.requests = 0
        self._lock = threading.Lock()

    def count(
        self, *, reads: int = 0, hits: int = 0, fetched_chunks: int = 0, fetched_bytes: int = 0, requests: int = 0
    ) -> None:
        with self._lock:
            self.reads += reads
            self.hits += hits
            self.fetched_chunks += fetched_chunks
            self.fetched_bytes += fetched_bytes
            self.requests += requests

    def to_dict(self) -> dict[str, int]:
        with self._lock:
            return {
                "reads": self.reads,
                "hits": self.hits,
                "fetched_chunks": self.fetched_chunks,
                "fetched_bytes": self.fetched_bytes,
                "requests": self.requests,
            }
