"""A job's stdin on its way into the guest: what the agent has given credit for, and no more."""

from __future__ import annotations

import errno
import os
from collections import deque

from vmm.agentproto import PAYLOAD_MAX, STDIN_WINDOW

_PIECE_BYTES = 65536


class Input:
    """A job's stdin: bytes or a descriptor, and the credit to send it."""

    def __init__(self, stdin: int | bytes | None) -> None:
        self.credit = STDIN_WINDOW
        self.descriptor = stdin if isinstance(stdin, int) else None
        self._rest = memoryview(stdin) if isinstance(stdin, bytes) else memoryview(b"")
        self._open = stdin is not None

    @property
    def wants(self) -> bool:
        return self._open and self.credit > 0

    def take(self) -> deque[bytes | memoryview]:
        """What to send now; an empty piece is the end."""
        pieces: deque[bytes | memoryview] = deque()
        if self.descriptor is not None:
            data = memoryview(_read(self.descriptor, min(self.credit, _PIECE_BYTES)))
            at_end = not data
        else:
            data, self._rest = self._rest[: self.credit], self._rest[self.credit :]
            at_end = not self._rest
        self.credit -= len(data)
        pieces.extend(data[start : start + PAYLOAD_MAX] for start in range(0, len(data), PAYLOAD_MAX))
        if at_end:
            pieces.append(b"")
            self._open = False
        return pieces


def _read(descriptor: int, size_bytes: int) -> bytes:
    try:
        return os.read(descriptor, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EBADF, errno.EISDIR):
            raise
        return b""  # a terminal that hung up, or no stdin at all
