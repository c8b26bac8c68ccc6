"""What long work says of itself on stderr: a line that is redrawn on a terminal, one now and then in a log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cli.common import Settings, human_bytes, printable
from imaged.progress import NoProgress, Progress

LOG_INTERVAL_S = 15.0
"""Work that is done sooner says nothing where there is no terminal."""


class ProgressLine:
    """An `imaged.progress.Progress` as a line on stderr, redrawn: `layer 2 of 3  [####    ] 41.0 MiB of ...`."""

    INTERVAL_S = 0.1
    BAR_WIDTH = 20

    def __init__(self) -> None:
        self._step = ""
        self._done = 0
        self._total: int | None = None
        self._drawn_at = 0.0

    def start(self, step: str, total_bytes: int | None) -> None:
        self._step, self._done, self._total = printable(step), 0, total_bytes
        self._draw()

    def advance(self, byte_count: int) -> None:
        self._done += byte_count
        if time.monotonic() - self._drawn_at >= self.INTERVAL_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        line = f"{self._step}  {human_bytes(self._done)}" if self._done else self._step
        if self._total:
            filled = min(self.BAR_WIDTH, self.BAR_WIDTH * self._done // self._total)
            bar = f"[{'#' * filled:{self.BAR_WIDTH}}]"
            line = f"{self._step}  {bar} {human_bytes(self._done)} of {human_bytes(self._total)}"
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0 is a terminal that does not know
        sys.stderr.write("\r\x1b[K" + line[: columns - 1])
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


class ProgressLog:
    """An `imaged.progress.Progress` for a stderr that is no terminal: a line each `LOG_INTERVAL_S`, so that who reads
    the log of a job sees that it goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = ""
        self._done = 0
        self._total: int | None = None
        self._told_at = clock()

    def start(self, step: str, total_bytes: int | None) -> None:
        self._step, self._done, self._total = printable(step), 0, total_bytes
        self._tell()

    def advance(self, byte_count: int) -> None:
        self._done += byte_count
        self._tell()

    def _tell(self) -> None:
        now = self._clock()
        if now - self._told_at < LOG_INTERVAL_S:
            return
        self._told_at = now
        of = f" of {human_bytes(self._total)}" if self._total else ""
        done = f": {human_bytes(self._done)}{of}" if self._done or of else ""
        print(f"pvisor: {self._step}{done}", file=sys.stderr, flush=True)


@contextmanager
def progress(settings: Settings) -> Iterator[Progress]:
    """On stderr, nothing with --json. The line on a terminal is wiped at the end."""
    if settings.json_output:
        yield NoProgress()
    elif not sys.stderr.isatty():
        yield ProgressLog()
    else:
        line = ProgressLine()
        try:
            yield line
        finally:
            line.close()
