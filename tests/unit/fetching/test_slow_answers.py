"""Servers that never fall silent and never come to an end, and one that is only slow. Time is told, not waited for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from imaged.errors import UpstreamError
from imaged.fetching import httpcall, upstream
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import ChunkId

QUICK = RetryPolicy(total_s=0.1, first_wait_s=0.01, longest_wait_s=0.02)
DATA = [os.urandom(4096) for _ in range(6)]
CHUNKS = [ChunkId.of(part) for part in DATA]
FRAMES = [Frame.of(part).pack() for part in DATA]
Answer = Callable[[BaseHTTPRequestHandler], Iterator[bytes]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What requests take for the time: `ahead_s` more than it is."""
    told = SimpleNamespace(ahead_s=0.0)
    monkeypatch.setattr(httpcall, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + told.ahead_s))
    return told


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[HttpUpstream]:
    """A server that answers every request with these pieces, for as long as somebody reads them."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.close_connection = True
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with contextlib.suppress(ConnectionError):
                    for piece in answer(self):
                        self.wfile.write(piece)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with HttpUpstream(f"http://127.0.0.1:{server.server_address[1]}", retry=QUICK) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("kind", ["continue", "body"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda server: server.images(),
        lambda server: server.jobs(),
        lambda server: server.collect(),
        lambda server: server.missing(CHUNKS),
        lambda server: server.upload([Frame.of(DATA[0])]),
        lambda server: server.profile(CHUNKS[0]),
        lambda server: server.get(CHUNKS[0]),
        lambda server: list(server.frames(CHUNKS)),
    ],
    ids=["images", "jobs", "collect", "missing", "upload", "profile", "chunk", "batch"],
)
def test_an_answer_without_end_is_given_up(
    clock: SimpleNamespace, kind: str, ask: Callable[[HttpUpstream], object]
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> Iterator[bytes]:
        if kind == "body":
            yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
            if "chunks" in handler.path:
                yield FRAMES[0][:40]
        for _ in range(60_000):
            clock.ahead_s += 5
            time.sleep(0.001)  # else all is sent before the first of it is read
            yield b"HTTP/1.1 100 Continue\r\n\r\n" if kind == "continue" else b"\0"

    with answering(drip) as server, pytest.raises(UpstreamError, match=r"more than \d+ s"):
        ask(server)


def test_a_batch_may_take_as_long_as_its_frames_need(clock: SimpleNamespace) -> None:
    """However little the link carries: each frame is waited for by itself, and who reads them may take his time."""
    wanted = threading.Semaphore()

    def slowly(handler: BaseHTTPRequestHandler) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % sum(map(len, FRAMES))
        for frame in FRAMES:
            assert wanted.acquire(timeout=60)
            clock.ahead_s += upstream.FRAME_S - 60
            yield frame

    with answering(slowly) as server:
        taken = []
        for frame in server.frames(CHUNKS):
            taken.append(frame.open())
            clock.ahead_s += upstream.FRAME_S * 2
            wanted.release()
    assert taken == DATA
