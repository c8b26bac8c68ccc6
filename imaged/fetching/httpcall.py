"""One request as those see it who wait for it, watch it or end it; and how a request fails."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time


class HttpBrokenError(Exception):
    """No connection, a broken one, a timeout, or bytes that are not HTTP."""


class HttpCertificateError(HttpBrokenError):
    """A certificate that is not accepted: another attempt will not change that."""


class HttpClosedError(HttpBrokenError):
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

    def give(self, seconds: float) -> None:
        """From now on the answer may take so long."""
        now_s = time.monotonic()
        self.longest_s = now_s - (self.first_byte_s or now_s) + seconds

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


def describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if refused := getattr(error, "verify_message", ""):
        return f"its certificate is not accepted: {refused}"
    if (reason := getattr(error, "reason", None)) and isinstance(error, OSError):
        return f"no TLS connection: {str(reason).lower().replace('_', ' ')}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
