"""Who fetches what, when many threads miss chunks at once.

A *flight* is one chunk on its way; every thread that wants it waits for the same flight. A *trip* is one batch of
flights under way to the servers. A *lane* is the queue of flights for one order of servers. A lane has two request
slots: a miss that finds one free goes out at once, and those that arrive while both are taken go out together in the
next request. So a lone miss never waits for company, and a crowd makes few requests: ten threads that miss at random on
loopback are as quick as with four or eight slots and make a half or a third of the requests. When the requests under
way are slow there are more slots, one each ten milliseconds, so that nothing waits for a stuck one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from imaged.fetching.tally import Tally
from imaged.ids import ChunkId

if TYPE_CHECKING:
    from imaged.fetching.download import Download
    from imaged.fetching.incoming import Incoming

SLOTS = 2
MOST_SLOTS = 16
SLOW_S = 0.01
BATCH_LIMIT = 1024


class Flight:
    """One chunk on its way, for `owner`. Settled once, with data or an error, under the fetcher's lock.

    `waiters` each get the flight when it settles. `trips` are the requests that may bring it, `incoming` is who
    promised to bring it without one, `queued` says that it waits in a lane. `asks` counts how often it was asked for
    again; `since_s` is when somebody began to wait for it. `along` is the lane that it was taken along in, until it
    settles.
    """

    __slots__ = (
        "along",
        "asks",
        "chunk",
        "data",
        "error",
        "incoming",
        "owner",
        "queued",
        "settled",
        "since_s",
        "trips",
        "waiters",
    )

    def __init__(self, chunk: ChunkId, owner: Tally, *, incoming: Incoming | None = None) -> None:
        self.chunk = chunk
        self.owner = owner
        self.incoming = incoming
        self.along: Lane | None = None
        self.waiters: list[Mailbox] = []
        self.trips: list[Trip] = []
        self.asks = 0
        self.since_s = 0.0
        self.queued = self.settled = False
        self.data: bytes | None = None
        self.error: Exception | None = None

    def join(self, mailbox: Mailbox, tally: Tally) -> None:
        """Wait for it; whoever is first pays for what it costs from now on."""
        if not self.waiters:
            self.since_s = time.monotonic()
            self.owner = tally
        self.waiters.append(mailbox)


Mailbox = SimpleQueue[Flight]
"""What one thread waits on."""


@dataclass(slots=True, eq=False)
class Trip:
    """One batch under way. `lane` is whose slot it holds, None when it holds none.

    Only the flights to `last` are waited for; what follows comes along, and needs no slot. `is_late` once its flights
    were asked for again because nothing was heard of it, `is_hedge` when it is such a second request itself.
    """

    download: Download
    flights: dict[ChunkId, Flight]
    last: ChunkId
    lane: Lane | None
    is_hedge: bool = False
    is_late: bool = False

    @property
    def is_over(self) -> bool:
        return all(flight.settled for flight in self.flights.values())

    @property
    def is_superseded(self) -> bool:
        """Whether a later trip may bring whatever this one still should."""
        return all(flight.settled or flight.trips[-1] is not self for flight in self.flights.values())


@dataclass(slots=True, eq=False)
class Lane:
    """Flights that are queued for one order of servers: `queued` are waited for, `along` go with them when they go.

    `coming` counts the flights that were taken along and have not settled. Every method is called under the fetcher's
    lock.
    """

    origin: str
    queued: deque[Flight] = field(default_factory=deque)
    along: list[Flight] = field(default_factory=list)
    active: int = 0
    coming: int = 0
    last_start_s: float = 0.0

    def add(self, flights: list[Flight], along: list[Flight]) -> None:
        for flight in (*flights, *along):
            flight.queued = True
        for flight in along:
            flight.along = self
        self.coming += len(along)
        self.queued.extend(flights)
        self.along += along

    def take(self) -> tuple[list[Flight], list[Flight]] | None:
        """A slot and all that is queued (to the batch limit), or None when there is no slot or no work."""
        now_s = time.monotonic()
        if not self.queued or not self._has_slot(now_s):
            return None
        self.active += 1
        self.last_start_s = now_s
        batch = [self.queued.popleft() for _ in range(min(BATCH_LIMIT, len(self.queued)))]
        along, self.along = self.along, []
        for flight in (*batch, *along):
            flight.queued = False
        return batch, along

    def _has_slot(self, now_s: float) -> bool:
        return self.active < SLOTS or (self.active < MOST_SLOTS and now_s - self.last_start_s >= SLOW_S)

    def release(self) -> None:
        """Give a slot back."""
        self.active -= 1

    def withdraw(self, flights: list[Flight]) -> None:
        """Take flights out of the queue. What should have gone along with the last of them goes alone."""
        gone = {id(flight) for flight in flights if flight.queued}
        if gone:
            self.queued = deque(flight for flight in self.queued if id(flight) not in gone)
            self.along = [flight for flight in self.along if id(flight) not in gone]
            for flight in flights:
                flight.queued = False
            if not self.queued:
                self.queued.extend(self.along)
                self.along = []
