"""What signals do to a command that has something to put in order, or whose workload is somewhere else."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PATIENCE = 3


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP are exceptions in the block, as Ctrl-C is: what was begun is undone."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handling(_ENDING, end):
        yield


@contextmanager
def forwarding(send: Callable[[int], None], has_begun: Callable[[], bool]) -> Iterator[None]:
    """Signals go to the workload once it has begun, and end this before. The third Ctrl-C or SIGTERM is one here, for a
    workload that does not mind, or does not get it."""
    counts = {signal.SIGINT: 0, signal.SIGTERM: 0}

    def forward(number: int, _frame: FrameType | None) -> None:
        if number in counts:
            counts[signal.Signals(number)] += 1
        if not has_begun() or counts.get(signal.Signals(number), 0) >= _PATIENCE:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        send(number)

    with _handling(_FORWARDED, forward):
        yield


@contextmanager
def _handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ignored signals stay ignored: the caller wants it so."""
    previous = {number: signal.getsignal(number) for number in numbers}
    changed = [number for number, before in previous.items() if before is not signal.SIG_IGN]
    for number in changed:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, previous[number])
