"""Connections that take their time: heads and bodies that trickle in, answers that nobody reads, too many at once.

A client that sends one byte a minute, or reads none, costs it nothing and the server a connection and its buffers. All
connections are looked at every other second, so that a request pays for none of this with a timer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiohttp.web_protocol import RequestHandler

from imaged.serving.repeating import repeating

log = logging.getLogger(__name__)
HEAD_S = 10.0
"""From the first byte of a request to the end of its head."""
SILENT_S = 60.0
"""A new connection may say nothing for so long: balancers and browsers connect ahead of what they ask for."""
PACE_S = 30.0
PACE_BYTES = 32 << 10
"""A body, or an answer, that makes less than this in so many seconds is given up."""
HANDSHAKE_S = 10.0
"""For TLS, before there is a connection that this module could watch."""
CONNECTIONS = 8192
"""Of one process; beyond it the longest idle one makes room."""
_SPARE_FILES = 512
"""What else a process has open: packs, the index, pipes of jobs."""
_LOOK_S = 2.0
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Content-Length: 60\r\nConnection: close\r\n\r\n"
    b'{"error": "too many connections", "hint": "try again later"}'
)
_LATE_HEAD = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_TCP_INFO_BYTES = 192
_UNACKED = struct.Struct("=I")
_UNACKED_AT = 24
_ACKED = struct.Struct("=Q")
_ACKED_AT = 120
_NOT_SENT_AT = 144
"""Of struct tcp_info (include/uapi/linux/tcp.h): segments under way, bytes acknowledged, bytes that wait."""


class _Pace:
    """Whether a count of bytes grows as fast as it must, while it must."""

    __slots__ = ("_count", "_since_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._count = 0

    def is_lagging(self, now_s: float, count: int) -> bool:
        if not self._since_s:
            self._since_s, self._count = now_s, count
        elif now_s - self._since_s >= PACE_S:
            if count - self._count < PACE_BYTES:
                return True
            self._since_s, self._count = now_s, count
        return False

    def rest(self) -> None:
        """Nothing is due now."""
        self._since_s = 0.0


class Guarded(RequestHandler):
    """A connection that a `Guard` watches."""

    def __init__(self, *arguments: Any, guard: Guard, **options: Any) -> None:
        # Bodies are not inflated: that is done as they come in, before anybody has asked who sent them.
        super().__init__(*arguments, auto_decompress=False, **options)
        self._guard = guard
        self._opened_s = self._head_since_s = self._heard_s = 0.0
        self._received_bytes = 0
        self._body, self._answer = _Pace(), _Pace()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened_s = self._heard_s = self._loop.time()
        self._guard.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._guard.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if data:  # else only what was held back is parsed
            self.heard(len(data), incomplete=self.is_idle)

    def heard(self, byte_count: int, *, incomplete: bool) -> None:
        """So much has come, after which a request is `incomplete` that nobody works on yet."""
        self._received_bytes += byte_count
        self._heard_s = self._loop.time()
        self._head_since_s = (self._head_since_s or self._heard_s) if incomplete else 0.0

    @property
    def is_idle(self) -> bool:
        """No request has come whole that is not answered."""
        return self._current_request is None and not self._messages and not self._request_in_progress

    def overdue(self, now_s: float) -> str:
        """Why the connection must end, "" when it need not."""
        transport = self.transport
        if transport is None:
            return ""
        if self.is_idle:
            if self._head_since_s and now_s - self._head_since_s > HEAD_S:
                if transport.get_write_buffer_size() == 0:
                    transport.write(_LATE_HEAD)
                return f"a head that is not complete after {HEAD_S:.0f} s"
            if not self._received_bytes and now_s - self._opened_s > SILENT_S:
                return f"nothing was asked for {SILENT_S:.0f} s"
        if not self._is_body_due():
            self._body.rest()
        elif self._body.is_lagging(now_s, self._received_bytes):
            return f"less than {PACE_BYTES} bytes of a body in {PACE_S:.0f} s"
        waiting, acknowledged_bytes = _sending(transport)
        if not waiting:
            self._answer.rest()
        elif self._answer.is_lagging(now_s, acknowledged_bytes):
            return f"less than {PACE_BYTES} bytes of an answer read in {PACE_S:.0f} s"
        return ""

    def _is_body_due(self) -> bool:
        """Whether the client owes more of a body that we are ready to take."""
        request = self._current_request
        return request is not None and not request.content.is_eof() and not self._reading_paused

    def end(self) -> None:
        """Drop the connection, with what was not sent yet."""
        if self.transport is not None:
            self.transport.abort()


def _sending(transport: asyncio.Transport) -> tuple[bool, int]:
    """Whether anything waits to be read by the client, and how many bytes its host has taken so far."""
    waiting = transport.get_write_buffer_size() > 0
    sock = transport.get_extra_info("socket")
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        waiting |= any(_UNACKED.unpack_from(info, at)[0] for at in (_UNACKED_AT, _NOT_SENT_AT))
        return waiting, int(_ACKED.unpack_from(info, _ACKED_AT)[0])
    except (OSError, AttributeError, struct.error):  # no TCP, or it is just closing
        return waiting, 0


class Guard:
    """Watches the connections of one event loop."""

    def __init__(self, *, connections: int = CONNECTIONS) -> None:
        self._limit = connections
        self._open: dict[Guarded, None] = {}

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def opened(self, connection: Guarded) -> None:
        """One more; when that is too many, the one that has been idle for longest goes, or else this one."""
        if len(self._open) >= self._limit and not self._make_room():
            assert connection.transport is not None
            connection.transport.write(_BUSY)
            connection.force_close()
            return
        self._open[connection] = None

    def lost(self, connection: Guarded) -> None:
        self._open.pop(connection, None)

    def _make_room(self) -> bool:
        idle = [one for one in self._open if one.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one._heard_s)
        self._open.pop(oldest)
        oldest.force_close()
        return True

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Look after the connections until the end of the block."""
        clock = asyncio.get_running_loop().time
        return repeating(lambda: self.look(clock()), _LOOK_S, "guard")

    def look(self, now_s: float) -> None:
        """End what is overdue."""
        for connection in list(self._open):
            why = connection.overdue(now_s)
            if why:
                log.info("connection of %s ended: %s", _peer(connection), why)
                connection.end()


def _peer(connection: Guarded) -> str:
    name = connection.peername
    return str(name[0]) if isinstance(name, tuple) else "a client"


def allow_files(connections: int = CONNECTIONS) -> None:
    """Let this process have so many connections open, as far as its hard limit goes: the soft one is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
