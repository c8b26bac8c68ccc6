"""What clients of a cache keep there it keeps at its upstreams, who can give again what the cache gives away.

A lease names the caches that it came through, so that caches of each other do not keep something for ever because the
other one does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from imaged.chunkstore.lease import KEEPS_LIMIT, LeaseState
from imaged.chunkstore.store import ChunkStore
from imaged.errors import NotFoundError, PvisorError
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId

TTL_S = 600.0
LOOK_S = 20.0
_HOLDER = "caches "
log = logging.getLogger(__name__)


class PassedLeases:
    """One lease at each upstream, renewed on a thread of its own. A context manager. `cache` is the id of this one."""

    def __init__(self, store: ChunkStore, upstreams: Sequence[HttpUpstream], cache: str) -> None:
        self._store, self._upstreams, self._cache = store, upstreams, cache
        self._ended = threading.Event()
        self._leases: dict[str, str] = {}
        self._kept: dict[str, tuple[list[ChunkId], int]] = {}
        self._thread = threading.Thread(target=self._run, name="passed-leases", daemon=True)

    def __enter__(self) -> PassedLeases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LOOK_S)

    def _run(self) -> None:
        looks = 0
        while not self._ended.wait(LOOK_S):
            looks += 1
            try:
                states = [state for state in self._store.leases.live() if self._cache not in _caches(state)]
                caches = sorted({self._cache, *(cache for state in states for cache in _caches(state))})
                records = sorted({record for state in states for record in state.keeps})[:KEEPS_LIMIT]
                for upstream in self._upstreams:
                    self._tell(upstream, records, looks, _HOLDER + ",".join(caches))
            except PvisorError as error:
                log.info("leases are not passed on: %s", error.message)
            except Exception:
                log.exception("passing leases on")

    def _tell(self, upstream: HttpUpstream, records: list[ChunkId], look: int, holder: str) -> None:
        """When something changed, or a third of the time is over."""
        kept, at = self._kept.get(upstream.url, ([], 0))
        lease = self._leases.get(upstream.url, "")
        if records == kept and (not records or look - at < TTL_S / LOOK_S / 3):
            return
        try:
            try:
                if lease:
                    upstream.renew_lease(lease, keeps=records, ttl_s=TTL_S)
            except NotFoundError:
                lease = ""
            if not lease:
                self._leases[upstream.url] = upstream.new_lease(holder, keeps=records, ttl_s=TTL_S)
            self._kept[upstream.url] = records, look
        except PvisorError as error:
            log.info("lease at %s: %s", upstream.url, error.message)


def _caches(state: LeaseState) -> list[str]:
    """Those that a lease came through."""
    return state.holder.removeprefix(_HOLDER).split(",") if state.holder.startswith(_HOLDER) else []
