"""How many waiting connections one process takes in a turn of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from imaged.serving.acceptor import Acceptor
from imaged.serving.listening import listen

WAITING = 40


@contextlib.contextmanager
def clients(listener: socket.socket, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as ends:
        for _ in range(count):
            ends.enter_context(socket.create_connection(listener.getsockname(), timeout=20))
        yield


async def turns(listener: socket.socket, processes: int) -> list[int]:
    """How many connections were taken in each turn in which one was, until all were."""
    made: list[socket.socket] = []

    def protocol(sock: socket.socket) -> asyncio.Protocol:
        made.append(sock)
        return asyncio.Protocol()

    acceptor = Acceptor(listener, protocol, tls=lambda: None, processes=processes)
    acceptor.start()
    taken: list[int] = []
    async with asyncio.timeout(20):
        while sum(taken) < WAITING:
            await asyncio.sleep(0)
            if len(made) > sum(taken):
                taken.append(len(made) - sum(taken))
    await acceptor.stop()
    return taken


@pytest.mark.parametrize(("processes", "expected"), [(1, [WAITING]), (2, [4] * 10)])
def test_who_listens_alone_takes_all_at_once(processes: int, expected: list[int]) -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as listener, clients(listener, WAITING):
        assert asyncio.run(turns(listener, processes)) == expected
