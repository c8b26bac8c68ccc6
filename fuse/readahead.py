"""Reading ahead of whoever reads a block image from front to back, so that the network is not asked chunk by chunk.

The kernel reads ahead too, but no more than 128 KiB: enough for a disk, not for a server. A program that starts touches
some hundred KiB here and there, and must not cause bytes to be fetched that it never reads; so nothing happens before
a run has gone on for `RUN_BYTES`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from imaged.fetching.workers import Workers

log = logging.getLogger(__name__)
RUN_BYTES = 1 << 20
WINDOW_BYTES = 1 << 20
_SLACK_BYTES = 128 << 10
"""The kernel's reads of one run come from several threads, so out of order by about this much."""
_RUNS = 16
_THREADS = 4


@dataclass(slots=True)
class _Run:
    end: int
    length: int
    ahead: int


class Runs:
    """The places at which one file is being read from front to back. Threads may share it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._runs: list[_Run] = []

    def note(self, offset: int, length: int) -> tuple[int, int] | None:
        """A read was asked for: the range (offset, length) to fetch ahead of it, or None."""
        end = offset + length
        with self._lock:
            run = self._find(offset)
            run.length += length
            run.end = max(run.end, end)
            start = max(run.ahead, run.end)
            if run.length < RUN_BYTES or start - run.end > WINDOW_BYTES // 2 or start >= self._size_bytes:
                return None
            run.ahead = min(start + WINDOW_BYTES, self._size_bytes)
            return start, run.ahead - start

    def _find(self, offset: int) -> _Run:
        """The run that goes on here, or a new one in place of the one that rested longest; it comes last."""
        for index in range(len(self._runs) - 1, -1, -1):
            run = self._runs[index]
            if -_SLACK_BYTES <= offset - run.end <= _SLACK_BYTES:
                if index + 1 < len(self._runs):
                    self._runs.append(self._runs.pop(index))
                return run
        run = _Run(offset, 0, offset)
        del self._runs[: max(0, len(self._runs) - _RUNS + 1)]
        self._runs.append(run)
        return run


class Prefetcher:
    """A few threads that bring what nobody waits for. When all are busy, reading ahead is left out."""

    def __init__(self) -> None:
        self._workers = Workers(_THREADS, "ahead")

    def start(self, bring: Callable[[int, int], None], offset: int, length: int) -> None:
        if self._workers.is_full:
            return
        try:
            self._workers.run(lambda: self._run(bring, offset, length))
        except RuntimeError as error:
            log.debug("no reading ahead: %s", error)

    def close(self) -> None:
        self._workers.close()

    def _run(self, bring: Callable[[int, int], None], offset: int, length: int) -> None:
        try:
            bring(offset, length)
        except Exception as error:
            # Whoever really reads there meets the same error and is told.
            log.info("reading ahead at %d: %s", offset, error)
