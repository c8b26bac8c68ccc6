"""Slow and silent clients of a real server, whose clock is put forward instead of waited for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from imaged.serving import guard as module
from imaged.serving.guard import HEAD_S, PACE_BYTES, PACE_S, SILENT_S, Guard
from imaged.serving.listening import accepting, listen
from imaged.serving.server import FAST, application
from tests.support.synthetic import add_image

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server in this loop."""

    def __init__(self, address: tuple[str, int], guard: Guard, chunks: list[ChunkId]) -> None:
        self.address, self.guard, self.chunks = address, guard, chunks
        self._ahead_s = 0.0
        self._clients: list[asyncio.StreamWriter] = []

    async def connect(self, *, receive_bytes: int = 0) -> Client:
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        client = await asyncio.open_connection(sock=sock, limit=1024 if receive_bytes else 1 << 16)
        self._clients.append(client[1])
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()

    async def later(self, seconds: float) -> None:
        """So much time passes for the guard, which then looks."""
        await settle()
        self._ahead_s += seconds
        self.guard.look(asyncio.get_running_loop().time() + self._ahead_s)


def test_the_limits_are_those_of_the_specification() -> None:
    limits = (HEAD_S, module._LOOK_S, PACE_BYTES, PACE_S, module.CONNECTIONS)
    assert limits == (10, 2, 32 << 10, 30, 8192)


async def settle() -> None:
    """What was sent has come."""
    await asyncio.sleep(0.05)


async def ended(client: Client) -> bytes:
    """What came before the end of the connection; TimeoutError when it does not end."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(client[0].read(-1), 5)
    return b""


async def is_open(client: Client) -> bool:
    client[1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    return (await asyncio.wait_for(client[0].readline(), 5)).startswith(b"HTTP/1.1 200")


@contextlib.asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Served]:
    with contextlib.closing(listen("127.0.0.1", 0)) as listener, ChunkStore.open(path / "store") as store:
        image = add_image(store, "a:1", chunks=120)
        store.flush()
        chunks = [chunk for chunk, _ in store.index.chunks()]
        assert image.id in chunks
        async with application(store) as app, accepting(app, listener, app[FAST], None):
            served = Served(listener.getsockname(), app[FAST].guard, chunks)
            try:
                yield served
            finally:
                served.close()


def run(path: Path, test: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(path) as served:
            await test(served)

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/images HTTP/1.1\r\nHost: x\r\nX-",
        b"GET /v1/chunks/",
        b"POST /v1/chunks/batch HTTP/1.1\r\nContent-Type: application/octet-stream\r\nContent-Length: 64\r\n\r\nab",
    ],
)
def test_a_head_that_trickles_in_is_not_waited_for(tmp_path: Path, sent: bytes) -> None:
    async def test(served: Served) -> None:
        client, other = await served.connect(), await served.connect()
        assert await is_open(other)
        client[1].write(sent[:-1])
        await served.later(HEAD_S / 2)
        client[1].write(sent[-1:])
        await served.later(HEAD_S / 2 + 1)
        if b"batch" in sent:  # its head has come whole: what is missing is the body
            await served.later(PACE_S)
        await ended(client)
        await settle()
        assert served.guard.open_connections == 1

    run(tmp_path, test)


def test_a_connection_that_asks_nothing_ends_and_one_that_asked_may_rest(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        silent, quick, rested = [await served.connect() for _ in range(3)]
        assert await is_open(rested)
        quick[1].write(f"GET /v1/chunks/{served.chunks[0]} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await quick[0].readline()).startswith(b"HTTP/1.1 200")
        await served.later(SILENT_S + 1)
        assert await ended(silent) == b""
        await settle()
        assert served.guard.open_connections == 2

    run(tmp_path, test)


def test_a_body_must_go_on(tmp_path: Path) -> None:
    head = b"PUT /v1/chunks HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"

    async def test(served: Served) -> None:
        slow, good = await served.connect(), await served.connect()
        slow[1].write(head + b"pvF1")
        good[1].write(head)
        frame = b"pvF1" + bytes(4) + (1 << 20).to_bytes(4, "little") * 2 + bytes(32)
        good[1].write(frame)
        await served.later(0)
        for _ in range(3):
            slow[1].write(b"\0" * 4)
            good[1].write(bytes(PACE_BYTES + 1000))
            await served.later(PACE_S)
        await ended(slow)
        await settle()
        assert served.guard.open_connections == 1

    run(tmp_path, test)


@pytest.mark.parametrize("path", ["fast", "aiohttp"])
def test_an_answer_must_be_read(tmp_path: Path, path: str) -> None:
    """The fast path sends from the pack files, past asyncio: its progress is the kernel's to tell."""

    async def test(served: Served) -> None:
        body = b"".join(served.chunks * 10)
        extra = b"" if path == "fast" else b"Cache-Control: no-cache\r\n"
        request = b"POST /v1/chunks/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
        request += extra + b"Content-Length: %d\r\n\r\n" % len(body)
        stuck, reading = [await served.connect(receive_bytes=4096) for _ in range(2)]
        for client in (stuck, reading):
            client[1].write(request + body)
            assert (await client[0].readline()).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.3)  # until what the sockets take is in them
        await served.later(0)
        for _ in range(3):
            for _ in range(40):
                await reading[0].read(4096)
            await served.later(PACE_S)
        await settle()
        assert served.guard.open_connections == 1
        assert not reading[0].at_eof()

    run(tmp_path, test)


def test_the_longest_idle_connection_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        served.guard._limit = 3
        first, second, third = [await served.connect() for _ in range(3)]
        for client in (second, first, third):
            assert await is_open(client)
        late = await served.connect()
        assert await is_open(late)
        await ended(second)
        # When all are at work nobody makes room.
        for client in (first, third, late):
            client[1].write(b"PUT /v1/chunks HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        await settle()
        refused = await served.connect()
        assert (await ended(refused)).startswith(b"HTTP/1.1 503")
        assert served.guard.open_connections == 3

    run(tmp_path, test)


def test_the_answer_to_too_many_is_whole() -> None:
    head, body = module._BUSY.split(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
