"""A proxy before a chunk server that notes each request, and can hold back, change, cut off and spoil answers."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_BLOCK_BYTES = 1 << 16
_LEASES = "/v1/leases"
_SPOILED = "/v1/chunks"
Spoil = Callable[["ProxyHandler", bytes], None]


@dataclass(frozen=True, slots=True)
class Passed:
    """One request that went through. `ids` are those of a batch or a recorded run, as raw bytes."""

    method: str
    path: str
    body: bytes

    @property
    def ids(self) -> list[bytes]:
        return [self.body[at : at + 32] for at in range(0, len(self.body), 32)]


@dataclass
class Proxy:
    """Threads may share it. `body` gets each block of an answer's body, with its request and how many bytes went
    before, and gives the block that is sent; it may wait, and an exception cuts the answer off.

    `spoils` are used up one a request for chunks, each in place of the answer. Those that fall silent release `silent`
    and wait for `released`. Requests for leases are passed on and not noted: no start waits for one, and when it comes
    is left to chance.
    """

    url: str
    requests: list[Passed] = field(default_factory=list)
    body: Callable[[Passed, int, bytes], bytes] = lambda request, sent_bytes, block: block
    spoils: list[Spoil] = field(default_factory=list)
    silent: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def paths(self) -> list[str]:
        """Method and path of each, in order."""
        return [f"{request.method} {request.path}" for request in self.requests]

    def take(self, path: str) -> Spoil | None:
        """What becomes of this request."""
        with self.lock:
            return self.spoils.pop(0) if self.spoils and _SPOILED in path else None


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    target: tuple[str, int]

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Passed(self.command, self.path, body)
        if not self.path.startswith(_LEASES):
            self.proxy.requests.append(request)
        spoil = self.proxy.take(self.path)
        connection = http.client.HTTPConnection(*self.target, timeout=30)
        try:
            connection.request(self.command, self.path, body or None, dict(self.headers.items()))
            response = connection.getresponse()
            if spoil is not None:
                spoil(self, response.read())
                return
            self.send_response_only(response.status)
            for name, value in response.getheaders():
                self.send_header(name, value)
            self.end_headers()
            sent_bytes = 0
            while block := response.read1(_BLOCK_BYTES):
                self.wfile.write(self.proxy.body(request, sent_bytes, block))
                sent_bytes += len(block)
        finally:
            connection.close()

    def do_GET(self) -> None:
        self._pass()

    def do_PUT(self) -> None:
        self._pass()

    def do_POST(self) -> None:
        self._pass()

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, sent: int | None = None
    ) -> None:
        """Send this, of the body only the first `sent` bytes."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if sent is None else body[:sent])

    def log_message(self, format: str, *args: object) -> None:
        pass


def status(code: int, **headers: str) -> Spoil:
    """An error answer."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, body: handler.answer(code, b'{"error": "no", "hint": ""}', sent)


def wrong(handler: ProxyHandler, body: bytes) -> None:
    """One bit of the last payload is another."""
    handler.answer(200, body[:-1] + bytes([body[-1] ^ 1]))


def half_then_silence(handler: ProxyHandler, body: bytes) -> None:
    """Nothing more comes, and nobody hangs up."""
    handler.answer(200, body, sent=len(body) // 2)
    _fall_silent(handler)


def silence(handler: ProxyHandler, body: bytes) -> None:
    """No answer, and nobody hangs up."""
    del body
    _fall_silent(handler)


def _fall_silent(handler: ProxyHandler) -> None:
    handler.proxy.silent.release()
    handler.proxy.released.wait(120)
    handler.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client or server that went away is what some tests are about."""


@contextlib.contextmanager
def proxy(server_url: str) -> Iterator[Proxy]:
    """A proxy on a free port, for the block; at its end what is silent is let go."""
    server = _Server(("127.0.0.1", 0), BaseHTTPRequestHandler)
    made = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    parts = urlsplit(server_url)
    target = (parts.hostname or "", parts.port or 80)
    server.RequestHandlerClass = type("Handler", (ProxyHandler,), {"proxy": made, "target": target})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
