"""How long work tells what it is doing: a bar on a terminal, JSON lines of a job, or nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by one thread at a time; must return quickly."""

    def start(self, step: str, total_bytes: int | None) -> None:
        """A step begins, such as "layer 2 of 5"; it ends when the next begins. `total_bytes` is None when unknown."""
        ...

    def advance(self, byte_count: int) -> None:
        """So many more bytes of the current step's total are done."""
        ...


class NoProgress:
    """Tells nobody."""

    def start(self, step: str, total_bytes: int | None) -> None:
        del step, total_bytes

    def advance(self, byte_count: int) -> None:
        del byte_count
