"""HTTP/1.1 requests over kept-alive connections to one server: the least Python between a caller and the socket.

Not `http.client` or urllib3, because every cold read of a page waits for one request and their header parsing is most
of it: on loopback a 30 KB answer takes 0.46 ms here, 0.77 ms with http.client and 0.9 ms with urllib3 (medians of one
run, requests 2 ms apart). What a chunk server and the proxies before it send is all that is understood: lengths,
chunked bodies, bodies that end with the connection. Redirects and content encodings are not.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from imaged.errors import InvalidNameError

_CONNECT_TIMEOUT_S = 5.0
_MAX_IDLE = 16
_RECEIVE_BYTES = 256 << 10
_HEAD_LIMIT_BYTES = 64 << 10
_LINE_LIMIT_BYTES = 1024
_NO_BODY = frozenset({204, 304})
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_LENGTH = re.compile(rb"[0-9A-Fa-f]{1,15}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


class HttpBrokenError(Exception):
    """No connection, a broken one, a timeout, or bytes that are not HTTP."""


class HttpCertificateError(HttpBrokenError):
    """A certificate that is not accepted: another attempt will not change that."""


class _ClosedError(HttpBrokenError):
    """The server closed the connection before it answered anything."""


class Call:
    """One request as other threads see it: since when it is silent, and a way to end it.

    Times are those of `time.monotonic`, 0.0 for what has not happened. `fresh` asks for a connection that no request
    went over before: whoever asks again because a connection is dead must not get the next dead one. `longest_s` is
    how long the answer may take from its first byte on; it may be changed while it comes.
    """

    __slots__ = (
        "_lock",
        "_socket",
        "cancelled",
        "first_byte_s",
        "fresh",
        "heard_s",
        "longest_s",
        "received_bytes",
        "sent_s",
    )

    def __init__(self, *, fresh: bool = False, longest_s: float = math.inf) -> None:
        self.fresh = fresh
        self.longest_s = longest_s
        self.cancelled = False
        self.sent_s = self.first_byte_s = 0.0
        self.heard_s = time.monotonic()
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def cancel(self) -> None:
        """End the request: whoever waits for its answer gets an HttpBrokenError. Safe at any time, also afterwards."""
        with self._lock:
            self.cancelled = True
            if self._socket is not None:
                # The plain socket's: that of a TLS socket would take its state from under the thread that reads.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def attach(self, used: socket.socket) -> None:
        """This socket carries the request now. HttpBrokenError when the call was cancelled before."""
        with self._lock:
            if self.cancelled:
                raise HttpBrokenError("given up")
            self._socket = used

    def detach(self) -> None:
        """The socket is no longer this request's to end."""
        with self._lock:
            self._socket = None

    def sent(self) -> None:
        self.sent_s = self.heard_s = time.monotonic()

    def received(self, byte_count: int) -> None:
        """HttpBrokenError when the answer takes too long."""
        self.heard_s = time.monotonic()
        self.received_bytes += byte_count
        if not self.first_byte_s:
            self.first_byte_s = self.heard_s
        if self.heard_s - self.first_byte_s > self.longest_s:
            raise HttpBrokenError(f"an answer of more than {self.longest_s:.0f} s")


