"""A registry that misbehaves on demand: a plain HTTP server over an OCI layout, with a queue of faults.

    with run_flaky() as server:
        server.serve(layout, "team/app")
        server.plan("/blobs/", cut(1000), status(503))
        ... server.source("team/app") ...

A planned fault is used up by the first request whose path contains its text; requests without a fault are answered
as a registry does, ranges included.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.oci import REF_NAME, digest, read_index


@dataclass(frozen=True)
class Content:
    """A manifest or blob."""

    data: bytes
    media_type: str


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]


class Handler(BaseHTTPRequestHandler):
    """What a fault gets: the request, and ways to answer it."""

    protocol_version = "HTTP/1.1"
    flaky: Flaky

    def do_GET(self) -> None:
        self.close_connection = False
        self.flaky.requests.append(Request(self.path, {key.lower(): value for key, value in self.headers.items()}))
        fault = self.flaky.take(self.path)
        content = self.flaky.content.get(self.path)
        if fault is not None:
            fault(self, content or Content(b"", ""))
        elif content is None:
            self.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"not here"}]}')
        else:
            self.serve(content)

    def serve(self, content: Content) -> None:
        """Answer as a registry does."""
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None:
            self.answer(200, content.data, {"Content-Type": content.media_type})
            return
        self.answer_range(content.data, int(asked[1]))

    def answer_range(self, data: bytes, start: int, *, stated: int | None = None) -> None:
        """206 with the bytes from `start` on, said to be from `stated` on."""
        first = start if stated is None else stated
        self.answer(206, data[start:], {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"})

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, length: int | None = None
    ) -> None:
        """Send this; `length` in place of the true Content-Length."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


Fault = Callable[[Handler, Content], None]


@dataclass
class Flaky:
    """The server. `content` maps paths to what is served, `requests` is what came in."""

    address: str
    content: dict[str, Content] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    _faults: list[tuple[str, Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, path_part: str, *faults: Fault) -> None:
        """Queue faults for requests whose path contains this."""
        self._faults += [(path_part, fault) for fault in faults]

    def forget_faults(self) -> None:
        """Drop what is still planned."""
        with self._lock:
            self._faults.clear()

    def take(self, path: str) -> Fault | None:
        """The next fault for this path, used up."""
        with self._lock:
            for at, (part, fault) in enumerate(self._faults):
                if part in path:
                    del self._faults[at]
                    return fault
        return None

    def serve(self, layout: Path, name: str) -> None:
        """Serve all images of a layout as tags of a repository."""
        for path in (layout / "blobs" / "sha256").iterdir():
            data = path.read_bytes()
            self.content[f"/v2/{name}/blobs/{digest(data)}"] = Content(data, "application/octet-stream")
        for one in read_index(layout)["manifests"]:
            self.add_manifest(name, (layout / "blobs" / one["digest"].replace(":", "/")).read_bytes(),
                              one["mediaType"], tag=one.get("annotations", {}).get(REF_NAME, "latest"))  # fmt: skip

    def add_manifest(self, name: str, raw: bytes, media_type: str, *, tag: str) -> None:
        """Serve a manifest by tag and by digest, and the manifests of an index by digest."""
        for reference in (tag, digest(raw)):
            self.content[f"/v2/{name}/manifests/{reference}"] = Content(raw, media_type)
        try:
            inner = json.loads(raw).get("manifests", [])
        except ValueError:
            return
        for one in inner:
            blob = self.content.get(f"/v2/{name}/blobs/{one['digest']}")
            if blob is not None:
                self.add_manifest(name, blob.data, one["mediaType"], tag=one["digest"])

    def source(self, name: str) -> str:
        """The pVisor source name of an image here."""
        return f"docker://{self.address}/{name}"

    def paths(self, part: str) -> list[Request]:
        """Requests whose path contains this."""
        return [request for request in self.requests if part in request.path]


def status(code: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Fault:
    """An error answer."""
    return lambda handler, content: handler.answer(code, body, headers)


def redirect(url: str, code: int = 307) -> Fault:
    """Send the client elsewhere; `{path}` in the URL is the request's path."""
    return lambda handler, content: handler.answer(code, b"moved", {"Location": url.replace("{path}", handler.path)})


def cut(after: int) -> Fault:
    """Promise what was asked for and close the connection after this many bytes of it."""

    def fault(handler: Handler, content: Content) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        data = content.data
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if asked else {}
        handler.answer(206 if asked else 200, data[start : start + after], headers, length=len(data) - start)
        handler.close_connection = True

    return fault


def drop(handler: Handler, content: Content) -> None:
    """Close the connection without a word."""
    handler.close_connection = True


def whole(handler: Handler, content: Content) -> None:
    """Ignore the range: 200 with everything."""
    handler.answer(200, content.data)


def wrong_range(start: int) -> Fault:
    """206 with other bytes than asked for, and saying so."""
    return lambda handler, content: handler.answer_range(content.data, start)


def instead(data: bytes, *, chunked: bool = False, media_type: str = "application/octet-stream") -> Fault:
    """200 with these bytes in place of the right ones; `chunked` states no length."""

    def fault(handler: Handler, content: Content) -> None:
        if not chunked:
            handler.answer(200, data, {"Content-Type": media_type})
            return
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")

    return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what several tests are about; anything else is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def run_flaky(address: str = "127.0.0.1") -> Iterator[Flaky]:
    """The server, on a free port of an address of this host."""
    server = _Server((address, 0), BaseHTTPRequestHandler)
    flaky = Flaky(f"{address}:{server.server_address[1]}")
    flaky.content["/v2/"] = Content(b"{}", "application/json")
    server.RequestHandlerClass = type("FlakyHandler", (Handler,), {"flaky": flaky})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield flaky
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
