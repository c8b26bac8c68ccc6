"""Storing fetched chunks behind the reader's back: the reader has its bytes already, the disk can take its time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from imaged.errors import PvisorError, StoreError, StoreFullError
from imaged.fetching.room import Room
from imaged.frame import Frame

if TYPE_CHECKING:
    from imaged.chunkstore.store import ChunkStore

log = logging.getLogger(__name__)
_QUEUE_FRAMES = 256
_ACTION_WAIT_S = 60.0
_CLOSE_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class VerifiedFrame(Frame):
    """A frame that was opened before: `data` is what `Frame.open` gave, so that opening it again costs nothing.

    One that is `needed` is stored however little space is left.
    """

    data: bytes
    needed: bool = False

    def open(self) -> bytes:
        return self.data


class Keeper:
    """A bounded queue and one thread that puts frames into the store. Threads may share it.

    A store that is full, read-only or too slow costs the cached copy, never the read: such frames are counted in
    `dropped` and fetched again when they are next wanted. The file system is not filled up with them either: `room`
    says when to stop. Nothing that is given here ends the thread.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.dropped = 0
        self.room = Room(store.root)
        self._store = store
        self._queue: queue.Queue[VerifiedFrame | Callable[[], None] | None] = queue.Queue(_QUEUE_FRAMES)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = self._stuck = False

    def keep(self, frame: VerifiedFrame, *, wait_s: float = 0.0) -> None:
        """Store this frame soon, or give it up when the queue is full: it can be fetched again.

        `wait_s` is how long to wait for room, for those whom nobody waits for; once that was in vain, nobody waits
        until there is room again.
        """
        try:
            self._give(frame, 0.0 if self._stuck else wait_s)
        except StoreError:
            self._stuck = True
            self.dropped += 1
        else:
            self._stuck = False

    def after(self, action: Callable[[], None], *, timeout_s: float = _ACTION_WAIT_S) -> Future[None]:
        """Run `action` on the keeper's thread when everything kept before is in the store; what becomes of it, which is
        known after the next `drain`. Its error is a PvisorError.

        StoreError when the queue stays full for so long.
        """
        done = Future[None]()
        self._give(lambda: _attempt(action, done), timeout_s)
        return done

    def drain(self, timeout_s: float = 600.0) -> None:
        """Return when everything given so far is in the store and durable. StoreError when it can not be; what went
        wrong with an action is for who gave it."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self.after(self._store.flush, timeout_s=timeout_s).result(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            raise StoreError(f"the store did not take what was fetched within {timeout_s:.0f} s") from None

    def close(self) -> None:
        """Store what is queued, then end the thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            try:
                self._queue.put(None, timeout=_CLOSE_WAIT_S)
            except queue.Full:
                log.warning("the store did not take what was fetched within %.0f s: giving it up", _CLOSE_WAIT_S)
                return
            thread.join(_CLOSE_WAIT_S)

    def _give(self, item: VerifiedFrame | Callable[[], None], timeout_s: float) -> None:
        if self._closed:
            raise StoreError("nothing more is stored: the keeper is closed")
        self._start()
        try:
            self._queue.put(item, block=timeout_s > 0, timeout=timeout_s)
        except queue.Full:
            raise StoreError(f"the store did not take what was fetched within {timeout_s:.0f} s") from None

    def _start(self) -> None:
        """The thread starts with the first frame, so that a process may fork before it."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, VerifiedFrame):
                self._put(item)
            else:
                item()

    def _put(self, frame: VerifiedFrame) -> None:
        try:
            if not frame.needed:
                self.room.take(frame.stored_bytes)
            try:
                self._store.put_frame(frame)
            except StoreFullError:
                if not self.room.evict(frame.stored_bytes):
                    raise
                self._store.put_frame(frame)
            self._store.uses.fetched([frame.id])
        except PvisorError as error:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                log.warning("not cached: %s (%d chunks so far)", error.message, self.dropped)
        except Exception:
            self.dropped += 1
            log.exception("chunk %s was not cached", frame.id)


def _attempt(action: Callable[[], None], done: Future[None]) -> None:
    try:
        action()
    except PvisorError as error:
        log.warning("store: %s", error.message)
        done.set_exception(error)
    except Exception as error:
        log.exception("store")
        done.set_exception(StoreError(f"what was fetched could not be stored: {error!r}"))
    else:
        done.set_result(None)
