"""What signals do to a command that has something to put in order, or whose workload is somewhere else; and where that
workload's output goes."""

from __future__ import annotations

import os
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
def forwarding(send: Callable[[int], None]) -> Iterator[None]:
    """Signals go to the workload; the third Ctrl-C is one here, for a workload that does not mind."""
    interrupts = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts >= _PATIENCE:
                raise KeyboardInterrupt
        send(number)

    with _handling(_FORWARDED, forward):
        yield


def writer(fd: int) -> Callable[[bytes], None]:
    """Writes all it is given. BrokenPipeError when nobody reads it any more."""

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]

    return write


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
