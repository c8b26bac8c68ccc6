"""A bounded number of threads for what blocks, so that those who wait for it can also wait for something else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)


class Workers:
    """Threads that start when there is work for them, up to `most`; further work waits its turn. Threads may share it.

    Not a ThreadPoolExecutor: a cold read pays for the way to a thread and back (15 us here), and at exit the
    interpreter would wait for a request that hangs.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._count = self._idle = self._waiting = 0
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether work that comes now has to wait."""
        return self._count >= self._most and not self._idle

    def run(self, work: Callable[[], None]) -> None:
        """Soon, on another thread. RuntimeError when this was closed, or the host has no thread left."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: closed")
            if self._idle:
                self._idle -= 1
            elif self._count < self._most:
                threading.Thread(target=self._work, name=f"{self._name}-{self._count}", daemon=True).start()
                self._count += 1
            else:
                self._waiting += 1
            self._queue.put(work)

    def close(self) -> None:
        """Take no more work; each thread ends after what it is doing and what was queued before."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._count):
                    self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("%s", self._name)
            with self._lock:
                if self._waiting:
                    self._waiting -= 1
                else:
                    self._idle += 1
