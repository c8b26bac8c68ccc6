"""When a temporary stage is removed: before its command returns, or beside a program that has its result already."""

from __future__ import annotations

import threading
from collections.abc import Callable

from imaged.errors import PvisorError

Work = Callable[[], None]
Disposal = Callable[[Work], None]

_MOST = 4
"""Removals at once. Who runs stages faster than they are removed does the next removal itself, so that few are left."""
_free = threading.BoundedSemaphore(_MOST)
_threads: set[threading.Thread] = set()


def at_once(work: Work) -> None:
    """Now, in the calling thread."""
    work()


def aside(work: Work) -> None:
    """In a thread, which the interpreter waits for at its exit. What fails there is left to the next sweep."""
    if not _free.acquire(blocking=False):
        work()
        return

    def run() -> None:
        try:
            work()
        except (OSError, PvisorError) as error:
            import logging  # not on the way of `pvisor run`

            logging.getLogger(__name__).warning("a temporary stage stays until the next start: %s", error)
        finally:
            _threads.discard(thread)
            _free.release()

    thread = threading.Thread(target=run, name="stage-removal")
    _threads.add(thread)
    try:
        thread.start()
    except RuntimeError:  # no thread to be had, or the interpreter is ending
        _threads.discard(thread)
        _free.release()
        work()


def wait() -> None:
    """Until what was put aside before this call is removed."""
    for thread in tuple(_threads):
        thread.join()
