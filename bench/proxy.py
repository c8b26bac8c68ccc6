"""A proxy on loopback that makes a network of it: delay of each request, a bandwidth, and a count of what passes.

Every contender of a benchmark reaches its origin through it: registry, chunk server, file server. The delay holds a
request back once its head is here, on each connection by itself; the bandwidth is that of answers and is shared by
all connections. Opening a connection costs nothing, and connections are kept as long as both ends like.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_BUFFER_BYTES = 256 << 10
_PACED_BYTES = 64 << 10
_HEAD_LIMIT_BYTES = 64 << 10
_CATCH_UP_S = 0.01
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/json\r\nContent-Length: 19\r\n\r\n"
_REFUSED_BODY = b'{"error":"refused"}'


class Link(NamedTuple):
    """What lies between client and origin; no limit of bandwidth when it is 0."""

    name: str
    delay_s: float
    bytes_per_s: float


LINKS = (
    Link("no delay", 0.0, 0.0),
    Link("+20 ms per request", 0.02, 0.0),
    Link("+5 ms per request, 200 Mbit/s", 0.005, 200e6 / 8),
)


@dataclass(frozen=True, slots=True)
class Counted:
    """What passed: the first line of each request, bytes to the origin and from it, heads included."""

    lines: tuple[str, ...] = ()
    up_bytes: int = 0
    down_bytes: int = 0

    @property
    def requests(self) -> int:
        return len(self.lines)

    @property
    def wire_bytes(self) -> int:
        return self.up_bytes + self.down_bytes


class Proxy:
    """The client of a proxy process: `addresses` are where each origin is to be reached, as HOST:PORT."""

    def __init__(self, process: subprocess.Popen[str], addresses: Sequence[str]) -> None:
        self._process = process
        self.addresses = tuple(addresses)

    def use(self, link: Link) -> None:
        """From here on this link; counting starts anew."""
        self._ask({"delay_s": link.delay_s, "bytes_per_s": link.bytes_per_s})

    def counted(self) -> Counted:
        """Since `use`."""
        answer = self._ask({})
        return Counted(tuple(answer["lines"]), answer["up_bytes"], answer["down_bytes"])

    def settled(self, quiet_s: float = 0.2, timeout_s: float = 60.0) -> Counted:
        """As `counted`, once nothing has passed for a while."""
        deadline = time.monotonic() + timeout_s
        before = self.counted()
        while True:
            time.sleep(quiet_s)
            now = self.counted()
            if now == before or time.monotonic() > deadline:
                return now
            before = now

    def _ask(self, document: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(document) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def run_proxy(origins: Sequence[str], *, refuse: str = "") -> Iterator[Proxy]:
    """A proxy in front of origins (HOST:PORT). Requests that begin with `refuse` get 403 and are not counted."""
    argv = [sys.executable, "-m", "bench.proxy", json.dumps({"origins": list(origins), "refuse": refuse})]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Proxy(process, json.loads(process.stdout.readline()))
        finally:
            process.terminate()


@dataclass(slots=True)
class _Traffic:
    """The link in use and what has passed. Threads share it."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    lines: list[str] = field(default_factory=list)
    up_bytes: int = 0
    down_bytes: int = 0
    free_at_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, line: str, size: int) -> None:
        with self.lock:
            self.lines.append(line)
            self.up_bytes += size

    def up(self, size: int) -> None:
        with self.lock:
            self.up_bytes += size

    def down(self, size: int) -> None:
        """Count bytes of an answer and wait until they would have come through."""
        with self.lock:
            self.down_bytes += size
            if not self.bytes_per_s:
                return
            now_s = time.monotonic()
            # A sleep that lasts too long is made up for by the next ones, within this many seconds.
            self.free_at_s = max(self.free_at_s, now_s - _CATCH_UP_S) + size / self.bytes_per_s
            wait_s = self.free_at_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)

    def handle(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """A new link, or the counts."""
        with self.lock:
            if wanted:
                self.delay_s, self.bytes_per_s = wanted["delay_s"], wanted["bytes_per_s"]
                self.lines, self.up_bytes, self.down_bytes, self.free_at_s = [], 0, 0, 0.0
            return {"lines": self.lines, "up_bytes": self.up_bytes, "down_bytes": self.down_bytes}


@dataclass(frozen=True, slots=True)
class _Connection:
    client: socket.socket
    origin: socket.socket
    traffic: _Traffic
    refuse: str

    def run(self) -> None:
        with contextlib.suppress(OSError), self.client, self.origin:
            answers = threading.Thread(target=self._answers, daemon=True)
            answers.start()
            try:
                self._requests()
            finally:
                with contextlib.suppress(OSError):
                    self.origin.shutdown(socket.SHUT_WR)
            answers.join()

    def _requests(self) -> None:
        """Requests one by one: a head, and as many bytes as it says."""
        held = bytearray()
        while True:
            while (end := held.find(b"\r\n\r\n")) < 0:
                data = self.client.recv(_BUFFER_BYTES)
                if not data or len(held) > _HEAD_LIMIT_BYTES:
                    return
                held += data
                if not held[:1].isalpha():
                    # podman tries TLS first; the origin's refusal sends it on to plain HTTP.
                    self.traffic.up(len(held))
                    self.origin.sendall(held)
                    return
            head = bytes(held[: end + 4])
            del held[: end + 4]
            if _CHUNKED.search(head):
                raise OSError("a request in chunks, which no contender sends")
            found = _LENGTH.search(head)
            room = int(found[1]) if found else 0
            line = head.split(b"\r\n", 1)[0].decode(errors="replace")
            if self.refuse and line.startswith(self.refuse):
                self._body(held, room, None)
                self.client.sendall(_REFUSED + _REFUSED_BODY)
                continue
            self.traffic.request(line, len(head))
            if self.traffic.delay_s:
                time.sleep(self.traffic.delay_s)
            body = bytes(held[:room])
            del held[: len(body)]
            self.traffic.up(len(body))
            self.origin.sendall(head + body)
            self._body(held, room - len(body), self.origin)

    def _body(self, held: bytearray, room: int, target: socket.socket | None) -> None:
        """The rest of a request's body, to the origin or nowhere."""
        while room:
            data = bytes(held[:room]) if held else self.client.recv(min(room, _BUFFER_BYTES))
            if not data:
                raise OSError("a request breaks off")
            del held[: len(data)]
            room -= len(data)
            if target is not None:
                self.traffic.up(len(data))
                target.sendall(data)

    def _answers(self) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        with contextlib.suppress(OSError):
            while size := self.origin.recv_into(buffer[: _PACED_BYTES if self.traffic.bytes_per_s else _BUFFER_BYTES]):
                self.traffic.down(size)
                self.client.sendall(buffer[:size])
            self.client.shutdown(socket.SHUT_WR)


def _accept(listener: socket.socket, origin: str, traffic: _Traffic, refuse: str) -> None:
    host, _, port = origin.rpartition(":")
    while True:
        client, _ = listener.accept()
        try:
            target = socket.create_connection((host, int(port)), timeout=10)
        except OSError:
            client.close()
            continue
        target.settimeout(None)
        for end in (client, target):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_Connection(client, target, traffic, refuse).run, daemon=True).start()


def main() -> None:
    """Print the addresses as one line of JSON; then a line of JSON for each line of JSON on stdin."""
    options = json.loads(sys.argv[1])
    traffic = _Traffic()
    addresses = []
    for origin in options["origins"]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
        accept = threading.Thread(target=_accept, args=(listener, origin, traffic, options["refuse"]), daemon=True)
        accept.start()
    print(json.dumps(addresses), flush=True)
    for line in sys.stdin:
        print(json.dumps(traffic.handle(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
