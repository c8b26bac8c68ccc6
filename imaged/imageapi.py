"""HTTP handlers for images and conversion jobs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from imaged import catalog
from imaged.bootview import BootView, BootViews
from imaged.chunkapi import Blocking, ChunkApi, read_json
from imaged.errors import ChunkError, FormatError, PvisorError
from imaged.ids import ChunkId
from imaged.jobs import Jobs
from imaged.names import ImageName, SourceName
from imaged.oci.descriptor import Platform
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.refs import Ref
from imaged.store import ChunkStore

log = logging.getLogger(__name__)


class IncompleteImageError(PvisorError):
    """An image of which chunks are not in the store."""


class DamagedImageError(PvisorError):
    """An image that has a name here and can not be read."""


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
        view = _choice(request, "view", "boot")
        profile = _choice(request, "profile", "frame", "chunks")
        known = request.headers.get("If-None-Match", "")
        entry, boot = await self._blocking.run(self._find_view, request.match_info["name"], view, known)
        headers = {"Cache-Control": "no-cache", "ETag": _tag(entry)}
        if _tag(entry) in known:
            return web.Response(status=304, headers=headers)
        document = _document(entry)
        if boot is None:
            return web.json_response(document, headers=headers)
        del document["record"]
        document["frames"] = len(boot.chunks)
        lead = b""
        if boot.profile is not None and profile is not None:
            document["profile"] = str(boot.profile.id)
            lead = boot.profile.pack()
        headers["Pvisor-Image"] = json.dumps(document)
        chunks = [*boot.chunks, *boot.ahead] if profile == "chunks" else boot.chunks
        return await self._chunks.send_frames(request, chunks, headers, lead=lead)

    def _find_view(self, name: str, view: str | None, known: str) -> tuple[catalog.Entry, BootView | None]:
        """The image, and its boot view if that is asked for and the client does not have it."""
        entry = self._find(name)
        wanted = view is not None and _tag(entry) not in known
        return entry, self._boot_views.get(entry) if wanted else None

    def _find(self, text: str) -> catalog.Entry:
        name, ref = catalog.resolve(self._store, text)
        try:
            return catalog.load(self._store, name, ref)
        except FormatError as error:
            hint = "convert or push it again, with this version of pVisor"
            raise DamagedImageError(f"image {name}, in the server's store: {error.message}", hint=hint) from error

    async def publish(self, request: web.Request) -> web.Response:
        """PUT images/NAME {"id"}: name an image of which every chunk is here."""
        name = ImageName.parse(request.match_info["name"])
        text = (await read_json(request)).get("id")
        if not isinstance(text, str):
            raise FormatError("field id", expected="an image id", found=repr(text)[:80])
        entry = await self._blocking.run(self._publish, name, ChunkId.parse(text))
        return web.json_response(_document(entry))

    def _publish(self, name: ImageName, image: ChunkId) -> catalog.Entry:
        store = self._store
        stored_bytes, chunks = self._measure(image)
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

    def _measure(self, image: ChunkId) -> tuple[int, int]:
        """Stored bytes and number of the image's chunks. IncompleteImageError when one is not here."""
        hint = "upload the missing chunks first: POST /v1/chunks/missing says which"
        try:
            chunks: Iterable[ChunkId] = set(reachable(self._store, image))
        except ChunkError as error:
            raise IncompleteImageError(f"image {image} is not complete: {error.message}", hint=hint) from error
        sizes = [self._store.sizes(chunk) for chunk in chunks]
        missing = sizes.count(None)
        if missing:
            raise IncompleteImageError(f"{missing} of {len(sizes)} chunks of image {image} are missing", hint=hint)
        return sum(size[1] for size in sizes if size is not None), len(sizes)

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


def _choice(request: web.Request, parameter: str, *choices: str) -> str | None:
    """A query parameter that has one of these values when it is there. FormatError."""
    found = request.query.get(parameter)
    if found not in (None, *choices):
        raise FormatError(f"query parameter {parameter}", expected=" or ".join(choices), found=repr(found)[:80])
    return found


def _tag(entry: catalog.Entry) -> str:
    return f'"{entry.ref.record}"'


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
