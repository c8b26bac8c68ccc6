"""HTTP handlers for images, and for asking for conversions."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from aiohttp import web

from imaged import catalog
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import name_within, require_own
from imaged.errors import (
    ChunkError,
    ChunkMissingError,
    ChunkUnreadableError,
    FormatError,
    NotFoundError,
    PvisorError,
)
from imaged.ids import ChunkId
from imaged.jobs.job import Job
from imaged.jobs.running import Jobs
from imaged.measure import measure
from imaged.names import ImageName, SourceName
from imaged.oci.descriptor import Platform
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.serving.access import grant, view
from imaged.serving.blocking import Blocking
from imaged.serving.bootapi import DamagedError, answer, choice, is_known, known
from imaged.serving.bootview import BootView, BootViews
from imaged.serving.chunkapi import ChunkApi, parse_id, read_json
from imaged.serving.jobapi import accepted
from imaged.serving.throughstore import ThroughStore
from imaged.signature import Signature

log = logging.getLogger(__name__)


class SourceRefusedError(PvisorError):
    """A source that this server does not convert for its clients."""


class ImageApi:
    """The handlers under /v1/images of one store."""

    def __init__(self, store: ChunkStore, jobs: Jobs, chunks: ChunkApi, blocking: Blocking) -> None:
        self._store = store
        self._jobs = jobs
        self._chunks = chunks
        self._blocking = blocking
        self._boot_views = BootViews()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/images", self.list_all),
            web.post("/v1/images", self.convert),
            web.get("/v1/images/{name:.+}", self.one),
            web.put("/v1/images/{name:.+}", self.publish),
            web.delete("/v1/images/{name:.+}", self.remove),
        ]

    async def list_all(self, request: web.Request) -> web.Response:
        """GET images: all that have a name and a record that can be read; one damaged image hides no other."""
        return web.json_response({"images": await self._blocking.run(_list, view(request, self._store))})

    async def one(self, request: web.Request) -> web.StreamResponse:
        """GET images/NAME: the image as JSON, or with ?view=boot as the frames that a first mount needs.

        With &profile=frame its startup profile comes first, in a frame of its own; with &profile=chunks the chunks that
        it names follow, too, for a client that has none of them.
        """
        wanted = choice(request, "view", "boot")
        profile = choice(request, "profile", "frame", "chunks")
        store, name = view(request, self._store), request.match_info["name"]
        entry, boot = await self._blocking.run(self._find_view, store, name, wanted, known(request))
        document = _document(entry)
        if entry.ref.origin and not isinstance(store, ThroughStore):
            document["complete"] = False
        signatures = entry.ref.signatures
        return await answer(
            request, self._chunks, document, boot, header="Pvisor-Image", profile=profile, signatures=signatures
        )

    def _find_view(
        self, store: ChunkStore, name: str, wanted: str | None, known: str
    ) -> tuple[catalog.Entry, BootView | None]:
        """The image, and its boot view if that is asked for and the client does not have it."""
        if isinstance(store, ThroughStore):
            store.find_image(name)
        entry = _find(store, name)
        lacking = wanted is not None and not is_known(entry.ref.record, known, entry.ref.signatures)
        try:
            return entry, self._boot_views.get(store, entry) if lacking else None
        except ChunkMissingError as error:
            if not entry.ref.origin:
                raise
            hint = "another server may have the rest"
            raise NotFoundError(f"image {name} is here in part only: {error.message}", hint=hint) from error

    async def publish(self, request: web.Request) -> web.Response:
        """PUT images/NAME {"id", "signatures"}: name an image of which every chunk is here.

        Signatures are kept, and not checked: only who runs the image knows which keys it trusts.
        """
        name = ImageName.parse(request.match_info["name"])
        require_own(grant(request).namespace, str(name), "/", "images")
        body = await read_json(request)
        signatures = Signature.parse_all(body.get("signatures", []))
        store, lease = view(request, self._store), request.headers.get("Pvisor-Lease")
        image = parse_id(body, "id")
        return web.json_response(
            _document(await self._blocking.run(self._publish, store, lease, name, image, signatures))
        )

    def _publish(
        self, store: ChunkStore, lease: str | None, name: ImageName, image: ChunkId, signatures: tuple[Signature, ...]
    ) -> catalog.Entry:
        signed = store.refs.sign(str(name), image, signatures) if signatures else None
        if signed is not None:
            return catalog.load(store, str(name), signed)
        with self._chunks.naming(store, lease):
            return self._measured(store, name, image, signatures)

    def _measured(
        self, store: ChunkStore, name: ImageName, image: ChunkId, signatures: tuple[Signature, ...]
    ) -> catalog.Entry:
        """Under a lease: what is found here stays until it has its name."""
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
            signatures=signatures,
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
        namespace = grant(request).namespace
        if namespace is not None:
            name = name_within(namespace, name or source.default_name)
        platform = document.get("platform") or None
        if platform is not None:
            platform = str(Platform.parse(platform))
        asked = Job.conversion(
            str(source), name=None if name is None else str(name), platform=platform, namespace=namespace
        )
        return accepted(await self._jobs.submit(asked))

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE images/NAME: what it stood for stays until a collection, and under its other names."""
        store = view(request, self._store)
        return web.json_response({"removed": await self._blocking.run(_remove, store, request.match_info["name"])})


def _list(store: ChunkStore) -> list[dict[str, Any]]:
    found = []
    for name, ref in store.refs.items():
        try:
            found.append(_document(catalog.load(store, name, ref)))
        except ChunkUnreadableError:  # the disk may give it again: an image that is there is not said to be gone
            raise
        except (ChunkError, FormatError) as error:
            log.error("image %s is not listed: %s", name, error.message)
    return found


def _find(store: ChunkStore, text: str) -> catalog.Entry:
    name, ref = catalog.resolve(store, text)
    try:
        return catalog.load(store, name, ref)
    except FormatError as error:
        hint = "convert or push it again, with this version of pVisor"
        raise DamagedError(f"image {name}, in the server's store: {error.message}", hint=hint) from error


def _remove(store: ChunkStore, text: str) -> str:
    try:
        name, _ = catalog.resolve(store, text)
    except FormatError:  # a damaged row, or one in the way of short names: a full name still goes
        name = str(ImageName.parse(text))
    if not store.refs.delete(name):
        raise NotFoundError(f"image {name} was removed just now")
    return name


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
        "signatures": [signature.to_json() for signature in ref.signatures],
    }
