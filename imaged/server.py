"""The chunk server: what a store holds, over HTTP. docs/http.md and /v1/openapi.json describe the interface."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from imaged.chunkapi import BadUploadError, Blocking, ChunkApi
from imaged.denser import Denser
from imaged.errors import (
    ChunkError,
    FormatError,
    InvalidNameError,
    NameTakenError,
    NotFoundError,
    PvisorError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from imaged.imageapi import ImageApi, SourceRefusedError
from imaged.jobs import Jobs
from imaged.measure import IncompleteError
from imaged.openapi import document
from imaged.profileapi import ProfileApi
from imaged.snapshotapi import SnapshotApi
from imaged.store import ChunkStore

log = logging.getLogger(__name__)
_BODY_LIMIT_BYTES = 4 << 20
_KEEPALIVE_S = 300.0
_SHUTDOWN_S = 10.0
_STATUS: tuple[tuple[type[PvisorError], int], ...] = (
    (NotFoundError, 404),
    (BadUploadError, 400),
    (FormatError, 400),
    (InvalidNameError, 400),
    (IncompleteError, 409),
    (NameTakenError, 409),
    (SourceRefusedError, 403),
    (StoreFullError, 507),
    (StoreReadOnlyError, 403),
    (StoreBusyError, 503),
)
"""The status of each error; the first that matches counts, anything else is 500."""
_DAMAGED_HINT = "at the server: `pvisor image verify NAME` drops damaged chunks; then upload or convert the image again"
_BROKEN_OFF = 499
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(
    store: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 7878,
    announce: Callable[[str], None],
) -> None:
    """Serve the store at `store` until SIGTERM or SIGINT; port 0 takes a free one, host "" is every address.

    `announce` gets the base URL once requests are accepted. On the signal there are no new connections, answers under
    way get ten seconds, conversions are stopped. StoreError; PvisorError when the address is not free.
    """
    with contextlib.closing(_listen(host, port)) as listener, ChunkStore.open(store) as opened:
        asyncio.run(_serve(opened, listener, host, announce))


async def _serve(store: ChunkStore, listener: socket.socket, host: str, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with application(store) as app:
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            address = listener.getsockname()
            shown = host or address[0]
            bracketed = f"[{shown}]" if ":" in shown else shown
            announce(f"http://{bracketed}:{address[1]}")
            await stop.wait()
            app[_STOPPING].set()
        finally:
            await runner.cleanup()


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that the address is known, or refused, before anything else starts."""
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
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PvisorError(
            f"can not listen on {host}:{port}: {error.strerror}", hint="choose another with --listen"
        ) from error
    return listener


@contextlib.asynccontextmanager
async def application(store: ChunkStore) -> AsyncIterator[web.Application]:
    """The app over one store, with its thread pool and jobs."""
    blocking, denser = Blocking(), Denser(store)
    try:
        async with Jobs(store.root) as jobs:
            chunks = ChunkApi(store, blocking)
            images = ImageApi(store, jobs, chunks, blocking)
            app = web.Application(middlewares=[_errors], client_max_size=_BODY_LIMIT_BYTES)
            app[_STOPPING] = asyncio.Event()
            app[_STORE], app[_BLOCKING] = store, blocking
            app.add_routes(chunks.routes())
            app.add_routes(images.routes())
            app.add_routes(SnapshotApi(store, chunks, blocking).routes())
            app.add_routes(ProfileApi(store, blocking, denser).routes())
            app.add_routes([web.get("/healthz", _healthz), web.get("/readyz", _readyz)])
            app.add_routes([web.get("/v1/openapi.json", _openapi)])
            yield app
    finally:
        blocking.close()
        denser.close()


_STOPPING = web.AppKey("stopping", asyncio.Event)
_STORE = web.AppKey("store", ChunkStore)
_BLOCKING = web.AppKey("blocking", Blocking)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as JSON {"error", "hint"}. An answer already begun is cut off instead, which a client notices."""
    try:
        return await handler(request)
    except PvisorError as error:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        if isinstance(error, ChunkError):
            log.error("%s %s: %s", request.method, request.path, error.message)
            return _error(status, f"the server's own store is damaged: {error.message}", _DAMAGED_HINT)
        if status >= 500 and not isinstance(error, StoreError):
            log.error("%s %s: %s", request.method, request.path, error.message)
        return _error(status, error.message, error.hint)
    except web.RequestPayloadError as error:
        return _error(400, f"request body: {error}", "send it whole, in the Content-Encoding that it states")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allowed = error.headers.get("Allow")
        return _error(error.status, error.reason, "see /v1/openapi.json", {"Allow": allowed} if allowed else {})
    except ConnectionError as error:
        log.info("%s %s: broken off: %s", request.method, request.path, error)
        if request.transport is not None:
            request.transport.abort()
        # Nobody gets this, but aiohttp answers an exception with a traceback in the log.
        return web.Response(status=_BROKEN_OFF)
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error(500, "the server failed to answer", "its log says why")


def _error(status: int, message: str, hint: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": message, "hint": hint}
    return web.json_response(body, status=status, headers={"Cache-Control": "no-store", **(headers or {})})


async def _healthz(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    """Whether requests should come here: the store answers and the server is not stopping."""
    if request.app[_STOPPING].is_set():
        return _error(503, "the server is stopping", "")
    await request.app[_BLOCKING].run(request.app[_STORE].df)
    return web.Response(text="ok\n")


async def _openapi(request: web.Request) -> web.Response:
    return web.json_response(document())
