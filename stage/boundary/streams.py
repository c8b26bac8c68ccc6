"""The standard streams of a process that a program runs, in place of the program's own."""

from __future__ import annotations

import os
import select
from typing import Protocol

_PIECE_BYTES = 1 << 16


class Pump(Protocol):
    """Moves bytes while a process runs: a step whenever its descriptor polls ready, until it is done."""

    @property
    def done(self) -> bool: ...

    def interest(self) -> tuple[int, int]:
        """The descriptor and the poll event that the next step waits for."""

    def step(self) -> None:
        """One read or write that does not block."""

    def close(self) -> None:
        """Give the descriptor back; also when there was more to move."""


class Collect:
    """A pipe's output, kept."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._pieces: list[bytes] = []
        self.done = False

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)

    def interest(self) -> tuple[int, int]:
        return self._source, select.POLLIN

    def step(self) -> None:
        piece = os.read(self._source, _PIECE_BYTES)
        self._pieces.append(piece)
        self.done = not piece

    def close(self) -> None:
        self.done = True
        if self._source >= 0:
            os.close(self._source)
            self._source = -1


class Feed:
    """Bytes for a pipe; what the process does not read is lost."""

    def __init__(self, target: int, data: bytes) -> None:
        os.set_blocking(target, False)
        self._target, self._rest = target, memoryview(data)
        self.done = False

    def interest(self) -> tuple[int, int]:
        return self._target, select.POLLOUT

    def step(self) -> None:
        try:
            self._rest = self._rest[os.write(self._target, self._rest[:_PIECE_BYTES]) :] if self._rest else self._rest
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._rest = self._rest[:0]
        if not self._rest:
            self.close()  # the process sees the end

    def close(self) -> None:
        self.done = True
        if self._target >= 0:
            os.close(self._target)
            self._target = -1


class Streams:
    """Descriptors for a process's stdin, stdout and stderr (None is /dev/null), and the pumps that serve pipes of ours.

    For one run, by one thread.
    """

    def __init__(self, *, stdin: int | None = None, stdout: int | None = None, stderr: int | None = None) -> None:
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.pumps: list[Pump] = []
        self._far: list[int] = []

    def feed(self, data: bytes) -> None:
        """These bytes are its input."""
        self.stdin, target = os.pipe2(os.O_CLOEXEC)
        self._far.append(self.stdin)
        self.pumps.append(Feed(target, data))

    def collect(self) -> tuple[Collect, Collect]:
        """Its stdout and its stderr are kept."""
        outputs = []
        for _ in range(2):
            source, far = os.pipe2(os.O_CLOEXEC)
            self._far.append(far)
            outputs.append(Collect(source))
        self.stdout, self.stderr = self._far[-2:]
        self.pumps.extend(outputs)
        return outputs[0], outputs[1]

    def started(self) -> None:
        """The process has its own copies of the pipes' other ends: then their closing is noticed."""
        while self._far:
            os.close(self._far.pop())

    def close(self) -> None:
        """Give all pipes back."""
        self.started()
        for pump in self.pumps:
            pump.close()
