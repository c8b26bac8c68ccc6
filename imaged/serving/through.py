"""A server that is a cache of other servers: what it does not have it asks for, keeps, and passes on.

Names are looked up upstream, so that they mean what they mean there; while no upstream answers they mean what they
meant last. Chunks are fetched once however many clients ask for them at the same time, verified, and kept as they came.

Servers that are caches of each other must not ask in circles. A request carries the ids of the servers that it came
through, and one that comes back is refused. Clients of different servers may wait for the same chunk here, so the
circle may also close through a fetch that somebody else began: what was asked for through another server waits for
such a fetch only a moment, and is then asked for under its own ids.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import nullcontext

from aiohttp import web

from imaged import catalog, snapshots
from imaged.chunkstore.store import ChunkStore
from imaged.collection.eviction import Evictor
from imaged.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    NameTakenError,
    NotFoundError,
    PvisorError,
    UpstreamError,
)
from imaged.fetching.credentials import KNOWN, VARIABLE
from imaged.fetching.download import Download
from imaged.fetching.fetch import Fetcher
from imaged.fetching.memory import ChunkMemory
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.serverconnection import VIA
from imaged.fetching.tally import Tally
from imaged.fetching.tiers import first, tiers
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.names import ImageName, snapshot_name
from imaged.serving.passedleases import PassedLeases
from imaged.serving.throughstore import ThroughStore
from imaged.transfer.pull import pull_image
from imaged.transfer.snapshotpull import pull_snapshot
from imaged.turns import Turns

log = logging.getLogger(__name__)
MOST_HOPS = 8
_JOIN_S = 1.0
"""How long what came through another server waits for a fetch that is under way."""
_FRESH_S = 2.0
"""What a name means upstream is believed for so long."""
_KEEP_WAIT_S = 5.0
_RECENT_BYTES = 64 << 20
_MOST_RECENT_NAMES = 4096
_THREADS = 32
_RETRY = RetryPolicy(total_s=2.0)
"""Clients are patient, and ask again."""
_NAME_RETRY = RetryPolicy(total_s=1.0)


class LoopError(UpstreamError):
    """A request that came back to a server which it came through."""


class Through:
    """The upstreams of one server. Threads may share it; a context manager."""

    def __init__(self, store: ChunkStore, urls: Sequence[str], evictor: Evictor | None = None) -> None:
        KNOWN.learn(",".join(urls), os.environ.get(VARIABLE, ""))
        self.id = secrets.token_hex(8)
        self.tally = Tally()
        self._store = store
        self._upstreams = [HttpUpstream(url, retry=_RETRY).asked_via(self.id) for url in urls]
        self._fetcher = _FrameFetcher(store, self._upstreams)
        if evictor is not None:
            self._fetcher.bound(evictor)
        self._joining = ThreadPoolExecutor(_THREADS, thread_name_prefix="join")
        self._leases = PassedLeases(store, [one.patient(_NAME_RETRY) for one in self._upstreams], self.id)
        self._lock = threading.Lock()
        self._turns = Turns()
        self._looked_up: dict[str, float] = {}

    def close(self) -> None:
        self._leases.__exit__()
        self._fetcher.close()
        self._joining.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Through:
        self._leases.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counters(self) -> dict[str, int]:
        """Of chunks, since the server started."""
        counts = self.tally.to_dict()
        return {
            "hits": counts["hits"],
            "misses": counts["reads"],
            "fetched_chunks": counts["fetched_chunks"],
            "fetched_bytes": counts["fetched_bytes"],
        }

    def seen_by(self, request: web.Request) -> ThroughStore:
        """The store for a request, with what its upstreams have."""
        return ThroughStore(self._store, self, request.headers.get(VIA, ""))

    # Names

    def find_image(self, name: str, via: str) -> None:
        """Have here what this name or id means upstream, unless it is an image that this server has by itself.

        NotFoundError, LoopError; UpstreamError when no upstream answers and the name means nothing here.
        """
        try:
            _, ref = catalog.resolve(self._store, name)
        except NotFoundError:
            known = False
        else:
            known = True
            if not ref.origin or ChunkId.is_id(name):
                return
        ImageName.parse(name)

        def pull(upstream: HttpUpstream) -> Future[None] | None:
            return pull_image(self._fetcher, upstream, name, lazy=True, tally=self.tally).published

        self._look_up(f"image {name}", known, via, pull)

    def find_snapshot(self, name: str, via: str) -> None:
        """As `find_image`."""
        try:
            _, ref = snapshots.resolve(self._store, name)
        except NotFoundError:
            known = False
        else:
            known = True
            if not ref.server or ChunkId.is_id(name):
                return
        if not ChunkId.is_id(name):
            snapshot_name(name)

        def pull(upstream: HttpUpstream) -> Future[None] | None:
            return pull_snapshot(self._fetcher, upstream, name, lazy=True, tally=self.tally).published

        self._look_up(f"snapshot {name}", known, via, pull)

    def _look_up(self, what: str, known: bool, via: str, pull: Callable[[HttpUpstream], Future[None] | None]) -> None:
        chain = self._chain(via)
        with self._turns.take(what) if not via else nullcontext():
            if time.monotonic() - self._looked_up.get(what, -_FRESH_S) < _FRESH_S:
                return
            try:
                asked = (upstream.asked_via(chain) for upstream in self._upstreams)
                self._fetcher.drain(first(tiers(asked, _NAME_RETRY), pull))
            except NotFoundError:
                raise
            except NameTakenError as error:
                log.info("%s", error.message)
            except (UpstreamError, ChunkMissingError, ChunkCorruptError) as error:
                if not known:
                    raise
                log.warning("%s means what it meant last: %s", what, error.message)
            with self._lock:
                self._looked_up[what] = time.monotonic()
                while len(self._looked_up) > _MOST_RECENT_NAMES:
                    del self._looked_up[next(iter(self._looked_up))]

    def _chain(self, via: str) -> str:
        """The ids that a request upstream carries. LoopError."""
        hops = [hop for hop in via.split(",") if hop]
        if self.id in hops or len(hops) >= MOST_HOPS:
            raise LoopError(
                f"a request came back to this server through {len(hops)} others: they are caches of each other",
                hint="see their --upstream: it has to lead to a server that has what is asked for",
            )
        return ",".join([*hops, self.id])

    # Chunks

    def expect(self, chunks: Sequence[ChunkId], via: str) -> None:
        """These will be asked for, in this order: have them come in one stream."""
        if not via:
            self._fetcher.prefetch(chunks, self.tally)

    def bring(self, chunks: Sequence[ChunkId], via: str) -> dict[ChunkId, Frame]:
        """The frames of chunks that are not in the store; Frame.missing for one that no upstream has.

        LoopError, UpstreamError.
        """
        chain = self._chain(via)
        self.tally.count(reads=len(chunks))
        if not via:
            return self._joined(chunks)
        future = self._joining.submit(self._joined, chunks)
        try:
            return future.result(_JOIN_S)
        except LateError:
            future.cancel()
            return self._fetched(chunks, chain)

    def _joined(self, chunks: Sequence[ChunkId]) -> dict[ChunkId, Frame]:
        found: dict[ChunkId, Frame] = {}
        for chunk, result in self._fetcher.resolve(chunks, self.tally).items():
            if isinstance(result, bytes):
                found[chunk] = self._fetcher.frame(chunk, result)
            elif isinstance(result, ChunkMissingError):
                found[chunk] = Frame.missing(chunk)
            else:
                raise _unavailable(result)
        return found

    def _fetched(self, chunks: Sequence[ChunkId], chain: str) -> dict[ChunkId, Frame]:
        found: dict[ChunkId, Frame] = {}

        def arrived(frame: Frame, data: bytes) -> None:
            found[frame.id] = frame
            self._fetcher.deliver(frame, data)

        download = Download(chunks, _RETRY, heard=self._fetcher.routes.note)
        servers = [upstream.asked_via(chain) for upstream in self._fetcher.routes.order("")]
        download.run(servers, arrived, patient=False)
        for chunk in download.wanted:
            error = download.error(chunk)
            if not isinstance(error, ChunkMissingError):
                raise _unavailable(error)
            found[chunk] = Frame.missing(chunk)
        return found

    def offer(self, image: ChunkId, touched: Sequence[ChunkId]) -> None:
        """Tell the first upstream that takes it what a run of an image or snapshot touched. Soon; nobody waits."""

        def tell() -> None:
            try:
                first(tiers(self._upstreams, _NAME_RETRY), lambda upstream: upstream.merge_profile(image, touched))
            except PvisorError as error:
                log.info("profile of %s is not told upstream: %s", image, error.message)

        try:
            self._fetcher.behind(tell)
        except RuntimeError as error:
            log.info("profile of %s is not told upstream: %s", image, error)


def _unavailable(error: Exception) -> PvisorError:
    """Why a chunk could not be had, for a client that may ask again."""
    if isinstance(error, ChunkCorruptError):
        return UpstreamError(f"no upstream has it sound: {error.message}", hint="the log names the servers that lie")
    if isinstance(error, PvisorError):
        return error
    return UpstreamError(f"a chunk could not be fetched: {error!r}")


class _FrameFetcher(Fetcher):
    """Keeps what came as it came, so that it goes on as short as it was; and waits rather than not storing it."""

    def __init__(self, store: ChunkStore, upstreams: Sequence[HttpUpstream]) -> None:
        super().__init__(store, upstreams, retry=_RETRY)
        self._recent_lock = threading.Lock()
        self._recent = ChunkMemory(_RECENT_BYTES)

    def deliver(self, frame: Frame, data: bytes, *, keep_wait_s: float = 0.0, needed: bool = False) -> None:
        with self._recent_lock:
            self._recent.put(frame.id, Frame(frame.header, frame.payload).pack())
        super().deliver(frame, data, keep_wait_s=0.0 if needed else max(keep_wait_s, _KEEP_WAIT_S), needed=needed)

    def frame(self, chunk: ChunkId, data: bytes) -> Frame:
        """The frame of a chunk that came."""
        with self._recent_lock:
            packed = self._recent.get(chunk)
        if packed is not None:
            return Frame.parse(packed)
        return self.store.frame(chunk) or Frame.of(data, chunk=chunk)
