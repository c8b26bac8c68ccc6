"""The answer of a server as it comes over a connection: head, lengths, chunked bodies."""

from __future__ import annotations

import re
import select
import socket

from imaged.fetching.httpcall import Call, HttpBrokenError, HttpClosedError, describe

_RECEIVE_BYTES = 256 << 10
_HEAD_LIMIT_BYTES = 64 << 10
_LINE_LIMIT_BYTES = 1024
_NO_BODY = frozenset({204, 304})
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_LENGTH = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Wire:
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
                raise HttpBrokenError("the answer was cut off") if data else HttpClosedError("no answer")
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

    def __init__(self, wire: Wire) -> None:
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
            raise HttpBrokenError(describe(error)) from error
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
