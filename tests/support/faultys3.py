"""moto as an S3 server with conditional PUT, which fails as a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.swift import S3Server

ACCESS_KEY, SECRET_KEY = "AKIAMOTOTESTER", "moto-secret-Yw93"
Environ = dict[str, Any]
Start = Callable[..., Any]
HANG_S = 30.0


@dataclass
class Faults:
    """`fault` says what becomes of a request, by its method, path and query: "503", "hang" (no answer until `release`),
    "late503" (done, and then refused), "cut" (half of the body, then the connection ends), "wrong" (other bytes), or ""
    for an honest answer.

    `requests` are all that came, as (method, path).
    """

    fault: Callable[[str, str, str], str] = lambda method, path, query: ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def always(self, what: str, *, method: str = "", path: str = "") -> None:
        """Every request of this method whose path has this text in it."""
        self.fault = lambda its, at, query: what if its.startswith(method) and path in at else ""

    def once(self, what: str, *, method: str = "", path: str = "", count: int = 1) -> None:
        """As `always`, for so many requests."""
        left = [count]

        def decide(its: str, at: str, query: str) -> str:
            if its.startswith(method) and path in at and left[0] > 0:
                left[0] -= 1
                return what
            return ""

        self.fault = decide

    def none(self) -> None:
        self.fault = lambda method, path, query: ""


@contextmanager
def run_faulty_s3(log: Path) -> Iterator[tuple[S3Server, Faults]]:
    """On a free loopback port, with nothing in it."""
    from moto.moto_api._internal import mock_random
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *arguments: Any) -> None:
            pass

    mock_random.seed(1)
    faults = Faults()
    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def serve(environ: Environ, start: Start) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        with lock:
            faults.requests.append((method, path))
            what = faults.fault(method, path, query)
        if what == "503":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = b"<Error><Code>SlowDown</Code><Message>not now</Message></Error>"
            start("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if what == "hang":
            faults.released.wait(HANG_S)
        if what == "late503":
            b"".join(app(environ, lambda *answer: None))
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        answer = b"".join(app(environ, start))
        if what == "cut":
            return _cut(answer)
        if what == "wrong" and answer:
            return [answer[: len(answer) // 2], bytes(byte ^ 255 for byte in answer[len(answer) // 2 :])]
        return [answer]

    server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield S3Server(f"http://127.0.0.1:{server.port}", ACCESS_KEY, SECRET_KEY, log), faults
    finally:
        faults.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _cut(answer: bytes) -> Iterator[bytes]:
    yield answer[: max(len(answer) // 2, 1)]
    raise ConnectionAbortedError("cut")
