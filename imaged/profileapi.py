"""HTTP handlers for startup profiles."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from imaged import catalog
from imaged.blockimage import BlockImage
from imaged.chunkapi import Blocking, read_ids
from imaged.denser import Denser
from imaged.errors import FormatError, NotFoundError
from imaged.ids import ChunkId
from imaged.profile import Profile
from imaged.reach import belonging
from imaged.store import ChunkStore

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
        """GET profiles/IMAGE: as docs/formats/profile.md says; 404 when no run was recorded."""
        name = request.match_info["name"]
        raw = await self._blocking.run(self._raw, name)
        if raw is None:
            raise NotFoundError(f"image {name} has no profile", hint="the first `pvisor run` of it records one")
        return web.Response(body=raw, content_type=PROFILE_TYPE, headers={"Cache-Control": "no-cache"})

    def _raw(self, name: str) -> bytes | None:
        return self._store.profiles.raw(catalog.find(self._store, name).record.data)

    async def merge(self, request: web.Request) -> web.Response:
        """PUT profiles/IMAGE, ids in order of first touch: one recorded run is merged into the profile."""
        touched = await read_ids(request)
        profile = await self._blocking.run(self._merge, request.match_info["name"], touched)
        return web.json_response({"runs": profile.runs, "entries": len(profile.chunks)})

    def _merge(self, name: str, touched: Sequence[ChunkId]) -> Profile:
        """What is not of the image is left out. FormatError when that is all."""
        record = catalog.find(self._store, name).record
        data = record.data
        found = belonging(self._store, data, touched)
        known = frozenset((*found.leaves, *found.chunks))
        if not known:
            raise FormatError("profile", expected=f"chunks of image {name}, with their leaves", found="none of them")
        profile = self._store.profiles.merge(data, [chunk for chunk in touched if chunk in known])
        # What the next cold start fetches: worth the hardest compression, once.
        self._denser.add([*BlockImage.open(self._store, record.metadata).chunk_ids(), *found.leaves, *found.chunks])
        return profile
