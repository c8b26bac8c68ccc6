"""Chunks from memory, the local store or a server, whichever has them first; each fetched once however many ask."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from imaged.download import Download
from imaged.errors import ChunkCorruptError, ChunkMissingError, StoreError, UpstreamError
from imaged.frame import Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.keeper import Keeper, VerifiedFrame
from imaged.lanes import SLOW_S, Flight, Lane, Mailbox
from imaged.upstream import HttpUpstream, RetryPolicy

if TYPE_CHECKING:
    from imaged.store import ChunkStore

log = logging.getLogger(__name__)
_GROUP = 256
"""Chunks resolved at a time when a caller streams many: at 64 KiB, 16 MiB in memory."""
_FAST_FAIL_S = 5.0
_LONGEST_WAIT_S = 300.0


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


class _Memory:
    """The most recently used chunks, to a number of bytes. Guarded by the fetcher's lock."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._chunks: OrderedDict[ChunkId, bytes] = OrderedDict()

    def get(self, chunk: ChunkId) -> bytes | None:
        data = self._chunks.get(chunk)
        if data is not None:
            self._chunks.move_to_end(chunk)
        return data

    def put(self, chunk: ChunkId, data: bytes) -> None:
        if chunk in self._chunks:
            return
        self._chunks[chunk] = data
        self._size_bytes += len(data)
        while self._size_bytes > self._limit_bytes:
            self._size_bytes -= len(self._chunks.popitem(last=False)[1])


