"""Work on one thing at a time, and on different things at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock for each key, which is there while anybody holds it or waits for it. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def take(self, key: str) -> Iterator[None]:
        """Within the block nobody else has this key's turn."""
        with self._lock:
            turn, users = self._turns.get(key, (threading.Lock(), 0))
            self._turns[key] = turn, users + 1
        try:
            with turn:
                yield
        finally:
            with self._lock:
                turn, users = self._turns.pop(key)
                if users > 1:
                    self._turns[key] = turn, users - 1
