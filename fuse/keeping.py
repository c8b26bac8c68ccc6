"""What this host uses stays: leases on images and snapshots that are open, in the local store and at their servers.

An image or snapshot is used while one of its block images is open as a file (a mount and a QEMU hold theirs), and for
a while after it was opened for a command that is about to. A name is not needed for that, and may be taken away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fuse.files import BlockFiles
from imaged.chunkstore.lease import Lease
from imaged.collection.holding import unsafe
from imaged.errors import NotFoundError, PvisorError, StoreError
from imaged.fetching.fetch import Fetcher
from imaged.ids import ChunkId
from imaged.transfer.acquire import COMMAND_RETRY

GRACE_S = 15.0
"""Between the answer to who opened it and the mount, or the QEMU."""
TTL_S = 600.0
_SWEEP_S = 20.0
_WITHOUT_S = 600.0
"""After a server said that it has no leases."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Use:
    """A record, the block images that tell whether it is used, and when it was opened last."""

    files: tuple[ChunkId, ...]
    opened_s: float


@dataclass(slots=True)
class _Server:
    """A lease at a server: `lease` is its id, "" when there is none, `keeps` what it was last told to keep."""

    lease: str = ""
    keeps: frozenset[ChunkId] = frozenset()
    due_s: float = 0.0


class Keeping:
    """Threads may share it. What is at servers is done in a thread of its own, which starts with the first use."""

    def __init__(self, fetcher: Fetcher, files: BlockFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetcher, self._files, self._clock = fetcher, files, clock
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._uses: dict[ChunkId, _Use] = {}
        self._lease: Lease | None = None
        self._servers: dict[str, _Server] = {}
        self._changed, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, record: ChunkId, files: Sequence[ChunkId], *, name: str, lazy: bool) -> None:
        """Keep this image or snapshot from here on, for as long as it is used.

        `lazy`: nobody has to look that it is still safe, such as when a server has what is not here. NotFoundError when
        its `name` was taken away just now and a collection may be at it already.
        """
        if self._is_kept(record):
            return
        with self._opening:  # who comes meanwhile could find it less safe, and let go of it for both
            if self._is_kept(record):
                return
            self._begin(record, name, lazy)
            with self._lock:
                self._uses[record] = _Use(tuple(files), self._clock())
                if self._thread is None and not self._ended.is_set():
                    self._thread = threading.Thread(target=self._run, name="keeping", daemon=True)
                    self._thread.start()
        self._changed.set()

    def tidy(self) -> None:
        """Let go of what is not used any more, in the local store."""
        with self._lock:
            now_s = self._clock()
            idle = [record for record, use in self._uses.items() if not self._is_used(use, now_s)]
            for record in idle:
                del self._uses[record]
            if idle and self._lease is not None:
                try:
                    self._lease.drop(*idle)
                except StoreError as error:
                    log.info("%s", error.message)
        if idle:
            self._changed.set()

    def close(self) -> None:
        """Nothing is used any more."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join(COMMAND_RETRY.total_s)
        with self._lock:
            self._uses.clear()
            if self._lease is not None:
                self._lease.release()

    def _is_kept(self, record: ChunkId) -> bool:
        """It was opened before; now once more."""
        with self._lock:
            use = self._uses.get(record)
            if use is not None:
                use.opened_s = self._clock()
            return use is not None

    def _begin(self, record: ChunkId, name: str, lazy: bool) -> None:
        """NotFoundError when it is not safe."""
        try:
            self._keep(record)
        except StoreError as error:
            # A full disk is no reason to start nothing: what has a name stays without this.
            log.warning("%s is not kept: %s", name, error.message)
        if lazy or self._is_named(record, name) or not unsafe(self._fetcher.store, [record]):
            return
        if not ChunkId.is_id(name):
            with self._lock:
                if self._lease is not None:
                    self._lease.drop(record)
            raise NotFoundError(f"{name} was removed just now", hint="pull or convert it again")
        log.warning("%s has no name, and not all of it is here", record)

    def _keep(self, record: ChunkId) -> None:
        with self._lock:
            if self._lease is None:
                self._lease = self._fetcher.store.keeping("the node daemon")
            self._lease.keep(record)

    def _is_named(self, record: ChunkId, name: str) -> bool:
        """Asked first, because it is most often so, and takes one look."""
        store = self._fetcher.store
        try:
            rows = (store.refs.get(name), store.snapshots.get(name))
        except PvisorError:
            return False
        return any(row is not None and row.record == record for row in rows)

    def _is_used(self, use: _Use, now_s: float) -> bool:
        return now_s - use.opened_s < GRACE_S or any(self._files.is_open(file) for file in use.files)

    # At servers

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.wait(_SWEEP_S)
            self._changed.clear()
            try:
                self.tidy()
                self._tell(self._by_server())
            except Exception:
                log.exception("keeping what is used")
        for url, server in self._servers.items():
            if server.lease:
                try:
                    self._fetcher.upstream(url).patient(COMMAND_RETRY).end_lease(server.lease)
                except PvisorError as error:
                    log.info("lease at %s is left to expire: %s", url, error.message)

    def _by_server(self) -> dict[str, set[ChunkId]]:
        """What each server may be asked for chunks of."""
        with self._lock:
            uses = dict(self._uses)
        wanted: dict[str, set[ChunkId]] = {}
        for record, use in uses.items():
            for url in {self._fetcher.origin(file) for file in use.files} - {None}:
                assert url is not None
                wanted.setdefault(url, set()).add(record)
        return wanted

    def _tell(self, wanted: dict[str, set[ChunkId]]) -> None:
        now_s = self._clock()
        for url in wanted.keys() | self._servers.keys():
            server = self._servers.setdefault(url, _Server())
            keeps = frozenset(wanted.get(url, ()))
            if now_s < server.due_s and (keeps == server.keeps or not server.lease):
                continue
            try:
                self._tell_one(url, server, keeps)
                server.keeps, server.due_s = keeps, now_s + TTL_S / 3
            except NotFoundError:
                server.lease, server.due_s = "", now_s + _WITHOUT_S
            except PvisorError as error:
                log.info("lease at %s: %s", url, error.message)
                server.due_s = now_s + _SWEEP_S

    def _tell_one(self, url: str, server: _Server, keeps: Iterable[ChunkId]) -> None:
        """NotFoundError for a server that has no leases."""
        upstream, records = self._fetcher.upstream(url).patient(COMMAND_RETRY), sorted(keeps)
        if server.lease:
            try:
                if records:
                    upstream.renew_lease(server.lease, keeps=records, ttl_s=TTL_S)
                else:
                    upstream.end_lease(server.lease)
                    server.lease = ""
                return
            except NotFoundError:  # it has ended: the server, or this host, was away for long
                server.lease = ""
        if records:
            server.lease = upstream.new_lease("a node daemon", keeps=records, ttl_s=TTL_S)
