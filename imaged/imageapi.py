"""HTTP handlers for images and conversion jobs."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from aiohttp import web

from imaged import catalog
from imaged.bootapi import DamagedError, answer, choice, is_known, known
from imaged.bootview import BootView, BootViews
from imaged.chunkapi import Blocking, ChunkApi, read_id, read_json
from imaged.errors import ChunkError, FormatError, PvisorError
from imaged.ids import ChunkId
from imaged.jobs import Jobs
from imaged.measure import measure
from imaged.names import ImageName, SourceName
from imaged.oci.descriptor import Platform
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.refs import Ref
from imaged.store import ChunkStore

log = logging.getLogger(__name__)


class SourceRefusedError(PvisorError):
    """A source that this server does not convert for its clients."""


class ImageApi:
    """The handlers under /v1/images and /v1/jobs of one store."""

    def __init__(self, store: ChunkStore, jobs: Jobs, chunks: ChunkApi, blocking: Blocking) -> None:
        self._store = store
        self._jobs = jobs
        self._chunks = chunks
        self._blocking = blocking
        self._boot_views = BootViews(store)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/images", self.list_all),
            web.post("/v1/images", self.convert),
            web.get("/v1/images/{name:.+}", self.one),
            web.put("/v1/images/{name:.+}", self.publish),
            web.get("/v1/jobs/{id}", self.job),
        ]

    async def list_all(self, request: web.Request) -> web.Response:
        """GET images: all that have a name and a record that can be read; one damaged image hides no other."""
        return web.json_response({"images": await self._blocking.run(self._list)})

    def _list(self) -> list[dict[str, Any]]:
        found = []
        for name, ref in self._store.refs.items():
            try:
                found.append(_document(catalog.load(self._store, name, ref)))
            except (ChunkError, FormatError) as error:
                log.error("image %s is not listed: %s", name, error.message)
        return found

    async def one(self, request: web.Request) -> web.StreamResponse:
        """GET images/NAME: the image as JSON, or with ?view=boot as the frames that a first mount needs.

        With &profile=frame its startup profile comes first, in a frame of its own; with &profile=chunks the chunks that
        it names follow, too, for a client that has none of them.
        """
        view = choice(request, "view", "boot")
        profile = choice(request, "profile", "frame", "chunks")
        entry, boot = await self._blocking.run(self._find_view, request.match_info["name"], view, known(request))
        document = _document(entry)
        return await answer(request, self._chunks, document, boot, header="Pvisor-Image", profile=profile)

    def _find_view(self, name: str, view: str | None, known: str) -> tuple[catalog.Entry, BootView | None]:
        """The image, and its boot view if that is asked for and the client does not have it."""
        entry = self._find(name)
        wanted = view is not None and not is_known(entry.ref.record, known)
        return entry, self._boot_views.get(entry) if wanted else None

    def _find(self, text: str) -> catalog.Entry:
        name, ref = catalog.resolve(self._store, text)
        try:
            return catalog.load(self._store, name, ref)
        except FormatError as error:
            hint = "convert or push it again, with this version of pVisor"
            raise DamagedError(f"image {name}, in the server's store: {error.message}", hint=hint) from error

    async def publish(self, request: web.Request) -> web.Response:
        """PUT images/NAME {"id"}: name an image of which every chunk is here."""
        name = ImageName.parse(request.match_info["name"])
        return web.json_response(_document(await self._blocking.run(self._publish, name, await read_id(request))))

    def _publish(self, name: ImageName, image: ChunkId) -> catalog.Entry:
        store = self._store
        chunks, stored_bytes = measure(store, "image", image, reachable)
        record = ImageRecord.parse(store.get(image))
        source = next((ref.source for _, ref in store.refs.items() if ref.record == image), "upload")
        ref = Ref(
            record=image,
            created_at=int(time.time()),
            source=source,
            origin="",
            chunks=chunks,
            stored_bytes=stored_bytes,
        )
        store.refs.set(str(name), ref)
        return catalog.Entry(str(name), ref, record)

    async def convert(self, request: web.Request) -> web.Response:
        """POST images {"source", "name", "platform"}: start a conversion; 202 and the job that does it.

        Registry images only: this process may read files that its clients may not, on its own host too.
        """
        document = await read_json(request)
        for key in ("source", "name", "platform"):
            value = document.get(key)
            if not isinstance(value, str) and (key == "source" or value is not None):
                raise FormatError(f"field {key}", expected="a string", found=repr(value)[:80])
        source = SourceName.parse(document["source"])
        if source.transport != "docker":
            raise SourceRefusedError(
                f"this server does not convert {source.transport}: sources, which are files of its own host",
                hint="`pvisor convert` with --server converts files of your host and uploads the result",
            )
        name = ImageName.parse(document["name"]) if document.get("name") else None
        platform = document.get("platform") or None
        if platform is not None:
            platform = str(Platform.parse(platform))
        job = self._jobs.start(source, name, platform)
        return web.json_response({"job": job.id}, status=202, headers={"Location": f"/v1/jobs/{job.id}"})

    async def job(self, request: web.Request) -> web.Response:
        """GET jobs/ID: how far a conversion is."""
        job = self._jobs.get(request.match_info["id"])
        return web.json_response(job.to_dict(), headers={"Cache-Control": "no-store"})


def _document(entry: catalog.Entry) -> dict[str, Any]:
    ref = entry.ref
    return {
        "name": entry.name,
        "id": str(ref.record),
        "record": json.loads(entry.record.to_bytes()),
        "source": ref.source,
        "chunks": ref.chunks,
        "stored_bytes": ref.stored_bytes,
        "created_at": ref.created_at,
    }
