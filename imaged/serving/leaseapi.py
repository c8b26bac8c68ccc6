"""HTTP handlers for leases: a client's uploads on their way to a name, and what a node has open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from imaged.chunkstore.lease import KEEPS_LIMIT, LONGEST_TTL_S, LeaseState
from imaged.chunkstore.store import ChunkStore
from imaged.collection.holding import unsafe
from imaged.collection.rollinglease import RollingLease
from imaged.errors import FormatError, StoreError
from imaged.ids import ChunkId
from imaged.serving.access import grant, require, view
from imaged.serving.blocking import Blocking
from imaged.serving.chunkapi import read_json
from imaged.serving.repeating import repeating
from imaged.serving.tokens import Scope

HEADER = "Pvisor-Lease"
TTL_S = 600.0
_EXPIRE_S = 60.0
log = logging.getLogger(__name__)


class LeaseApi:
    """The handlers under /v1/leases of one store, and what other handlers ask about leases."""

    def __init__(self, store: ChunkStore, blocking: Blocking) -> None:
        self._store, self._blocking = store, blocking
        self._rolling = RollingLease(store)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/leases", self.new),
            web.put("/v1/leases/{id}", self.renew),
            web.delete("/v1/leases/{id}", self.end),
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While requests are answered: lets go of the server's own lease when there have been no uploads for long."""
        try:
            async with repeating(lambda: asyncio.to_thread(self._rolling.expire), _EXPIRE_S, "leases"):
                yield
        finally:
            await asyncio.to_thread(self._rolling.close)

    @contextlib.contextmanager
    def naming(self, store: ChunkStore, lease: str | None) -> Iterator[None]:
        """In a thread that looks whether all of something is here, and names it: under the client's lease, else under
        the server's own, so that what was said to be here before is here. StoreError."""
        with store.relying(lease) as state:
            if state is not None and state.epoch is not None:
                yield
                return
            with self._rolling.borrowed() as own, self._store.leases.under(own.epoch):
                yield

    @contextlib.contextmanager
    def relying(self, store: ChunkStore, lease: str | None) -> Iterator[None]:
        """As `naming`, in a thread that tells a client what is here, or stores for it. Where no lease can be had, as on
        a full disk, nothing that is condemned is said to be here."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.naming(store, lease))
            except StoreError as error:
                log.warning("%s", error.message)
            yield

    async def new(self, request: web.Request) -> web.Response:
        """POST leases {"holder", "keeps", "ttl_s"}: with `keeps`, ids of images and snapshots, these stay; without,
        what the client is told that is here, and what it uploads, stays until it has named it."""
        body = await read_json(request)
        holder, keeps, ttl_s = body.get("holder"), _keeps(body), _ttl_s(body)
        if not isinstance(holder, str) or not holder.isprintable() or not 0 < len(holder) <= 200:
            raise FormatError("field holder", expected="1 to 200 printable characters", found=repr(holder)[:80])
        if keeps is None:
            require(request, Scope.WRITE)
        store, namespace = view(request, self._store), grant(request).namespace
        return web.json_response(
            await self._blocking.run(self._grant, store, holder, keeps, ttl_s, namespace), status=201
        )

    def _grant(
        self, store: ChunkStore, holder: str, keeps: Sequence[ChunkId] | None, ttl_s: float, namespace: str | None
    ) -> dict[str, Any]:
        kept = None if keeps is None else [record for record in keeps if store.has(record)]
        state = self._store.leases.grant(holder, keeps=kept, ttl_s=ttl_s, namespace=namespace)
        return _document(state, self._gone(keeps, kept, frozenset(kept or ())))

    async def renew(self, request: web.Request) -> web.Response:
        """PUT leases/ID {"keeps", "ttl_s"}: it lasts longer from now on, and keeps these instead. 404 when it ended."""
        body = await read_json(request)
        store, namespace = view(request, self._store), grant(request).namespace
        return web.json_response(
            await self._blocking.run(
                self._renew, store, request.match_info["id"], _keeps(body), _ttl_s(body), namespace
            )
        )

    def _renew(
        self, store: ChunkStore, lease: str, keeps: Sequence[ChunkId] | None, ttl_s: float, namespace: str | None
    ) -> dict[str, Any]:
        kept = None if keeps is None else [record for record in keeps if store.has(record)]
        state, fresh = self._store.leases.renew(lease, keeps=kept, ttl_s=ttl_s, namespace=namespace)
        return _document(state, self._gone(keeps, kept, fresh))

    def _gone(
        self, keeps: Sequence[ChunkId] | None, kept: Sequence[ChunkId] | None, fresh: frozenset[ChunkId]
    ) -> list[ChunkId]:
        """What the client must not count on to stay; `fresh` is what its lease did not keep before."""
        if keeps is None or kept is None:
            return []
        held = frozenset(kept)
        return [record for record in keeps if record not in held] + unsafe(self._store, sorted(fresh))

    async def end(self, request: web.Request) -> web.Response:
        """DELETE leases/ID."""
        lease, namespace = request.match_info["id"], grant(request).namespace

        def revoke() -> bool:
            return self._store.leases.revoke(lease, namespace=namespace)

        return web.json_response({"ended": await self._blocking.run(revoke)})


def _document(state: LeaseState, gone: Sequence[ChunkId]) -> dict[str, Any]:
    return {"id": state.id, "expires_at": state.expires_at, "gone": [str(record) for record in gone]}


def _keeps(body: dict[str, Any]) -> list[ChunkId] | None:
    listed = body.get("keeps")
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise FormatError("field keeps", expected="a list of ids", found=repr(listed)[:80])
    if len(listed) > KEEPS_LIMIT:
        raise FormatError("field keeps", expected=f"at most {KEEPS_LIMIT} ids", found=f"{len(listed)}")
    return [ChunkId.parse(text) for text in dict.fromkeys(listed)]


def _ttl_s(body: dict[str, Any]) -> float:
    ttl_s = body.get("ttl_s", TTL_S)
    if not isinstance(ttl_s, int | float) or isinstance(ttl_s, bool) or not 1 <= ttl_s <= LONGEST_TTL_S:
        raise FormatError("field ttl_s", expected=f"1 to {LONGEST_TTL_S:.0f} seconds", found=repr(ttl_s)[:80])
    return float(ttl_s)
