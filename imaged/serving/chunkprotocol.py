"""One connection to the chunk server: requests for chunks that are simply there are answered at once, others by
aiohttp.

A read of a lazily mounted image waits for one `GET /v1/chunks/ID` or `POST /v1/chunks/batch`. aiohttp takes a quarter
of a millisecond of CPU for a request, looking up the chunk and sending it a third of that (`bench/serve.py`). So a
complete, plainly written request of these two, on a connection with nothing else in progress, for chunks that the page
cache has, is answered here. Only answers with status 200 are made here, and they are byte for byte those of aiohttp; of
whatever is not certain aiohttp gets every byte, and answers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from binascii import unhexlify
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aiohttp.abc import AbstractAccessLogger
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import BaseRequest, Server, StreamResponse

from imaged.chunkstore.packranges import PackPlanner, PackRanges
from imaged.errors import FormatError, StoreError
from imaged.frame import FRAME_TYPE
from imaged.ids import ChunkId
from imaged.serving.guard import Guard, Guarded
from imaged.serving.rangesender import RangeSender
from imaged.serving.requesthead import HEAD_LIMIT_BYTES, body_bytes, plain_headers
from imaged.serving.traffic import OTHER, ROUTE, Traffic

log = logging.getLogger(__name__)
_GET, _POST = b"GET /v1/chunks/", b"POST /v1/chunks/batch HTTP/1.1\r\n"
_ID_END = len(_GET) + 2 * ChunkId.SIZE_BYTES
_VERSION = b" HTTP/1.1\r\n"
_DIGITS = re.compile(rb"[0-9a-f]{64}")
_BATCH_HEAD = (f"HTTP/1.1 200 OK\r\nCache-Control: no-store\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: ").encode()
_AFTER_TAG = f'"\r\nContent-Type: {FRAME_TYPE}\r\nContent-Length: '.encode()
_HEAD_END = b"\r\n\r\n"
_BATCH_IDS = 256
"""A longer batch is looked up in a thread, a part at a time."""
_BATCH_BYTES = _BATCH_IDS * ChunkId.SIZE_BYTES
_UNKNOWN = -1
Gate = Callable[[str, str, Sequence[ChunkId]], bool]
"""(Authorization header, address of the client, chunks) -> whether it may have them, now. Counted when it may."""


@dataclass(frozen=True, slots=True)
class FastPath:
    """What the connections of one server share. `used` is told what was sent."""

    planner: PackPlanner
    gate: Gate
    traffic: Traffic
    used: Callable[[Sequence[ChunkId]], None]
    guard: Guard
    head: bytes
    """Of the answer for one chunk, up to its tag."""

    @staticmethod
    def head_of(immutable: str) -> bytes:
        """With this Cache-Control."""
        return f'HTTP/1.1 200 OK\r\nCache-Control: {immutable}\r\nETag: "'.encode()


def _last_headers() -> bytes:
    """From behind the Content-Length."""
    return _dated(rfc822_formatted_time())


@lru_cache(maxsize=1)
def _dated(date: str) -> bytes:
    return f"\r\nDate: {date}\r\nServer: {SERVER_SOFTWARE}\r\n\r\n".encode()


class _Timed(AbstractAccessLogger):
    """Has aiohttp note when a request began; `ChunkProtocol.log_access` does what is to be done then."""

    def log(self, request: BaseRequest, response: StreamResponse, time: float) -> None:
        """Never called."""


class ChunkProtocol(Guarded):
    """One connection. For the thread of its event loop."""

    def __init__(self, manager: Server, fast: FastPath, sock: socket.socket, *, keepalive_s: float) -> None:
        super().__init__(
            manager,
            guard=fast.guard,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=keepalive_s,
            access_log=log,
            access_log_class=_Timed,
        )
        self._fast, self._sock = fast, sock
        self._ranges_bytes = 0
        """Of the answer that aiohttp is giving, what went past it."""
        self._peer = ""
        self._left = 0
        """Of the request that aiohttp got last, what is still to come; _UNKNOWN when only aiohttp can tell."""
        self._part = bytearray()
        self._wanted = 0
        """The part of a batch request that is there, and the length of all of it."""
        self._sender: RangeSender | None = None
        self._sent: asyncio.Future[None] | None = None
        self._held: list[bytes] = []
        self._close_later = False

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._held.clear()
        if self._sender is not None:
            self._sender.stop(ConnectionResetError("the client is gone"))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sender is not None:
            self._sender.resume()

    def data_received(self, data: bytes) -> None:
        if not data:  # aiohttp parses what it held back
            super().data_received(data)
            return
        if self._sender is not None:
            self._held.append(data)
            self._pause_transport_reading()
            return
        if self._part:
            self._part += data
            if len(self._part) < self._wanted:
                self.heard(len(data), incomplete=True)
                return
            data = bytes(self._part)
            self._part.clear()
            if self._is_waiting() and len(data) == self._wanted and self._batch(data, data.find(_HEAD_END) + 4):
                return
        elif not self._left and self._is_waiting() and self._answered(data):
            return
        self._left = self._rest(data)
        super().data_received(data)

    # From aiohttp

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self._sender is None and not self._held

    def log_access(self, request: BaseRequest, response: StreamResponse, time: float | None) -> None:
        duration_s = self._loop.time() - time if time is not None else 0.0
        sent_bytes, self._ranges_bytes = response.body_length + self._ranges_bytes, 0
        self._fast.traffic.note(
            request.method,
            request.get(ROUTE, OTHER),
            request.path,
            response.status,
            request.content_length or 0,
            sent_bytes,
            duration_s,
            self._peer,
            response.headers.get("X-Request-Id", ""),
        )

    def log_exception(self, *args: Any, **kw: Any) -> None:
        error = kw.get("exc_info")
        if isinstance(error, HttpProcessingError):
            log.info("%s sent what is no request: %s", self._peer, error.message.splitlines()[0])
        else:
            super().log_exception(*args, **kw)

    # The end of a connection

    def close(self) -> None:
        if self._sender is not None:
            self._close_later = True
        else:
            super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        if self._sender is not None:
            if self._sent is None:
                self._sent = self._loop.create_future()
            await asyncio.wait([self._sent], timeout=timeout)
        await super().shutdown(timeout)

    def _process_keepalive(self) -> None:
        if self._sender is not None:
            self._keep()
        super()._process_keepalive()

    # Fast answers

    def _is_waiting(self) -> bool:
        """Whether aiohttp waits for a request, has none, and all that it answered is on its way."""
        waiter = self._waiter
        return (
            waiter is not None
            and not waiter.done()
            and not self._messages
            and not (self._close or self._force_close or self._upgraded)
            and self.transport is not None
            and not self.transport.get_write_buffer_size()
        )

    def _answered(self, data: bytes) -> bool:
        """Whether this was the beginning of a request, and is taken care of."""
        if data.startswith(_GET):
            return data.startswith(_VERSION, _ID_END) and data.endswith(_HEAD_END) and self._one(data)
        if data.startswith(_POST):
            end = data.find(_HEAD_END, 0, HEAD_LIMIT_BYTES) + 4
            if end < 4:
                return False
            headers = plain_headers(data[len(_POST) : end])
            if headers is None or not 0 < headers.content_length <= _BATCH_BYTES:
                return False
            wanted = end + headers.content_length
            if len(data) >= wanted:
                return len(data) == wanted and self._batch(data, end)
            self._part += data
            self._wanted = wanted
            self.heard(len(data), incomplete=True)
            return True
        return False

    def _one(self, data: bytes) -> bool:
        began = time.perf_counter()
        digits = data[len(_GET) : _ID_END]
        headers = plain_headers(data[_ID_END + len(_VERSION) :])
        if headers is None or headers.content_length >= 0 or _DIGITS.fullmatch(digits) is None:
            return False
        chunk = ChunkId(unhexlify(digits))
        fast = self._fast
        try:
            answer = fast.planner.frame(chunk, b"%b%b%b" % (fast.head, digits, _AFTER_TAG), _last_headers())
        except StoreError:
            return False
        if answer is None or not fast.gate(headers.authorization, self._peer, (chunk,)):
            return False
        assert self.transport is not None
        self.transport.write(answer)
        fast.used((chunk,))
        self._answered_whole(len(data))
        path = f"/v1/chunks/{digits.decode()}"
        spent_s = time.perf_counter() - began
        fast.traffic.note("GET", "/v1/chunks/{id}", path, 200, len(data), len(answer), spent_s, self._peer)
        return True

    def _batch(self, data: bytes, end: int) -> bool:
        began = time.perf_counter()
        headers = plain_headers(data[len(_POST) : end])
        if headers is None or headers.content_type != b"application/octet-stream" or not self._is_plain_tcp():
            return False
        fast = self._fast
        try:
            found = fast.planner.batch(data[end:])
        except (FormatError, StoreError):
            return False
        if found is None or not fast.gate(headers.authorization, self._peer, found[0]):
            return False
        chunks, plan = found
        head = b"%b%d%b" % (_BATCH_HEAD, plan.byte_count, _last_headers())

        def ended(error: Exception | None) -> None:
            status = 200 if error is None else 499
            sent = len(head) + plan.byte_count
            fast.traffic.note(
                "POST",
                "/v1/chunks/batch",
                "/v1/chunks/batch",
                status,
                len(data),
                sent,
                time.perf_counter() - began,
                self._peer,
            )
            fast.used(chunks)

        self._answered_whole(len(data))
        self._write_more_to_come(head)
        self._send(plan, ended)
        return True

    def _answered_whole(self, byte_count: int) -> None:
        """A request of so many bytes is taken care of."""
        self.heard(byte_count, incomplete=False)
        self._next_keepalive_close_time = self._heard_s + self._keepalive_timeout

    def _keep(self) -> None:
        """Count the time until an idle connection is closed from now."""
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout

    # Sending from packs

    def _is_plain_tcp(self) -> bool:
        return self.transport is not None and self.transport.get_extra_info("sslcontext") is None

    @property
    def sends_ranges(self) -> bool:
        """Whether `send_ranges` can be used."""
        return self._is_plain_tcp()

    async def send_ranges(self, plan: PackRanges) -> None:
        """A part of an answer of aiohttp's, after what it has written. ConnectionError when that is cut off."""
        done = self._loop.create_future()
        self._ranges_bytes += plan.byte_count

        def ended(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(ConnectionResetError(str(error)))

        self._send(plan, ended)
        await done

    def _write_more_to_come(self, head: bytes) -> None:
        """Nothing waits in the transport: the head goes into the packet of what follows it."""
        assert self.transport is not None
        try:
            sent = self._sock.send(head, socket.MSG_MORE)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = 0  # the transport meets the same, and says so
        if sent < len(head):
            self.transport.write(head[sent:])

    def _send(self, plan: PackRanges, ended: Callable[[Exception | None], None]) -> None:
        if self.transport is None:
            ended(ConnectionResetError("the client is gone"))
            return

        def over(error: Exception | None) -> None:
            self._sender = None
            ended(error)
            self._keep()
            if self._sent is not None and not self._sent.done():
                self._sent.set_result(None)
            if self._close_later:
                super(ChunkProtocol, self).close()
            elif self._held:
                self._go_on()

        self._sender = sender = RangeSender(self.transport, self._sock, plan, over)
        if sender.start():
            over(None)

    def _go_on(self) -> None:
        """With what came while an answer was sent."""
        held, self._held = self._held, []
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()
        for data in held:
            self.data_received(data)

    def _rest(self, data: bytes) -> int:
        """How much of a request is to come after `data`, of which aiohttp is given all."""
        if self._left == _UNKNOWN:
            return _UNKNOWN
        if self._left:
            return max(self._left - len(data), _UNKNOWN)
        end = data.find(_HEAD_END) + 4
        length = body_bytes(data, end) if end >= 4 else None
        if length is None:
            return _UNKNOWN
        return max(length - (len(data) - end), _UNKNOWN)
