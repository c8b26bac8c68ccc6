"""The life of one serving process on a listening socket: accept, drain, end."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from imaged.errors import PvisorError
from imaged.serving.acceptor import Acceptor
from imaged.serving.chunkprotocol import ChunkProtocol, FastPath
from imaged.serving.guard import allow_files
from imaged.serving.tls import ServerTls

_KEEPALIVE_S = 300.0
_SHUTDOWN_S = 10.0
_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; host "" is every address, port 0 a free one. PvisorError.

    Bound before anything else starts, so that the address is known, or refused, at once.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise PvisorError(f"can not listen on {host}:{port}: {why}", hint="such as 127.0.0.1:7878") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PvisorError(
            f"can not listen on {host}:{port}: {error.strerror}", hint="choose another with --listen"
        ) from error
    return listener


def base_url(listener: socket.socket, host: str, *, tls: bool = False) -> str:
    """Where a client finds what listens here; `host` is the name it was given, or ""."""
    address = listener.getsockname()
    shown = host or address[0]
    bracketed = f"[{shown}]" if ":" in shown else shown
    return f"{'https' if tls else 'http'}://{bracketed}:{address[1]}"


@asynccontextmanager
async def accepting(
    app: web.Application, listener: socket.socket, fast: FastPath, tls: ServerTls | None, *, processes: int = 1
) -> AsyncIterator[None]:
    """Requests are answered within the block. Leaving it closes idle connections, lets answers under way take ten
    seconds, and takes no new ones. `processes` listen on the socket, this one included."""
    runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    manager = runner.server
    assert manager is not None
    allow_files()
    acceptor = Acceptor(
        listener,
        lambda sock: ChunkProtocol(manager, fast, sock, keepalive_s=_KEEPALIVE_S),
        tls=lambda: None if tls is None else tls.context,
        processes=processes,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        stack.push_async_callback(acceptor.stop)
        await stack.enter_async_context(fast.guard.watching())
        if tls is not None:
            await stack.enter_async_context(tls.watching())
        gc.freeze()  # all that is alive now stays so: nobody shall wait while it is looked through for garbage
        acceptor.start()
        yield


async def until_stopped(stop: asyncio.Event, stopping: Callable[[], None], drain_s: float) -> None:
    """Until `stop` is set, and then for as long as those who ask /readyz need to notice; a second signal ends that."""
    await stop.wait()
    stopping()
    if drain_s > 0:
        stop.clear()
        try:
            await asyncio.wait_for(stop.wait(), drain_s)
        except TimeoutError:
            return
