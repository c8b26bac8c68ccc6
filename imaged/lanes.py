"""Who fetches what, when many threads miss chunks at once.

A *flight* is one chunk on its way; every thread that wants it waits for the same flight. A *lane* is the queue of
flights for one order of servers. A lane has two request slots: a miss that finds one free goes out at once, and those
that arrive while both are taken go out together in the next request. So a lone miss never waits for company, and a
crowd makes few requests: ten threads that miss at random on loopback are as quick as with four or eight slots and make
a half or a third of the requests. When the requests under way are slow there are more slots, one each ten
milliseconds, so that nothing waits for a stuck one. There is no dispatcher thread: the thread that waited longest
carries the batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

from imaged.ids import ChunkId

SLOTS = 2
MOST_SLOTS = 16
SLOW_S = 0.01
BATCH_LIMIT = 1024
T = TypeVar("T")


class Flight(Generic[T]):
    """One chunk on its way, for `owner` (its tally). Settled once, with data or an error, under the fetcher's lock.

    Waiters are mailboxes: each gets the flight when it settles.
    """

    __slots__ = ("chunk", "data", "error", "mailbox", "owner", "queued", "settled", "waiters")

    def __init__(self, chunk: ChunkId, owner: T, mailbox: Mailbox[T]) -> None:
        self.chunk = chunk
        self.owner = owner
        self.mailbox = mailbox
        self.waiters: list[Mailbox[T]] = [mailbox]
        self.queued = self.settled = False
        self.data: bytes | None = None
        self.error: Exception | None = None


Mailbox = SimpleQueue["Flight[T] | None"]
"""What one thread waits on: a settled flight, or None for "a slot is free, carry what is queued"."""


@dataclass(slots=True)
class Lane(Generic[T]):
    """Flights that are queued for one order of servers. Every method is called under `lock`."""

    lock: threading.Lock
    queued: deque[Flight[T]] = field(default_factory=deque)
    active: int = 0
    last_start_s: float = 0.0

    def add(self, flights: list[Flight[T]]) -> None:
        for flight in flights:
            flight.queued = True
        self.queued.extend(flights)

    def take(self) -> list[Flight[T]]:
        """A slot and all that is queued (to the batch limit), or nothing when there is no slot or no work."""
        now_s = time.monotonic()
        if not self.queued or not self._has_slot(now_s):
            return []
        self.active += 1
        self.last_start_s = now_s
        batch = [self.queued.popleft() for _ in range(min(BATCH_LIMIT, len(self.queued)))]
        for flight in batch:
            flight.queued = False
        return batch

    def _has_slot(self, now_s: float) -> bool:
        return self.active < SLOTS or (self.active < MOST_SLOTS and now_s - self.last_start_s >= SLOW_S)

    def release(self) -> None:
        """Give the slot back and wake the thread that has waited longest."""
        self.active -= 1
        self._wake()

    def _wake(self) -> None:
        if self.queued:
            self.queued[0].mailbox.put(None)

    def withdraw(self, flights: list[Flight[T]]) -> None:
        """Take flights out of the queue whose thread gives up; wake the next, whose turn it may have been."""
        gone = set(map(id, flights))
        self.queued = deque(flight for flight in self.queued if id(flight) not in gone)
        self._wake()
