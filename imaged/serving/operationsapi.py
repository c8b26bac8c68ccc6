"""HTTP handlers for who operates a server: is it alive, is it ready, what has it done."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

from aiohttp import web

from imaged.chunkstore.store import ChunkStore
from imaged.errors import StoreError, StoreFullError, StoreReadOnlyError
from imaged.serving.blocking import Blocking
from imaged.serving.bootapi import choice
from imaged.serving.httperrors import error_response
from imaged.serving.metrics import CONTENT_TYPE, Metrics
from imaged.serving.repeating import repeating

_LOOKED_S = 1.0
_ROOM_BYTES = 32 << 20
"""Less than this is full: an upload may bring as much before it is refused."""
_TAKE_S = 1.0


class OperationsApi:
    """The handlers of /healthz, /readyz and /metrics. For one event loop."""

    def __init__(self, store: ChunkStore, blocking: Blocking, metrics: Metrics) -> None:
        self._store, self._blocking, self._metrics = store, blocking, metrics
        self._stopping = False
        self._lock, self._rendering = asyncio.Lock(), asyncio.Lock()
        self._looked_s = -_LOOKED_S
        self._reads: StoreError | None = None
        self._writes: StoreError | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/healthz", self.alive),
            web.get("/readyz", self.ready),
            web.get("/metrics", self.numbers),
        ]

    def stop(self) -> None:
        """From now on nothing more should come here."""
        self._stopping = True

    async def alive(self, request: web.Request) -> web.Response:
        """GET healthz: the process answers."""
        return web.Response(text="ok\n")

    async def ready(self, request: web.Request) -> web.Response:
        """GET readyz: requests should come here: the store can be read, and written unless `?for=reads` is all that is
        asked for, and the server is not stopping."""
        reads_only = choice(request, "for", "reads") is not None
        if self._stopping:
            return error_response(503, "the server is stopping", "")
        async with self._lock:
            # Anybody may ask, and as often as he likes.
            if time.monotonic() >= self._looked_s + _LOOKED_S:
                self._reads, self._writes = await self._blocking.run(self._look)
                self._looked_s = time.monotonic()
        problem = self._reads or (None if reads_only else self._writes)
        if problem is not None:
            return error_response(503, problem.message, problem.hint)
        return web.Response(text="ok\n" if self._writes is None else f"ok, for reads: {self._writes.message}\n")

    def _look(self) -> tuple[StoreError | None, StoreError | None]:
        """What stands against reading and what against writing."""
        try:
            self._store.df()
            self._store.probe()
        except StoreError as error:
            return error, error
        try:
            _require_room(self._store)
        except StoreError as error:
            return None, error
        return None, None

    async def numbers(self, request: web.Request) -> web.Response:
        """GET metrics."""
        async with self._rendering:
            self._metrics.take()
            body = await self._blocking.run(self._metrics.render)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    @contextlib.asynccontextmanager
    async def reporting(self) -> AsyncIterator[None]:
        """Within the block the other processes of this server know this one's numbers."""
        try:
            async with repeating(self._metrics.take, _TAKE_S, "metrics"):
                yield
        finally:
            with contextlib.suppress(OSError):  # without a supervisor its directory goes too
                self._metrics.take()


def _require_room(store: ChunkStore) -> None:
    """StoreFullError, StoreReadOnlyError, StoreError when the directory is gone."""
    try:
        disk = os.statvfs(store.root)
    except OSError as error:
        raise StoreError(f"store {store.root}: {error.strerror}") from error
    if store.readonly or disk.f_flag & os.ST_RDONLY or not os.access(store.root, os.W_OK):
        raise StoreReadOnlyError(f"store {store.root} can not be written", hint="remount it, or look at its owner")
    if (free := disk.f_bavail * disk.f_frsize) < _ROOM_BYTES:
        raise StoreFullError(
            f"store {store.root}: {free >> 20} MiB are free", hint="`pvisor store gc` there, or a larger disk"
        )
