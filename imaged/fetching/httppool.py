"""HTTP/1.1 requests over kept-alive connections to one server: the least Python between a caller and the socket.

Not `http.client` or urllib3, because every cold read of a page waits for one request and their header parsing is most
of it: on loopback a 30 KB answer takes 0.46 ms here, 0.77 ms with http.client and 0.9 ms with urllib3 (medians of one
run, requests 2 ms apart). What a chunk server and the proxies before it send is all that is understood: lengths,
chunked bodies, bodies that end with the connection. Redirects and content encodings are not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from imaged.errors import InvalidNameError
from imaged.fetching.httpanswer import Answer, Wire
from imaged.fetching.httpcall import Call, HttpBrokenError, HttpCertificateError, HttpClosedError, describe

_CONNECT_TIMEOUT_S = 5.0
_MAX_IDLE = 16
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")


def _tls_context() -> Any:
    import ssl  # 5 ms that a daemon with a server in its own network starts without

    named = os.environ.get("SSL_CERT_FILE", "")
    if Path(named).is_fifo():  # OpenSSL would wait for somebody who writes to it, and all who fetch would wait with it
        raise InvalidNameError(f"SSL_CERT_FILE {named}: a pipe", hint="give a PEM file of authorities")
    return ssl.create_default_context()


class ConnectionPool:
    """Connections to one base URL. Threads may share it; a connection belongs to one request at a time."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._address, self._prefix, host, tls = _split(url)
        self._tail = f" HTTP/1.1\r\nHost: {host}\r\n"
        self._tls = _tls_context() if tls else None
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Wire] = []

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

    def _exchange(self, head: bytes, body: bytes, call: Call) -> tuple[Wire, Answer]:
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
                if call.cancelled or not (reused and isinstance(error, (ConnectionError, HttpClosedError))):
                    kind = HttpCertificateError if getattr(error, "verify_message", "") else HttpBrokenError
                    raise kind(describe(error)) from error

    def _take(self) -> Wire | None:
        """An idle connection that is still open, the most recently used first."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                wire = self._idle.pop()
            if wire.is_quiet:
                return wire
            wire.socket.close()

    def _connect(self, call: Call) -> Wire:
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

    def _connect_to(self, plain: socket.socket, address: Any, call: Call) -> Wire:
        _connect_within(plain, address, call)
        plain.settimeout(_CONNECT_TIMEOUT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            plain.settimeout(self._timeout_s)
            return Wire(plain)
        call.detach()
        wrapped = self._tls.wrap_socket(plain, server_hostname=self._address[0])
        try:
            call.attach(wrapped)
            wrapped.settimeout(self._timeout_s)
        except BaseException:
            wrapped.close()
            raise
        return Wire(wrapped)


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
