"""A chunk server that misbehaves as told: answers frames from a dict, through a list of faults."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from imaged.fetching.retry import RetryPolicy
from imaged.frame import Frame
from imaged.ids import ChunkId

FAST = RetryPolicy(total_s=2.0, first_wait_s=0.01, longest_wait_s=0.05)
Fault = Callable[["CrookedHandler", bytes], None]


class Crooked:
    """`faults` are used up one a request, then requests are answered as they should be. Counts requests and ids."""

    def __init__(self) -> None:
        self.chunks: dict[ChunkId, bytes] = {}
        self.faults: list[Fault] = []
        self.requests = 0
        self.asked: list[ChunkId] = []
        self.delay_s = 0.0
        self.lock = threading.Lock()
        self.url = ""

    def add(self, data: bytes) -> ChunkId:
        chunk = ChunkId.of(data)
        self.chunks[chunk] = data
        return chunk

    def frames(self, ids: list[ChunkId]) -> bytes:
        return b"".join(
            Frame.of(self.chunks[chunk]).pack() if chunk in self.chunks else Frame.missing(chunk).pack()
            for chunk in ids
        )


class CrookedHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    crooked: Crooked

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._serve([ChunkId.parse(self.path.rpartition("/")[2])])

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self._serve([ChunkId(raw[at : at + 32]) for at in range(0, len(raw), 32)])

    def _serve(self, ids: list[ChunkId]) -> None:
        crooked = self.crooked
        with crooked.lock:
            crooked.requests += 1
            crooked.asked += ids
            fault = crooked.faults.pop(0) if crooked.faults else None
        time.sleep(crooked.delay_s)
        body = crooked.frames(ids)
        if fault is not None:
            fault(self, body)
        elif len(ids) == 1 and ids[0] not in crooked.chunks:
            self.answer(404, b'{"error": "not here", "hint": ""}')
        else:
            self.answer(200, body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def refuse(status: int, **headers: str) -> Fault:
    return lambda handler, body: handler.answer(status, b'{"error": "no", "hint": "later"}', **headers)


def corrupt(handler: CrookedHandler, body: bytes) -> None:
    """The last byte of the answer is another."""
    handler.answer(200, body[:-1] + bytes([body[-1] ^ 1]))


def cut(handler: CrookedHandler, body: bytes) -> None:
    """The connection ends after half of the promised bytes."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True


def drop(handler: CrookedHandler, body: bytes) -> None:
    """No answer at all."""
    handler.close_connection = True


def nonsense(handler: CrookedHandler, body: bytes) -> None:
    handler.answer(200, b"<html>login here</html>" * 20)


class Stall:
    """Faults that answer when `release` is set: not at all before, or half of the body at once."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.held = threading.Semaphore(0)

    def whole(self, handler: CrookedHandler, body: bytes) -> None:
        self.held.release()
        self.release.wait(60)
        with contextlib.suppress(ConnectionError):
            handler.answer(200, body)

    def half(self, handler: CrookedHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        self.held.release()
        self.release.wait(60)
        handler.close_connection = True


def add(count: int, *servers: Crooked) -> list[ChunkId]:
    """Chunks that all of these servers have."""
    data = [os.urandom(9000) for _ in range(count)]
    for server in servers[1:]:
        server.chunks.update({ChunkId.of(part): part for part in data})
    return [servers[0].add(part) for part in data]


@contextlib.contextmanager
def crooked_server() -> Iterator[Crooked]:
    crooked = Crooked()
    handler = type("Handler", (CrookedHandler,), {"crooked": crooked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    crooked.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield crooked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
