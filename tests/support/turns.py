"""Tests of several processes take turns with the few that need the host to themselves."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Two lock files in a directory that all processes of a test run share.

    Whoever wants to be alone keeps the others waiting at the gate, so that they can not go on passing the room to each
    other. Released by hand: a process that a test left behind has the files open, too.
    """

    def __init__(self, directory: Path) -> None:
        self._gate, self._room = directory / "turns.gate", directory / "turns.room"

    @contextlib.contextmanager
    def among_others(self) -> Iterator[None]:
        with contextlib.ExitStack() as room:
            with _locked(self._gate, fcntl.LOCK_SH):
                room.enter_context(_locked(self._room, fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with _locked(self._gate, fcntl.LOCK_EX), _locked(self._room, fcntl.LOCK_EX):
            yield


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, kind)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