class Fetcher:
    """Memory, then the local store, then the servers in order. Threads may share it; make it after any fork.

    Each chunk is verified before anyone sees it. One that a server sends wrong is asked for once more, then from the
    next server, then it is ChunkCorruptError. What was fetched is stored in the background (`Keeper`).
    """

    def __init__(
        self,
        store: ChunkStore,
        upstreams: Sequence[HttpUpstream] = (),
        *,
        memory_bytes: int = 64 << 20,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.store = store
        self.upstreams = tuple(upstreams)
        self.keeper = Keeper(store)
        self._retry = retry or RetryPolicy()
        self._lock = threading.Lock()
        self._memory = _Memory(memory_bytes)
        self._flights: dict[ChunkId, Flight[Tally]] = {}
        self._lanes: dict[str, Lane[Tally]] = {}
        self._servers = {upstream.url: upstream for upstream in self.upstreams}
        self._origins: dict[ChunkId, str] = {}
        self._gave_up_at: dict[str, float] = {}

    def close(self) -> None:
        """Store what is still queued and close idle connections."""
        self.keeper.close()
        for server in list(self._servers.values()):
            server.close()

    def drain(self) -> None:
        """Return when everything fetched so far is durable in the store. StoreError."""
        self.keeper.drain()

    # Which server

    def upstream(self, url: str) -> HttpUpstream:
        """The server at this URL, with one connection pool for all who ask."""
        with self._lock:
            server = self._servers.get(url)
            if server is None:
                server = self._servers[url] = HttpUpstream(url, retry=self._retry)
            return server

    def remember_origin(self, block_image: ChunkId, url: str) -> None:
        """Ask this server first for the chunks of this block image; `store.origins` is the lasting copy."""
        with self._lock:
            self._origins[block_image] = url

    def origin(self, block_image: ChunkId) -> str | None:
        """The server a block image was pulled from, or None."""
        return self._origins.get(block_image) or self.store.origins.get(block_image)

    def reader(self, block_image: ChunkId, tally: Tally) -> FetchingReader:
        """A reader for the chunks of one block image."""
        return FetchingReader(self, tally, origin=self.origin(block_image))

    def _order(self, origin: str) -> list[HttpUpstream]:
        first = [self.upstream(origin)] if origin else []
        return first + [server for server in self.upstreams if server.url != origin]

    # Reading

    def get(self, chunk: ChunkId, tally: Tally, *, origin: str | None = None) -> bytes:
        """One chunk; see `get_many`."""
        with self._lock:
            data = self._memory.get(chunk)
        if data is not None:
            tally.count(hits=1)
            return data
        return self.get_many((chunk,), tally, origin=origin)[chunk]

    def get_many(self, chunks: Iterable[ChunkId], tally: Tally, *, origin: str | None = None) -> dict[ChunkId, bytes]:
        """The verified bytes of all of them; what is not local comes in as few requests as possible.

        ChunkMissingError, ChunkCorruptError, UpstreamError: for the first chunk that failed.
        """
        found: dict[ChunkId, bytes] = {}
        for chunk, result in self.resolve(chunks, tally, origin=origin).items():
            if isinstance(result, Exception):
                raise result
            found[chunk] = result
        return found

    def resolve(
        self, chunks: Iterable[ChunkId], tally: Tally, *, origin: str | None = None
    ) -> dict[ChunkId, bytes | Exception]:
        """As `get_many`, with the error in place of the bytes for each chunk that failed."""
        results: dict[ChunkId, bytes | Exception] = {}
        mailbox: Mailbox[Tally] = SimpleQueue()
        mine: list[Flight[Tally]] = []
        waiting: set[ChunkId] = set()
        with self._lock:
            for chunk in chunks:
                data = self._memory.get(chunk)
                if data is not None:
                    results[chunk] = data
                elif chunk not in waiting:
                    waiting.add(chunk)
                    flight = self._flights.get(chunk)
                    if flight is None:
                        flight = self._flights[chunk] = Flight(chunk, tally, mailbox)
                        mine.append(flight)
                    else:
                        flight.waiters.append(mailbox)
        hits = len(results)
        if waiting:
            lane = self._lane(origin or "")
            try:
                absent = self._from_store(mine)
                hits += len(mine) - len(absent)
                with self._lock:
                    lane.add(absent)
                self._await(lane, origin or "", mailbox, mine, waiting, results, tally)
            except BaseException as error:
                self._abandon(lane, mine, error)
                raise
        if hits:
            tally.count(hits=hits)
        return results

    def _lane(self, origin: str) -> Lane[Tally]:
        with self._lock:
            lane = self._lanes.get(origin)
            if lane is None:
                lane = self._lanes[origin] = Lane(self._lock)
            return lane

    def _from_store(self, flights: list[Flight[Tally]]) -> list[Flight[Tally]]:
        """Settle what the local store has; the rest is returned. A store that fails is a store that has nothing."""
        absent = []
        for flight in flights:
            try:
                data = self.store.get(flight.chunk)
            except ChunkMissingError:
                absent.append(flight)
            except (ChunkCorruptError, StoreError) as error:
                log.warning("local copy: %s", error.message)
                absent.append(flight)
            else:
                self._settle(flight, data, None)
        return absent

    def _await(
        self,
        lane: Lane[Tally],
        origin: str,
        mailbox: Mailbox[Tally],
        mine: list[Flight[Tally]],
        waiting: set[ChunkId],
        results: dict[ChunkId, bytes | Exception],
        tally: Tally,
    ) -> None:
        """Until every flight in `waiting` has settled: carry batches when there is a slot, else wait for others."""
        may_carry = True
        deadline_s = time.monotonic() + _LONGEST_WAIT_S
        while waiting:
            if may_carry:
                with self._lock:
                    batch = lane.take()
                if batch:
                    self._carry(lane, origin, batch, tally)
            unsent = any(flight.queued for flight in mine)
            try:
                settled = mailbox.get(timeout=SLOW_S if unsent else _LONGEST_WAIT_S)
            except Empty:
                if time.monotonic() > deadline_s:
                    chunk = next(iter(waiting))
                    raise UpstreamError(f"chunk {chunk} did not arrive within {_LONGEST_WAIT_S:.0f} s") from None
                may_carry = True
                continue
            may_carry = settled is None
            if settled is not None:
                waiting.discard(settled.chunk)
                results[settled.chunk] = settled.data if settled.data is not None else settled.error or RuntimeError()

    def _settle(self, flight: Flight[Tally], data: bytes | None, error: Exception | None) -> None:
        with self._lock:
            if flight.settled:
                return
            flight.settled, flight.data, flight.error = True, data, error
            self._flights.pop(flight.chunk, None)
            if data is not None:
                self._memory.put(flight.chunk, data)
            waiters = flight.waiters
        for mailbox in waiters:
            mailbox.put(flight)

    def _abandon(self, lane: Lane[Tally], mine: list[Flight[Tally]], error: BaseException) -> None:
        """The thread gives up: those who wait for its flights must not wait for ever."""
        with self._lock:
            queued = {id(flight) for flight in lane.queued}
            unsent = [flight for flight in mine if id(flight) in queued or not flight.settled]
            lane.withdraw(unsent)
        for flight in unsent:
            self._settle(flight, None, UpstreamError(f"chunk {flight.chunk}: its fetch was abandoned: {error}"))

    # Fetching

    def _carry(self, lane: Lane[Tally], origin: str, batch: list[Flight[Tally]], tally: Tally) -> None:
        """Fetch a batch in this thread, with the slot that was taken for it; settles every flight."""
        flights = {flight.chunk: flight for flight in batch}
        download = Download(flights, self._retry)

        def arrived(frame: Frame, data: bytes) -> None:
            flight = flights[frame.id]
            flight.owner.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
            self._settle(flight, data, None)
            self.keeper.keep(VerifiedFrame(frame.header, frame.payload, data))

        try:
            # Of each origin for itself: that one server is down says nothing about the image of another.
            patient = time.monotonic() - self._gave_up_at.get(origin, -_FAST_FAIL_S) > _FAST_FAIL_S
            if not download.run(self._order(origin), arrived, patient=patient):
                self._gave_up_at[origin] = time.monotonic()
        finally:
            tally.count(requests=download.requests)
            with self._lock:
                lane.release()
            for chunk in download.wanted:
                self._settle(flights[chunk], None, download.error(chunk))

    def admit(self, frame: Frame, tally: Tally) -> bytes:
        """A frame that came without being asked for (the boot stream): verify, keep in memory, store. ChunkError."""
        data = frame.open()
        tally.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
        with self._lock:
            self._memory.put(frame.id, data)
        self.keeper.keep(VerifiedFrame(frame.header, frame.payload, data))
        return data


class FetchingReader:
    """A `ChunkReader` over a fetcher: what a block image is read through. Threads may share it."""

    def __init__(self, fetcher: Fetcher, tally: Tally, *, origin: str | None = None) -> None:
        self.tally = tally
        self._fetcher = fetcher
        self._origin = origin

    def get(self, chunk: ChunkId) -> bytes:
        return self._fetcher.get(chunk, self.tally, origin=self._origin)

    def get_many(self, chunks: Iterable[ChunkId]) -> dict[ChunkId, bytes]:
        """All of them, in as few requests as possible."""
        return self._fetcher.get_many(chunks, self.tally, origin=self._origin)

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        """In order; a chunk that nobody has is `Frame.missing`, other failures are raised."""
        for start in range(0, len(chunks), _GROUP):
            group = chunks[start : start + _GROUP]
            results = self._fetcher.resolve(group, self.tally, origin=self._origin)
            for chunk in group:
                result = results[chunk]
                if isinstance(result, ChunkMissingError):
                    yield Frame.missing(chunk)
                elif isinstance(result, Exception):
                    raise result
                else:
                    yield VerifiedFrame(FrameHeader(chunk, Codec.RAW, len(result), len(result)), result, result)
