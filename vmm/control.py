"""Signals and window sizes for a command that runs in a guest, from wherever they come."""

from __future__ import annotations

import os
import struct
from types import TracebackType

from vmm.errors import AgentError

_CONTROL = struct.Struct(">c 2H")


class Control:
    """Signals and window sizes for a running `execute`; may be used from signal handlers and other threads."""

    def __init__(self) -> None:
        self._source, self._target = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def signal(self, number: int) -> None:
        """Sends it to the process group of the job (with a terminal, to the group in front)."""
        self._put(_CONTROL.pack(b"s", number, 0))

    def window(self, rows: int, columns: int) -> None:
        """The terminal has this size now."""
        self._put(_CONTROL.pack(b"w", rows, columns))

    def _put(self, message: bytes) -> None:
        try:
            os.write(self._target, message)
        except BlockingIOError as error:
            raise AgentError("13,000 signals wait for a guest that does not take them") from error

    def fileno(self) -> int:
        return self._source

    def take(self) -> list[tuple[bytes, int, int]]:
        """What was put since the last time: (b"s", number, 0) or (b"w", rows, columns)."""
        try:
            data = os.read(self._source, _CONTROL.size * 256)  # a pipe's writes of this size are atomic
        except BlockingIOError:
            return []
        return list(_CONTROL.iter_unpack(data))

    def close(self) -> None:
        os.close(self._source)
        os.close(self._target)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
