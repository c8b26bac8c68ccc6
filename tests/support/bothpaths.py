"""One store behind two servers in one thread: one that answers what it can on the fast path, one that never does."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from imaged.serving.chunkprotocol import FastPath
from imaged.serving.listening import accepting, listen
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.server import FAST, application

_DATE = re.compile(rb"\r\nDate: [^\r]*")
_REQUEST_ID = re.compile(rb"\r\nX-Request-Id: [^\r]*")


@dataclass(slots=True)
class BothPaths:
    """Their ports, and how many requests the first one answered fast."""

    fast: int = 0
    slow: int = 0
    answered_fast: int = 0

    def ask(self, port: int, parts: Sequence[bytes]) -> bytes:
        """All that comes back, to the end of the connection, for these bytes sent one part after another.

        Dates and the names of requests are taken out.
        """
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    client.sendall(part)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while data := client.recv(1 << 20):
                    answer += data
        return _REQUEST_ID.sub(b"", _DATE.sub(b"", answer))


@contextlib.contextmanager
def both_paths(store: Path, **options: Any) -> Iterator[BothPaths]:
    """Both serve until the end of the block."""
    found, started = BothPaths(), queue.SimpleQueue[object]()
    stop: asyncio.Event
    loop: asyncio.AbstractEventLoop

    async def run(listener: socket.socket, change: Callable[[FastPath], FastPath]) -> None:
        wanted = ServeOptions(store=str(store), **options)
        with ChunkStore.open(store) as opened:
            async with application(opened, wanted) as app, accepting(app, listener, change(app[FAST]), None):
                started.put(None)
                await stop.wait()

    async def both(fast: socket.socket, slow: socket.socket) -> None:
        nonlocal stop, loop
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        await asyncio.gather(
            run(fast, lambda path: _counting(path, found)), run(slow, lambda path: replace(path, gate=lambda *_: False))
        )

    with listen("127.0.0.1", 0) as fast, listen("127.0.0.1", 0) as slow:
        found.fast, found.slow = fast.getsockname()[1], slow.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(both(fast, slow)))
        thread.start()
        try:
            for _ in range(2):
                started.get(timeout=20)
            yield found
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(20)


def _counting(fast: FastPath, found: BothPaths) -> FastPath:
    def gate(authorization: str, peer: str, chunks: Sequence[ChunkId]) -> bool:
        allowed = fast.gate(authorization, peer, chunks)
        found.answered_fast += allowed
        return allowed

    return replace(fast, gate=gate)
