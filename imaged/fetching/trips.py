"""Requests that somebody waits for: one batch each, on threads of their own, and once more when one hangs.

A request that is silent for longer than its server's usual wait is *late*: the flights it should bring are asked for
again, of the next server or of the same over another connection, and whichever answers first counts. A late request
gives its slot back, so that it holds up nothing else, and its server is asked after the others for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from imaged.errors import UpstreamError
from imaged.fetching.download import Download
from imaged.fetching.lanes import BATCH_LIMIT, SLOW_S, Flight, Lane, Trip
from imaged.fetching.link import LEAST_HEDGE_S
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.routes import Routes
from imaged.fetching.upstream import HttpUpstream
from imaged.fetching.workers import Workers
from imaged.frame import Frame

log = logging.getLogger(__name__)
MOST_TRIPS = 48
"""Requests under way at once: the slots of a few lanes, and those asked again."""
MOST_HEDGES = 16
_FAST_FAIL_S = 5.0
_TRICKLE = 20
"""A batch that lasts so many times as long as a silence may is late though bytes trickle in."""
_PROMISE = 4
"""Who waits for a promised chunk waits so many silences while others of the promise arrive."""
_NEVER_S = 3600.0


class Trips:
    """Lanes, and the threads that serve them. Threads may share it; `lock` is also that of the flights.

    `deliver` takes each verified chunk; `settle` ends a flight with an error.
    """

    def __init__(
        self,
        lock: threading.Lock,
        routes: Routes,
        retry: RetryPolicy,
        *,
        deliver: Callable[[Frame, bytes], None],
        settle: Callable[[Flight, None, Exception], None],
    ) -> None:
        self._lock, self._routes, self._retry = lock, routes, retry
        self._deliver, self._settle = deliver, settle
        self._lanes: dict[str, Lane] = {}
        self._gave_up_at: dict[str, float] = {}
        self._hedges = 0
        self._workers = Workers(MOST_TRIPS, "fetch")

    def close(self) -> None:
        """Start nothing more."""
        self._workers.close()

    def lane(self, origin: str) -> Lane:
        """The queue of those who ask this server first."""
        with self._lock:
            lane = self._lanes.get(origin)
            if lane is None:
                lane = self._lanes[origin] = Lane(origin)
            return lane

    def last_start_s(self) -> float:
        """When a request was last sent for somebody. Under the lock."""
        return max((lane.last_start_s for lane in self._lanes.values()), default=0.0)

    def depart(self, lane: Lane) -> None:
        """Send what is queued, if there is a slot."""
        with self._lock:
            batch = lane.take()
        if batch is not None:
            self._start(lane, *batch)

    # Asking again

    def hurry(self, lane: Lane, flights: Iterable[Flight]) -> float:
        """Ask again for those of the flights that are late, and for what else they are stuck with; in how many seconds
        the next one may be."""
        servers = self._routes.order(lane.origin)
        if not servers:
            return _NEVER_S
        hedge_s = self._routes.link(servers[0]).hedge_s
        now_s = time.monotonic()
        next_s = hedge_s
        late: list[Flight] = []
        lost: list[Flight] = []
        with self._lock:
            for flight in flights:
                if flight.settled:
                    continue
                if flight.queued:
                    next_s = min(next_s, SLOW_S)
                left_s = self._due_s(flight, hedge_s) - now_s
                if left_s > 0:
                    next_s = min(next_s, left_s)
                elif now_s - flight.since_s < self._retry.total_s:
                    late.append(flight)
                else:
                    lost.append(flight)
            stuck = {trip for flight in (*late, *lost) for trip in flight.trips}
            late = _with_company(late)
            if len(late) > BATCH_LIMIT:
                del late[BATCH_LIMIT:]
                next_s = SLOW_S
            promises = {flight.incoming for flight in late if flight.incoming is not None}
            promises = {promise for promise in promises if now_s - promise.heard_s >= hedge_s}
            # Asked again twice, or no thread left: theirs are of more use for those that ask now.
            over = [trip for trip in stuck if trip.is_late or self._workers.is_full]
            for trip in stuck:
                trip.is_late = True
                self._free(trip)
            if self._hedges >= MOST_HEDGES:
                late = []
                next_s = min(next_s, LEAST_HEDGE_S)
            lane.withdraw([*late, *lost])
            for flight in late:
                flight.asks += 1
            self._hedges += bool(late)
        hung = [trip.download.server for trip in stuck if trip.download.server is not None]
        for server in hung:
            self._routes.link(server).hung()
        if late:
            log.info("%d chunks are late, the first is %s: asking again", len(late), late[0].chunk)
            self._start(lane, late, [], avoid=hung, hedge=True)
        self.depart(lane)
        for promise in promises:
            promise.hurry()
        with self._lock:
            over = [trip for trip in over if trip.is_superseded]
        for trip in over:
            trip.download.cancel()
        for flight in lost:
            waited_s = now_s - flight.since_s
            who = ", ".join(sorted({server.url for server in hung})) or "the chunk servers"
            message = f"chunk {flight.chunk}: no answer from {who} within {waited_s:.0f} s"
            self._settle(flight, None, UpstreamError(message, hint="check that the server is well and can be reached"))
        return max(next_s, SLOW_S)

    def _due_s(self, flight: Flight, hedge_s: float) -> float:
        """When a flight will be late, if nothing more is heard until then; with each time it is asked for, twice as
        long."""
        longer_s = hedge_s * 2.0**flight.asks
        if flight.trips:
            heard = [trip.download.heard_s for trip in flight.trips]
            if None in heard:
                # One that is between two attempts waits because a server told it to, or is not there.
                return flight.since_s + _NEVER_S
            heard_s = max(filter(None, heard))
            due_s = min(flight.since_s + _TRICKLE * longer_s, heard_s + longer_s)
            return min(due_s, max(flight.since_s + self._retry.total_s, heard_s + hedge_s))
        if flight.queued:
            return flight.since_s + longer_s
        if flight.incoming is not None:
            promised_s = max(flight.since_s, flight.incoming.heard_s)
            return min(flight.since_s + _PROMISE * longer_s, promised_s + longer_s)
        return flight.since_s + _TRICKLE * longer_s

    # One trip

    def _start(
        self,
        lane: Lane,
        flights: list[Flight],
        along: list[Flight],
        *,
        avoid: Sequence[HttpUpstream] = (),
        hedge: bool = False,
    ) -> None:
        """A trip on a thread of its own."""
        batch = {flight.chunk: flight for flight in (*flights, *along)}
        download = Download(
            batch,
            self._retry,
            asked=partial(flights[0].owner.count, requests=1),
            heard=self._routes.note,
            judged=self._routes.judge,
            settled=lambda chunk: batch[chunk].settled,
            fresh=hedge,
        )
        trip = Trip(download, batch, flights[-1].chunk, None if hedge else lane, is_hedge=hedge)
        with self._lock:
            for flight in batch.values():
                flight.trips.append(trip)
        try:
            self._workers.run(lambda: self._travel(lane, trip, avoid))
        except RuntimeError as error:
            self._arrive(trip, UpstreamError(f"no chunk can be fetched: {error}"))

    def _travel(self, lane: Lane, trip: Trip, avoid: Sequence[HttpUpstream]) -> None:
        """Fetch a batch in this thread; settles its flights."""

        def arrived(frame: Frame, data: bytes) -> None:
            flight = trip.flights[frame.id]
            flight.owner.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
            self._deliver(frame, data)
            if len(flight.trips) > 1:
                self._cancel_rivals(trip, flight)
            if frame.id == trip.last:
                with self._lock:
                    self._free(trip)
                self.depart(lane)

        try:
            # Of each origin for itself: that one server is down says nothing about the image of another.
            patient = time.monotonic() - self._gave_up_at.get(lane.origin, -_FAST_FAIL_S) > _FAST_FAIL_S
            if not trip.download.run(self._routes.order(lane.origin, avoid=avoid), arrived, patient=patient):
                self._gave_up_at[lane.origin] = time.monotonic()
        finally:
            self._arrive(trip)
            self.depart(lane)

    def _cancel_rivals(self, trip: Trip, flight: Flight) -> None:
        """This trip was first: others that have nothing else to bring are of no use."""
        with self._lock:
            over = [other for other in flight.trips if other is not trip and other.is_over]
        for other in over:
            other.download.cancel()

    def _free(self, trip: Trip) -> None:
        """Give back the trip's slot, or its place among those that ask again. Under the lock."""
        if trip.lane is not None:
            trip.lane.release()
            trip.lane = None
        if trip.is_hedge:
            self._hedges -= 1
            trip.is_hedge = False

    def _arrive(self, trip: Trip, error: Exception | None = None) -> None:
        """A trip is over: what it did not bring fails, unless it may come another way."""
        failed = []
        with self._lock:
            self._free(trip)
            for flight in trip.flights.values():
                flight.trips.remove(trip)
                if not flight.settled and not flight.trips and flight.incoming is None:
                    failed.append(flight)
        for flight in failed:
            self._settle(flight, None, error or trip.download.error(flight.chunk))


def _with_company(late: list[Flight]) -> list[Flight]:
    """Also what else is waited for and hangs in the same trips: one request for all of it. Under the lock."""
    found = dict.fromkeys(late)
    for flight in late:
        if flight.trips:
            last = flight.trips[-1]
            others = (other for other in last.flights.values() if other.waiters and not other.settled)
            found.update(dict.fromkeys(other for other in others if other.trips[-1] is last))
    return list(found)
