"""Chunks from memory, the local store or a server, whichever has them first; each fetched once however many ask."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from imaged.errors import ChunkCorruptError, ChunkMissingError, PvisorError, StoreError, UpstreamError
from imaged.fetching.download import Download
from imaged.fetching.fetchreader import FetchingReader
from imaged.fetching.incoming import Incoming, Prefetch
from imaged.fetching.keeper import Keeper, VerifiedFrame
from imaged.fetching.lanes import SLOW_S, Flight, Lane, Mailbox
from imaged.fetching.memory import ChunkMemory
from imaged.fetching.neighbourhood import MOST_CHUNKS, Neighbourhood
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.routes import Routes
from imaged.fetching.tally import Tally
from imaged.fetching.trips import Trips
from imaged.fetching.upstream import HttpUpstream
from imaged.fetching.workers import Workers
from imaged.frame import Frame
from imaged.ids import ChunkId

if TYPE_CHECKING:
    from imaged.chunkstore.store import ChunkStore
    from imaged.collection.eviction import Evictor

__all__ = ["Fetcher", "FetchingReader", "Incoming", "Prefetch", "Tally"]
log = logging.getLogger(__name__)
_LONGEST_WAIT_S = 300.0
_MOST_PREFETCHES = 32
_GAVE_UP_S = 1.0
"""The kernel asks once more, at once, for a page that could not be read: it shall not wait as long again."""
_LONG_WAIT_S = 1.0
_GIVEN_UP = 1024
_DAMAGED = 1024
"""Chunks remembered as found damaged here: the store drops them, and they would be called missing from then on."""
_GUESSES = 8192
"""Chunks remembered as taken along and not yet read."""


class Fetcher:
    """Memory, then the local store, then the servers in order. Threads may share it; make it after any fork.

    Each chunk is verified before anyone sees it. One that a server sends wrong is asked for once more, then from the
    next server, then it is ChunkCorruptError, as is one that was damaged here and that nobody else has. What was
    fetched is stored in the background (`Keeper`).

    Requests are made by threads of their own (`Trips`); who wants a chunk waits for its flight.
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
        self.routes = Routes(self.upstreams, self._retry)
        self._lock = threading.Lock()
        self._memory = ChunkMemory(memory_bytes)
        self._load_bytes, self._loading_bytes = memory_bytes // 2, 0
        self._closing = False
        self._flights: dict[ChunkId, Flight] = {}
        self._guesses: dict[ChunkId, Neighbourhood] = {}
        self._given_up: dict[ChunkId, tuple[float, UpstreamError]] = {}
        self._damaged: dict[ChunkId, str] = {}
        self._trips = Trips(self._lock, self.routes, self._retry, deliver=self.deliver, settle=self._settle)
        self._prefetches = Workers(_MOST_PREFETCHES, "prefetch")
        self._running: set[Prefetch] = set()

    def close(self) -> None:
        """End what nobody waits for, store what is still queued, close idle connections."""
        self._closing = True
        self._trips.close()
        self._prefetches.close()
        for prefetch in list(self._running):
            prefetch.cancel()
        self.keeper.close()
        self.routes.close()

    def drain(self, published: Future[None] | None = None) -> None:
        """Return when everything fetched so far is durable in the store, and what a pull publishes behind it is
        `published`. StoreError, and what publishing raises."""
        self.keeper.drain()
        if published is not None:
            published.result(0)

    # Which server

    def upstream(self, url: str) -> HttpUpstream:
        """The server at this URL, with one connection pool for all who ask."""
        return self.routes.upstream(url)

    def remember_origin(self, block_image: ChunkId, url: str) -> None:
        """Ask this server first for the chunks of this block image; `store.origins` is the lasting copy."""
        self.routes.remember(block_image, url)

    def origin(self, block_image: ChunkId) -> str | None:
        """The server a block image was pulled from, or None."""
        return self.routes.remembered(block_image) or self.store.origins.get(block_image)

    def reader(self, block_image: ChunkId, tally: Tally) -> FetchingReader:
        """A reader for the chunks of one block image."""
        return FetchingReader(self, tally, origin=self.origin(block_image))

    # Reading

    def get(
        self, chunk: ChunkId, tally: Tally, *, origin: str | None = None, near: Neighbourhood | None = None
    ) -> bytes:
        """One chunk; see `get_many`."""
        with self._lock:
            data = self._memory.get(chunk)
            if data is not None and self._guesses:
                self._guessed_right(chunk)
        if data is not None:
            tally.count(hits=1)
            self.store.uses.touch((chunk,))
            return data
        return self.get_many((chunk,), tally, origin=origin, near=near)[chunk]

    def get_many(
        self,
        chunks: Iterable[ChunkId],
        tally: Tally,
        *,
        origin: str | None = None,
        near: Neighbourhood | None = None,
    ) -> dict[ChunkId, bytes]:
        """The verified bytes of all of them; what is not local comes in as few requests as possible, together with what
        `near` says to take along.

        ChunkMissingError, ChunkCorruptError, UpstreamError: for the first chunk that failed.
        """
        found: dict[ChunkId, bytes] = {}
        for chunk, result in self.resolve(chunks, tally, origin=origin, near=near).items():
            if isinstance(result, Exception):
                raise result
            found[chunk] = result
        return found

    def peek(self, chunk: ChunkId) -> bytes | None:
        """The chunk if it is on this host, whatever that means for its being used recently."""
        with self._lock:
            data = self._memory.peek(chunk)
        return self._stored(chunk) if data is None else data

    def _stored(self, chunk: ChunkId) -> bytes | None:
        """The local store's copy. One that is lost or damaged is the concern of who needs it."""
        try:
            return self.store.get(chunk)
        except ChunkCorruptError as error:
            self._note_damage(error)
        except (ChunkMissingError, StoreError):
            pass
        return None

    def _note_damage(self, error: ChunkCorruptError) -> None:
        """For who needs the chunk, if nobody else has it."""
        with self._lock:
            self._damaged[error.chunk] = error.message.removeprefix(f"chunk {error.chunk}: ")
            while len(self._damaged) > _DAMAGED:
                del self._damaged[next(iter(self._damaged))]

    def resolve(
        self,
        chunks: Iterable[ChunkId],
        tally: Tally,
        *,
        origin: str | None = None,
        near: Neighbourhood | None = None,
    ) -> dict[ChunkId, bytes | Exception]:
        """As `get_many`, with the error in place of the bytes for each chunk that failed."""
        results: dict[ChunkId, bytes | Exception] = {}
        refused: dict[ChunkId, bytes | Exception] = {}
        mailbox: Mailbox = SimpleQueue()
        mine: list[Flight] = []
        waiting: dict[ChunkId, Flight] = {}
        with self._lock:
            for chunk in chunks:
                if self._guesses:
                    self._guessed_right(chunk)
                data = self._memory.get(chunk)
                if data is not None:
                    results[chunk] = data
                elif chunk not in waiting:
                    flight = self._flights.get(chunk)
                    if flight is None:
                        if self._given_up and (error := self._gave_up_on(chunk)) is not None:
                            refused[chunk] = error
                            continue
                        flight = self._flights[chunk] = Flight(chunk, tally)
                        mine.append(flight)
                    flight.join(mailbox, tally)
                    waiting[chunk] = flight
        hits = len(results)
        if results:
            self.store.uses.touch(results)
        if waiting:
            unsent = mine
            try:
                lane = self._trips.lane(origin or "")
                unsent = self._from_store(mine)
                hits += len(mine) - len(unsent)
                if unsent:
                    self._send(lane, unsent, tally, near)
                    unsent = []
                self._await(lane, mailbox, waiting, results)
            except BaseException as error:
                for flight in unsent:
                    gone = UpstreamError(f"chunk {flight.chunk}: its fetch was abandoned: {error}")
                    self._settle(flight, None, gone)
                raise
        if hits:
            tally.count(hits=hits)
        return {**results, **refused} if refused else results

    def _from_store(self, flights: list[Flight]) -> list[Flight]:
        """Settle what the local store has; the rest is returned. A store that fails is a store that has nothing."""
        absent = []
        for flight in flights:
            try:
                data = self.store.get(flight.chunk)
            except ChunkMissingError:
                absent.append(flight)
            except (ChunkCorruptError, StoreError) as error:
                log.warning("local copy: %s", error.message)
                if isinstance(error, ChunkCorruptError):
                    self._note_damage(error)
                absent.append(flight)
            else:
                self.store.uses.touch((flight.chunk,))
                self._settle(flight, data, None)
        return absent

    def _settle(self, flight: Flight, data: bytes | None, error: Exception | None) -> None:
        """The first result counts."""
        with self._lock:
            if flight.settled:
                return
            if data is not None:
                self._damaged.pop(flight.chunk, None)
            elif isinstance(error, ChunkMissingError) and flight.chunk in self._damaged:
                error = ChunkCorruptError(flight.chunk, f"{self._damaged[flight.chunk]}; nobody else has it")
            flight.settled, flight.data, flight.error = True, data, error
            if flight.along is not None:
                flight.along.coming -= 1
            self._flights.pop(flight.chunk, None)
            if data is not None:
                self._memory.put(flight.chunk, data)
            waiters = flight.waiters
            if waiters and isinstance(error, UpstreamError):
                self._give_up(flight, error)
        for mailbox in waiters:
            mailbox.put(flight)

    def _give_up(self, flight: Flight, error: UpstreamError) -> None:
        """Remember that somebody waited in vain. Under the lock."""
        now_s = time.monotonic()
        if now_s - flight.since_s >= max(_LONG_WAIT_S, self._retry.total_s / 2):
            self._given_up[flight.chunk] = now_s, error
            while len(self._given_up) > _GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]

    def _gave_up_on(self, chunk: ChunkId) -> UpstreamError | None:
        """Why, if that was just now. Under the lock."""
        at_s, error = self._given_up.get(chunk, (0.0, None))
        if error is not None and time.monotonic() - at_s > _GAVE_UP_S:
            del self._given_up[chunk]
            return None
        return error

    # Waiting

    def _await(
        self,
        lane: Lane,
        mailbox: Mailbox,
        waiting: dict[ChunkId, Flight],
        results: dict[ChunkId, bytes | Exception],
    ) -> None:
        """Until every flight in `waiting` has settled; asks again for what does not come."""
        deadline_s = time.monotonic() + _LONGEST_WAIT_S
        wait_s = SLOW_S
        while waiting:
            try:
                flight = mailbox.get(timeout=wait_s)
            except Empty:
                if time.monotonic() > deadline_s:
                    chunk = next(iter(waiting))
                    raise UpstreamError(f"chunk {chunk} did not arrive within {_LONGEST_WAIT_S:.0f} s") from None
                self._trips.depart(lane)
                wait_s = self._trips.hurry(lane, list(waiting.values()))
            else:
                del waiting[flight.chunk]
                results[flight.chunk] = flight.data if flight.data is not None else flight.error or RuntimeError()

    # Fetching

    def _send(self, lane: Lane, flights: list[Flight], tally: Tally, near: Neighbourhood | None) -> None:
        chosen = self._choose(lane, flights, near) if near is not None else ()
        with self._lock:
            along = []
            for chunk in chosen:
                if not self._is_known(chunk):
                    flight = self._flights[chunk] = Flight(chunk, tally)
                    along.append(flight)
                    if near is not None:
                        self._guesses[chunk] = near
            while len(self._guesses) > _GUESSES:
                del self._guesses[next(iter(self._guesses))]
            lane.add(flights, along)
        self._trips.depart(lane)

    def _choose(self, lane: Lane, flights: list[Flight], near: Neighbourhood) -> Sequence[ChunkId]:
        """What to take along with these."""
        servers = self.routes.order(lane.origin)
        spare_bytes = self.routes.link(servers[0]).spare_bytes if servers else 0
        if not spare_bytes or len(lane.along) > MOST_CHUNKS:
            return ()
        try:
            missed = [flight.chunk for flight in flights]
            return self._absent(near.choose(missed, spare_bytes, self._is_known, coming=lane.coming))
        except PvisorError as error:
            # A neighbour whose leaf is none: whoever reads it is told.
            log.info("nothing is taken along: %s", error.message)
            return ()

    def _is_known(self, chunk: ChunkId) -> bool:
        """Whether it is in memory or under way."""
        return chunk in self._memory or chunk in self._flights

    def _guessed_right(self, chunk: ChunkId) -> None:
        """Somebody reads this chunk: tell who chose it, if anybody did. Under the lock."""
        near = self._guesses.pop(chunk, None)
        if near is not None:
            near.used()

    # What comes without being waited for

    def expect(self, chunks: Sequence[ChunkId], tally: Tally, *, origin: str | None = None) -> Incoming:
        """Promise these chunks: `Incoming.wanted` is what to ask a server for.

        Who reads one of them meanwhile waits for the promise instead of asking. `origin` is the server that is asked
        first for what does not come after all.
        """
        lane = self._trips.lane(origin or "")
        with self._lock:
            unknown = [chunk for chunk in chunks if not self._is_known(chunk)]
        absent = self._absent(unknown)
        wanted: list[ChunkId] = []
        incoming = Incoming(self, tally, lane)
        with self._lock:
            for chunk in absent:
                if not self._is_known(chunk):
                    self._flights[chunk] = Flight(chunk, tally, incoming=incoming)
                    wanted.append(chunk)
            incoming.wanted = tuple(wanted)
        return incoming

    def prefetch(self, chunks: Sequence[ChunkId], tally: Tally, *, origin: str | None = None) -> Prefetch:
        """Bring what of these chunks is not here, in this order, in one streamed request in the background."""
        prefetch = Prefetch(self, self.expect(chunks, tally, origin=origin), tally, origin or "")
        self._running.add(prefetch)

        def run() -> None:
            prefetch.run()
            self._running.discard(prefetch)

        try:
            self.behind(run)
        except RuntimeError as error:
            log.info("no prefetch: %s", error)
            prefetch.cancel()
            run()
        return prefetch

    def behind(self, work: Callable[[], None]) -> None:
        """Soon, on one of a bounded number of threads that bring what nobody waits for. RuntimeError when closed."""
        self._prefetches.run(work)

    def load(self, chunks: Iterable[ChunkId]) -> None:
        """Have in memory what the local store has of these, in this order, in this thread.

        For who will soon read them one by one: each would wait for the disk, and for its chunk to be verified. All who
        load at the same time share half of the memory, so that they do not drive out what another has just loaded.
        """
        mine = 0
        try:
            for chunk in chunks:
                with self._lock:
                    if self._closing:
                        return
                    known = self._is_known(chunk)
                data = None if known else self._stored(chunk)
                if data is None:
                    continue
                with self._lock:
                    if self._loading_bytes + len(data) > self._load_bytes:
                        return
                    self._loading_bytes += len(data)
                    mine += len(data)
                    self._memory.put(chunk, data)
        finally:
            with self._lock:
                self._loading_bytes -= mine

    def _absent(self, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Those that the local store does not have, each once."""
        try:
            return self.store.absent(chunks)
        except StoreError as error:
            log.warning("local store: %s", error.message)
            return list(dict.fromkeys(chunks))

    def download(self, chunks: Sequence[ChunkId], tally: Tally) -> Download:
        """For a prefetch: a download of these chunks as far as they have not come another way."""
        return Download(
            chunks,
            self._retry,
            asked=partial(tally.count, requests=1),
            heard=self.routes.note,
            judged=self.routes.judge,
            settled=lambda chunk: chunk not in self._flights,
        )

    def deliver(self, frame: Frame, data: bytes, *, keep_wait_s: float = 0.0, needed: bool = False) -> None:
        """A chunk that came and was verified: to who waits for it, into memory, and soon into the store.

        It is in the keeper's queue before anyone is told, so that `drain` stores what its caller has seen; but
        afterwards for those who bring many and may wait `keep_wait_s` for room there.
        """
        with self._lock:
            known = frame.id in self._memory
            flight = self._flights.get(frame.id)
            near = self._guesses.get(frame.id)
            if near is not None:
                near.came(frame.id, frame.stored_bytes)
            if flight is None:
                self._memory.put(frame.id, data)
        if not known and not keep_wait_s:
            self.keeper.keep(VerifiedFrame(frame.header, frame.payload, data, needed))
        if flight is not None:
            self._settle(flight, data, None)
        if not known and keep_wait_s:
            self.keeper.keep(VerifiedFrame(frame.header, frame.payload, data), wait_s=keep_wait_s)

    def stow(self, frame: Frame, data: bytes) -> None:
        """A verified chunk that nobody needs yet: into the store at once, and into memory only for who waits for it.

        What running processes use stays in memory, and the keeper's room theirs. StoreError.
        """
        with self._lock:
            flight = self._flights.get(frame.id)
        if flight is not None:
            self._settle(flight, data, None)
        self.keeper.room.take(frame.stored_bytes)
        self.store.put_frame(VerifiedFrame(frame.header, frame.payload, data))
        self.store.uses.fetched([frame.id])

    def bound(self, evictor: Evictor) -> None:
        """From now on what is kept is bounded so; what is evicted can be had of any server that something came from.
        To be called again when there is a bound only later."""
        self.keeper.room.evictor = evictor
        if evictor.max_bytes is not None:
            self.routes.ask_all({url for _, url in self.store.origins.items()})

    def quiet_s(self) -> float:
        """How long it is since anybody wanted a chunk that was not here; 0.0 while one is under way."""
        with self._lock:
            return 0.0 if self._flights else time.monotonic() - self._trips.last_start_s()

    def release(self, incoming: Incoming, chunks: Iterable[ChunkId]) -> None:
        """These are not promised any more. Who waits for one that is not under way otherwise asks for it now."""
        with self._lock:
            orphans = []
            for chunk in chunks:
                flight = self._flights.get(chunk)
                if flight is not None and flight.incoming is incoming:
                    flight.incoming = None
                    if flight.waiters and not flight.trips:
                        orphans.append(flight)
                    elif not flight.trips:
                        del self._flights[chunk]
                        flight.settled = True
            if orphans:
                incoming.lane.add(orphans, [])
        if orphans:
            self._trips.depart(incoming.lane)

    def admit(self, frame: Frame, tally: Tally) -> bytes:
        """A frame that came without being asked for (the boot stream): verify, keep in memory, store. ChunkError."""
        data = frame.open()
        tally.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
        self.deliver(frame, data, needed=True)
        return data
