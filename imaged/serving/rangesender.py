"""Sends ranges of pack files down a connection with sendfile, at the pace of who reads them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from imaged.chunkstore.packranges import PackRanges

log = logging.getLogger(__name__)
_TURN_BYTES = 4 << 20
"""What one connection may send before the others have their turn."""
_POKE_BYTES = 4096
"""What is given to the transport when the socket is full: it says when there is room again."""


class RangeSender:
    """Sends one plan; for the thread of an event loop.

    The transport must be plain TCP, and its protocol pass `resume_writing` and `connection_lost` on, and cut clients
    that read nothing. While this sends nobody else writes. `ended` is called once, with what went wrong or None; never
    from within `start`.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        sock: socket.socket,
        plan: PackRanges,
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._transport, self._sock, self._plan, self._ended = transport, sock, plan, ended
        self._loop = asyncio.get_running_loop()
        self._at = 0
        self._offset = plan.ranges[0][1] if plan.ranges else 0
        self._over = self._limited = False

    def start(self) -> bool:
        """Whether all of it went out at once; then `ended` is not called."""
        return self._try()

    def resume(self) -> None:
        """The transport's buffer is empty."""
        if not self._over and self._try():
            self._end(None)

    def stop(self, error: Exception) -> None:
        """The connection is gone."""
        self._end(error)

    def _try(self) -> bool:
        """Send what may be sent now; whether that was all. What fails ends the connection."""
        try:
            if not self._transport.get_write_buffer_size():
                return self._go()
            self._wait()
        except OSError as error:
            self._transport.abort()
            self._loop.call_soon(self._end, error)
        return False

    def _go(self) -> bool:
        ranges, fd, room = self._plan.ranges, self._sock.fileno(), _TURN_BYTES
        while self._at < len(ranges):
            file, _, end = ranges[self._at]
            while self._offset < end:
                if room <= 0:
                    self._loop.call_soon(self.resume)
                    return False
                try:
                    sent = os.sendfile(fd, file.fd, self._offset, min(end - self._offset, room))
                except BlockingIOError:
                    self._wait()
                    return False
                if not sent:
                    raise OSError(f"a pack ends at {self._offset}, its index says {end}")
                self._offset += sent
                room -= sent
            self._at += 1
            if self._at < len(ranges):
                self._offset = ranges[self._at][1]
        return True

    def _wait(self) -> None:
        """Give the transport a little to write: asyncio tells when that is out, which is when there is room."""
        if not self._limited:
            self._transport.set_write_buffer_limits(high=0)
            self._limited = True
        if not self._transport.get_write_buffer_size():
            file, _, end = self._plan.ranges[self._at]
            piece = os.pread(file.fd, min(_POKE_BYTES, end - self._offset), self._offset)
            self._offset += len(piece)
            self._transport.write(piece)
        if not self._transport.get_write_buffer_size():
            self._loop.call_soon(self.resume)

    def _end(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        if self._limited:
            self._transport.set_write_buffer_limits()
        self._ended(error)
