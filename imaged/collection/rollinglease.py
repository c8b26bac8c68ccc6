"""The server's own lease for clients that upload without one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

from imaged.chunkstore.lease import Lease
from imaged.chunkstore.store import ChunkStore

LEAST_S = 15 * 60.0
"""What a client was told, or has uploaded, stays at least so long, and at most twice as long when nobody goes on."""


class RollingLease:
    """Held while there are uploads, and for a while after: two leases that overlap, so that neither gets old, and the
    first still holds what a client was told a moment before the second began.

    Threads may share it. `clock` only goes forward.
    """

    def __init__(self, store: ChunkStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._leases: list[tuple[float, Lease]] = []
        self._users: Counter[str] = Counter()
        self._used_s = 0.0

    @contextmanager
    def borrowed(self) -> Iterator[Lease]:
        """The newer one, which lasts at least until the end of the block. StoreError."""
        with self._lock:
            now_s = self._used_s = self._clock()
            if not self._leases or now_s - self._leases[-1][0] >= LEAST_S:
                self._leases.append((now_s, self._store.lease("uploads without a lease")))
            lease = self._leases[-1][1]
            self._users[lease.id] += 1
            self._end(now_s)
        try:
            yield lease
        finally:
            with self._lock:
                self._users[lease.id] -= 1

    def expire(self) -> None:
        """Let go of what nobody has used for long; to be called now and then."""
        with self._lock:
            self._end(self._clock())

    def close(self) -> None:
        """Let go of all; nobody works any more."""
        with self._lock:
            for _, lease in self._leases:
                lease.release()
            self._leases.clear()

    def _end(self, now_s: float) -> None:
        """Each once the one after it is old enough; all when it is quiet."""
        quiet = now_s - self._used_s >= LEAST_S
        following = [began_s for began_s, _ in self._leases[1:]]
        for entry, next_s in list(zip_longest(self._leases, following, fillvalue=None)):
            assert entry is not None
            superseded = next_s is not None and now_s - next_s >= LEAST_S
            if (quiet or superseded) and not self._users[entry[1].id]:
                entry[1].release()
                self._leases.remove(entry)
                del self._users[entry[1].id]
