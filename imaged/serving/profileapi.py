"""HTTP handlers for startup profiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aiohttp import web

from imaged import catalog, snapshots
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import FormatError, NotFoundError
from imaged.ids import ChunkId
from imaged.profile import Profile
from imaged.reach import belonging
from imaged.serving.access import view
from imaged.serving.blocking import Blocking
from imaged.serving.chunkapi import read_ids
from imaged.serving.denser import Denser
from imaged.serving.throughstore import ThroughStore

PROFILE_TYPE = "application/vnd.pvisor.profile"


class ProfileApi:
    """The handlers under /v1/profiles of one store."""

    def __init__(self, store: ChunkStore, blocking: Blocking, denser: Denser) -> None:
        self._store = store
        self._denser = denser
        self._blocking = blocking

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/profiles/{name:.+}", self.one),
            web.put("/v1/profiles/{name:.+}", self.merge),
        ]

    async def one(self, request: web.Request) -> web.Response:
        """GET profiles/ID: as docs/formats/profile.md says; 404 when no run was recorded."""
        name = request.match_info["name"]
        raw = await self._blocking.run(_raw, view(request, self._store), name)
        if raw is None:
            raise NotFoundError(f"{name} has no profile", hint="its first start on a host records one")
        return web.Response(body=raw, content_type=PROFILE_TYPE, headers={"Cache-Control": "no-cache"})

    async def merge(self, request: web.Request) -> web.Response:
        """PUT profiles/ID, ids in order of first touch: one recorded run is merged into the profile."""
        touched = await read_ids(request)
        store = view(request, self._store)
        profile = await self._blocking.run(self._merge, store, request.match_info["name"], touched)
        return web.json_response({"runs": profile.runs, "entries": len(profile.chunks)})

    def _merge(self, store: ChunkStore, name: str, touched: Sequence[ChunkId]) -> Profile:
        """What is not of the image is left out. FormatError when that is all."""
        profiled = _profiled(store, name)
        found = belonging(store, profiled.block_image, touched)
        known = frozenset((*found.leaves, *found.chunks))
        if not known:
            raise FormatError("profile", expected=f"chunks of {name}, with their leaves", found="none of them")
        profile = store.profiles.merge(profiled.block_image, [chunk for chunk in touched if chunk in known])
        if isinstance(store, ThroughStore) and ChunkId.is_id(name):
            store.offer(ChunkId.parse(name), touched)
        if store.namespace is None:
            # What the next cold start fetches: worth the hardest compression, once. Not what a namespace holds, whose
            # frames tell nothing of who else has them: imaged/chunkstore/tenant.py.
            whole = profiled.whole
            more = BlockImage.open(store, whole).chunk_ids() if whole is not None else ()
            self._denser.add([*more, *found.leaves, *found.chunks])
        return profile


class _Profiled(NamedTuple):
    """The block image that a profile is of, and the one that every start fetches whole."""

    block_image: ChunkId
    whole: ChunkId | None


def _raw(store: ChunkStore, name: str) -> bytes | None:
    return store.profiles.raw(_profiled(store, name).block_image)


def _profiled(store: ChunkStore, text: str) -> _Profiled:
    """Of an image, or of a snapshot by its id: names may mean both. NotFoundError."""
    try:
        record = catalog.find(store, text).record
        return _Profiled(record.data, record.metadata)
    except NotFoundError:
        if not ChunkId.is_id(text):
            raise
    return _Profiled(snapshots.find(store, text).record.memory, None)
