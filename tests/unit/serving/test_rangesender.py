"""Parts of packs down a connection: at the reader's pace, and what happens when one can not be read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from imaged.chunkstore.pack import PackFile
from imaged.chunkstore.packranges import PackRanges
from imaged.serving.rangesender import RangeSender

DATA = random.Random(1).randbytes(6 << 20)


class Connection(asyncio.Protocol):
    """As ChunkProtocol: the sender hears of room, and of the end."""

    def __init__(self) -> None:
        self.sender: RangeSender | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def resume_writing(self) -> None:
        if self.sender is not None:
            self.sender.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.sender is not None:
            self.sender.stop(ConnectionResetError("gone"))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    for sock in (ours, theirs):
        sock.setblocking(False)
    transport, connection = await asyncio.get_running_loop().connect_accepted_socket(Connection, ours)
    try:
        yield connection, ours, theirs
    finally:
        transport.abort()
        theirs.close()
        await asyncio.sleep(0)


@pytest.fixture
def file(tmp_path: Path) -> PackFile:
    path = tmp_path / "pack"
    path.write_bytes(DATA)
    return PackFile(path)


def begin(connection: Connection, sock: socket.socket, plan: PackRanges) -> asyncio.Future[Exception | None]:
    """A sender that has to wait; what it says at its end."""
    ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    connection.sender = RangeSender(connection.transport, sock, plan, ended.set_result)
    assert not connection.sender.start()
    return ended


def plan_of(file: PackFile, *ranges: tuple[int, int]) -> PackRanges:
    return PackRanges([(file, start, end) for start, end in ranges], sum(end - start for start, end in ranges))


async def received(sock: socket.socket, byte_count: int) -> bytes:
    data = b""
    while len(data) < byte_count and (part := await asyncio.get_running_loop().sock_recv(sock, 50_000)):
        data += part
    return data


def test_ranges_come_in_order_however_slowly_they_are_read(file: PackFile) -> None:
    ranges = [(5_000_000, 5_300_001), (10, 20), (0, 4_700_000), (1, 2)]

    async def main() -> None:
        async with connected() as (connection, ours, theirs), asyncio.timeout(30):
            plan = plan_of(file, *ranges)
            ended = begin(connection, ours, plan)
            assert await received(theirs, plan.byte_count) == b"".join(DATA[start:end] for start, end in ranges)
            assert await ended is None

    asyncio.run(main())


@pytest.mark.parametrize("failing", ["pread", "sendfile"])
def test_a_pack_that_can_not_be_read_ends_the_answer(
    file: PackFile, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Whether the sender meets that as it sends, or as it waits for room."""

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    async def main() -> None:
        async with connected() as (connection, ours, theirs), asyncio.timeout(30):
            with monkeypatch.context() as patch:
                patch.setattr(os, failing, fail)
                ended = begin(connection, ours, plan_of(file, (0, len(DATA))))
                assert isinstance(await ended, OSError)
            assert len(await received(theirs, len(DATA))) < len(DATA)

    asyncio.run(main())


def test_a_pack_that_ends_too_soon_ends_the_answer(file: PackFile, tmp_path: Path) -> None:
    async def main() -> None:
        async with connected() as (connection, ours, theirs), asyncio.timeout(30):
            ended = begin(connection, ours, plan_of(file, (0, len(DATA))))
            os.truncate(tmp_path / "pack", 1 << 20)
            assert len(await received(theirs, len(DATA))) < len(DATA)
            assert isinstance(await ended, OSError)

    asyncio.run(main())