class _Wire:
    """A connected socket and what was received but not yet asked for. For one thread at a time."""

    __slots__ = ("_at", "_data", "call", "socket")

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.call: Call | None = None
        self._data = b""
        self._at = 0

    def _receive(self, size: int) -> bytes:
        data = self.socket.recv(size)
        if data and self.call is not None:
            self.call.received(len(data))
        return data

    def send(self, head: bytes, body: bytes) -> None:
        """In one piece when it is small, so that a request is one packet; the timeout is for each piece."""
        if len(body) < _RECEIVE_BYTES:
            self.socket.sendall(head + body)
            return
        self.socket.sendall(head)
        view = memoryview(body)
        for start in range(0, len(view), _RECEIVE_BYTES):
            self.socket.sendall(view[start : start + _RECEIVE_BYTES])

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only when the connection ends."""
        start, end = self._at, self._at + size
        if end <= len(self._data):
            self._at = end
            return self._data[start:end]
        parts = [self._data[start:]]
        missing = size - len(parts[0])
        self._data, self._at = b"", 0
        while missing > 0:
            data = self._receive(max(missing, _RECEIVE_BYTES))
            if not data:
                break
            if len(data) > missing:
                self._data, self._at = data, missing
                data = data[:missing]
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def read_until(self, mark: bytes, limit: int) -> bytes:
        """Up to and with `mark`. HttpBrokenError when it does not come within `limit` bytes."""
        data = self._data[self._at :]
        while (end := data.find(mark)) < 0:
            if len(data) > limit:
                raise HttpBrokenError(f"more than {limit} bytes where a head should end")
            more = self._receive(_RECEIVE_BYTES)
            if not more:
                raise HttpBrokenError("the answer was cut off") if data else _ClosedError("no answer")
            data += more
        self._data, self._at = data, end + len(mark)
        return data[: self._at]

    @property
    def is_quiet(self) -> bool:
        """Nothing is left over and the server has neither closed nor said anything."""
        if self._at < len(self._data):
            return False
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)


class Answer:
    """A response whose body is read piece by piece. For one thread."""

    __slots__ = ("_chunked", "_headers", "_left", "_wire", "keep_alive", "status")

    def __init__(self, wire: _Wire) -> None:
        """Receive the head. HttpBrokenError, OSError."""
        self._wire = wire
        self.status = 100
        while self.status < 200:
            version = self._read_head()
        self._chunked = self.header("transfer-encoding").lower() == "chunked"
        length = self.header("content-length")
        # Bytes left of the body, or of the chunk when chunked; None when the body ends with the connection.
        self._left: int | None = None
        if self.status in _NO_BODY:
            self._chunked, self._left = False, 0
        elif self._chunked:
            self._left = 0
        elif length:
            if _LENGTH.fullmatch(length) is None:
                raise HttpBrokenError(f"Content-Length {length[:40]!r}")
            self._left = int(length)
        self.keep_alive = version == b"HTTP/1.1" and self.header("connection").lower() != "close"

    def _read_head(self) -> bytes:
        lines = self._wire.read_until(b"\r\n\r\n", _HEAD_LIMIT_BYTES).split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
            raise HttpBrokenError(f"not HTTP: {lines[0][:80]!r}")
        self.status = int(rest[:3])
        self._headers = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(b":")
            self._headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
        return version

    def header(self, name: str) -> str:
        """By lower-case name; "" when it is not there."""
        return self._headers.get(name, "")

    def retry_after_s(self, longest_s: float) -> float:
        """What Retry-After asks for in seconds, bounded; 0 when it says nothing we read."""
        text = self.header("retry-after")
        return min(float(text), longest_s) if text.isascii() and text.isdigit() else 0.0

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only where the body really ends. HttpBrokenError when it is cut off."""
        try:
            if self._chunked:
                return self._read_chunked(size)
            if self._left is None:
                return self._wire.read(size)
            wanted = min(size, self._left)
            data = self._wire.read(wanted)
        except OSError as error:
            raise HttpBrokenError(_describe(error)) from error
        self._left -= len(data)
        if len(data) < wanted:
            raise HttpBrokenError(f"the answer was cut off, {self._left} bytes short")
        return data

    def _read_chunked(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size and self._chunked:
            if not self._left:
                self._next_chunk()
                continue
            data = self._wire.read(min(size, self._left))
            if not data:
                raise HttpBrokenError("the answer was cut off within a chunk")
            parts.append(data)
            size -= len(data)
            self._left -= len(data)
            if not self._left and self._wire.read(2) != b"\r\n":
                raise HttpBrokenError("a chunk that does not end where it says")
        return b"".join(parts)

    def _next_chunk(self) -> None:
        """Read a chunk's size; after the last chunk the body is over and `_chunked` is off."""
        line = self._wire.read_until(b"\r\n", _LINE_LIMIT_BYTES)
        size = line[:-2].partition(b";")[0].strip()
        if _CHUNK_LENGTH.fullmatch(size) is None:
            raise HttpBrokenError(f"chunk size {line[:40]!r}")
        self._left = int(size, 16)
        if self._left == 0:
            while self._wire.read_until(b"\r\n", _HEAD_LIMIT_BYTES) != b"\r\n":
                pass
            self._chunked = False

    def finish(self) -> None:
        """Nothing may follow; HttpBrokenError otherwise."""
        if not self.is_over and self.read(1):
            raise HttpBrokenError("bytes after the end of the answer")

    @property
    def is_over(self) -> bool:
        """Whether the body was read to its end, so that the connection can carry another request."""
        return not self._chunked and self._left == 0


def _tls_context() -> Any:
    import ssl  # 5 ms that a daemon with a server in its own network starts without

    return ssl.create_default_context()


class ConnectionPool:
    """Connections to one base URL. Threads may share it; a connection belongs to one request at a time."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._address, self._prefix, host, tls = _split(url)
        self._tail = f" HTTP/1.1\r\nHost: {host}\r\n"
        self._tls = _tls_context() if tls else None
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[_Wire] = []

    def close(self) -> None:
        """Close the idle connections; those in use close when their request ends."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.socket.close()

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], *, call: Call | None = None
    ) -> Iterator[Answer]:
        """Send, and give the answer once its head is there. HttpBrokenError.

        An idle connection that the server has closed meanwhile is replaced at once and does not count as a failure.
        Through `call` other threads may watch and end the request.
        """
        call = call or Call()
        head = [method, " ", self._prefix, path, self._tail]
        head += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body is not None:
            head.append(f"Content-Length: {len(body)}\r\n")
        head.append("\r\n")
        wire, answer = self._exchange("".join(head).encode("ascii"), body or b"", call)
        try:
            yield answer
        except BaseException:
            call.detach()
            wire.socket.close()
            raise
        call.detach()
        wire.call = None
        if answer.is_over and answer.keep_alive and not call.cancelled:
            with self._lock:
                if len(self._idle) < _MAX_IDLE:
                    self._idle.append(wire)
                    return
        wire.socket.close()

    def _exchange(self, head: bytes, body: bytes, call: Call) -> tuple[_Wire, Answer]:
        while True:
            if call.cancelled:
                raise HttpBrokenError("given up")
            wire = None if call.fresh else self._take()
            reused = wire is not None
            try:
                if wire is None:
                    wire = self._connect(call)
                else:
                    call.attach(wire.socket)
                wire.call = call
                wire.send(head, body)
                call.sent()
                return wire, Answer(wire)
            except (OSError, HttpBrokenError) as error:
                call.detach()
                if wire is not None:
                    wire.socket.close()
                if call.cancelled or not (reused and isinstance(error, (ConnectionError, _ClosedError))):
                    kind = HttpCertificateError if getattr(error, "verify_message", "") else HttpBrokenError
                    raise kind(_describe(error)) from error

    def _take(self) -> _Wire | None:
        """An idle connection that is still open, the most recently used first."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                wire = self._idle.pop()
            if wire.is_quiet:
                return wire
            wire.socket.close()

    def _connect(self, call: Call) -> _Wire:
        """To the first address of the host that answers."""
        failure: OSError = OSError("its name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM):
            plain = socket.socket(family, kind, protocol)
            try:
                return self._connect_to(plain, address, call)
            except OSError as error:
                call.detach()
                plain.close()
                failure = error
            except BaseException:
                call.detach()
                plain.close()
                raise
        raise failure

    def _connect_to(self, plain: socket.socket, address: Any, call: Call) -> _Wire:
        _connect_within(plain, address, call)
        plain.settimeout(_CONNECT_TIMEOUT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            plain.settimeout(self._timeout_s)
            return _Wire(plain)
        call.detach()
        wrapped = self._tls.wrap_socket(plain, server_hostname=self._address[0])
        try:
            call.attach(wrapped)
            wrapped.settimeout(self._timeout_s)
        except BaseException:
            wrapped.close()
            raise
        return _Wire(wrapped)


def _connect_within(plain: socket.socket, address: Any, call: Call) -> None:
    """Connect within the timeout, or until the call is cancelled. OSError, HttpBrokenError.

    The call gets the socket only once it is connecting: what is shut down before that connects all the same.
    """
    plain.setblocking(False)
    number = plain.connect_ex(address)
    call.attach(plain)
    if number == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(plain, select.POLLOUT)
        if not poll.poll(_CONNECT_TIMEOUT_S * 1000):
            raise TimeoutError
        number = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise OSError(number, os.strerror(number))
    call.attach(plain)


def _split(url: str) -> tuple[tuple[str, int], str, str, bool]:
    """Address, prefix of all paths, Host header and whether it is TLS, all ASCII. InvalidNameError."""
    try:
        parts = urlsplit(url)
        port, name = parts.port, (parts.hostname or "").encode("idna").decode("ascii")
        prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
    except ValueError:
        port, name = 0, ""
    if port == 0 or _HOST.fullmatch(name) is None or parts.scheme not in ("http", "https"):
        raise InvalidNameError(f"server {url!r} is not an http:// or https:// URL", hint="such as http://HOST:PORT")
    tls = parts.scheme == "https"
    bracketed = f"[{name}]" if ":" in name else name
    return (name, port or (443 if tls else 80)), prefix, bracketed if port is None else f"{bracketed}:{port}", tls


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if refused := getattr(error, "verify_message", ""):
        return f"its certificate is not accepted: {refused}"
    if (reason := getattr(error, "reason", None)) and isinstance(error, OSError):
        return f"no TLS connection: {str(reason).lower().replace('_', ' ')}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
