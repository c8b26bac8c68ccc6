"""HTTP handlers for chunks: frames out, one or many, and frames in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from aiohttp import hdrs, web

from imaged.chunkstore.store import ChunkStore
from imaged.document import parse_json
from imaged.errors import (
    ChunkCorruptError,
    ChunkError,
    ChunkMissingError,
    FormatError,
    NotFoundError,
    PvisorError,
    StoreError,
    UpstreamError,
)
from imaged.fetching.upstream import BATCH_LIMIT
from imaged.frame import FRAME_TYPE, HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.serving.access import ACCESS, view
from imaged.serving.blocking import Blocking
from imaged.serving.framestream import READ_GROUP, FrameStream, packed

log = logging.getLogger(__name__)
_GROUP_BYTES = 2 << 20
"""Of frames that came in and are not stored yet, in one request."""
_UPLOAD_LIMIT_BYTES = 1 << 30
"""Of one request: clients send 8 MiB."""


class Relying(Protocol):
    """How a thread works for a client that names this lease, or none (`imaged.serving.leaseapi`)."""

    def relying(self, store: ChunkStore, lease: str | None, /) -> AbstractContextManager[None]:
        """To say what is here, or to store what is not."""
        ...

    def naming(self, store: ChunkStore, lease: str | None, /) -> AbstractContextManager[None]:
        """To look whether all of something is here, and name it. StoreError."""
        ...


class BadUploadError(PvisorError):
    """A frame from a client whose bytes do not match its id."""


class ChunkApi:
    """The handlers under /v1/chunks of one store."""

    def __init__(self, store: ChunkStore, blocking: Blocking, leases: Relying) -> None:
        self._store = store
        self._blocking = blocking
        self._stream = FrameStream(store, blocking)
        self.relying, self.naming = leases.relying, leases.naming

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chunks/batch", self.batch),
            web.post("/v1/chunks/missing", self.missing),
            web.get("/v1/chunks/{id}", self.one),
            web.put("/v1/chunks", self.upload),
        ]

    async def one(self, request: web.Request) -> web.Response:
        """GET chunks/ID: one frame, which never changes, so any cache may keep it for ever."""
        chunk = ChunkId.parse(request.match_info["id"])
        tag = f'"{chunk}"'
        store = view(request, self._store)
        headers = {"Cache-Control": request.app[ACCESS].immutable, "ETag": tag}
        known = request.headers.get("If-None-Match")
        if known is not None and (known == "*" or tag in known) and store.has(chunk):
            return web.Response(status=304, headers=headers)
        await self._look_again(request, [chunk])
        body = _cached(store, [chunk])
        if body is None:
            frame = await self._blocking.run(store.frame, chunk)
            if frame is None:
                raise NotFoundError(f"chunk {chunk}: not in the store")
            body = frame.pack()
        return web.Response(body=body, headers=headers, content_type=FRAME_TYPE)

    async def batch(self, request: web.Request) -> web.StreamResponse:
        """POST chunks/batch: frames in the order of the ids, a "missing" frame for each one that is not here."""
        chunks = await read_ids(request)
        await self._look_again(request, chunks)
        return await self.send_frames(request, chunks, {"Cache-Control": "no-store"})

    async def _look_again(self, request: web.Request, chunks: Sequence[ChunkId]) -> None:
        """A client that got a corrupt frame says no-cache: then ours are verified, and dropped when they are wrong."""
        if "no-cache" in request.headers.get("Cache-Control", ""):
            await self._blocking.run(_verify, view(request, self._store), chunks)

    async def missing(self, request: web.Request) -> web.Response:
        """POST chunks/missing: which of these ids are not here."""
        store, ids, lease = view(request, self._store), await read_ids(request), request.headers.get("Pvisor-Lease")

        def missing() -> list[ChunkId]:
            with self.relying(store, lease):
                return store.missing(ids)

        absent = await self._blocking.run(missing)
        return web.json_response({"missing": [str(chunk) for chunk in absent]})

    async def upload(self, request: web.Request) -> web.Response:
        """PUT chunks: a stream of frames. Each is verified before it is kept; the first wrong one ends the request."""
        count = 0
        store, lease = view(request, self._store), request.headers.get("Pvisor-Lease")

        def put(frames: list[Frame]) -> None:
            with self.relying(store, lease):
                _put(store, frames)

        async for group in _incoming(request):
            await self._blocking.run(put, group)
            count += len(group)
        await self._blocking.run(store.flush)
        return web.json_response({"stored": count})

    async def send_frames(
        self, request: web.Request, chunks: Sequence[ChunkId], headers: dict[str, str], *, lead: bytes = b""
    ) -> web.StreamResponse:
        """All frames in order, a group at a time: the next is read while one is sent, and no further ahead.

        `lead` goes before them: a frame that is not in the store.
        """
        store = view(request, self._store)
        if len(chunks) <= READ_GROUP:
            body = _cached(store, chunks)
            if body is None:
                body = await self._blocking.run(packed, store, chunks)
            return web.Response(body=lead + body, headers=headers, content_type=FRAME_TYPE)
        response = web.StreamResponse(headers=headers)
        response.content_type = FRAME_TYPE
        promised = await self._blocking.run(store.prepare, chunks)
        if promised is None:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(lead) + promised
        await response.prepare(request)
        if lead:
            await response.write(lead)
        try:
            sent = await self._stream.send(request, response, store, chunks)
            if promised is not None and sent != promised:
                raise StoreError(f"{promised - sent} bytes less than the index said: a frame was found damaged")
        except (ChunkError, StoreError, UpstreamError) as error:
            # The status is out: cutting the connection is how a client learns of it, and it asks again.
            log.error("%s %s: cut off: %s", request.method, request.path, error.message)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError(error.message) from error
        await response.write_eof()
        return response


def _cached(store: ChunkStore, chunks: Sequence[ChunkId]) -> bytes | None:
    """Frames that the page cache has, read on the event loop: the trip to a thread and back costs more than the rest of
    the answer (0.15 to 0.4 ms a request, measured). None when one would have to come from the disk."""
    parts = []
    for chunk in chunks:
        part = store.packed_cached(chunk)
        if part is None:
            return None
        parts.append(part)
    return b"".join(parts)


def _verify(store: ChunkStore, chunks: Sequence[ChunkId]) -> None:
    for chunk in chunks:
        try:
            store.get(chunk)
        except ChunkCorruptError as error:
            log.error("%s", error.message)
        except ChunkMissingError:
            continue


def _put(store: ChunkStore, frames: list[Frame]) -> None:
    for frame in frames:
        try:
            store.put_frame(frame)
        except ChunkCorruptError as error:
            raise BadUploadError(error.message, hint="send the frame again") from error


async def read_json(request: web.Request) -> dict[str, Any]:
    """The request's body as a JSON object. FormatError."""
    return parse_json(await request.read(), "request body")


def parse_id(document: Mapping[str, Any], field: str) -> ChunkId:
    """A field of a request that is an id. FormatError."""
    text = document.get(field)
    if not isinstance(text, str):
        raise FormatError(f"field {field}", expected="an id", found=repr(text)[:80])
    return ChunkId.parse(text)


async def read_ids(request: web.Request) -> list[ChunkId]:
    """Ids from `{"ids": [hex, ...]}`, or raw 32-byte ids in a body that is said to be application/octet-stream, which
    aiohttp takes one of no type for. FormatError."""
    if hdrs.CONTENT_TYPE in request.headers and request.content_type == "application/octet-stream":
        ids = ChunkId.several(await request.read())
    else:
        listed = (await read_json(request)).get("ids")
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise FormatError("field ids", expected="a list of chunk ids", found=repr(listed)[:80])
        ids = [ChunkId.parse(text) for text in listed]
    if len(ids) > BATCH_LIMIT:
        raise FormatError("request body", expected=f"at most {BATCH_LIMIT} ids", found=f"{len(ids)}")
    return ids


async def _incoming(request: web.Request) -> AsyncIterator[list[Frame]]:
    """The frames of a request's body, some at a time, not verified. FormatError at the first that is none;
    HTTPRequestEntityTooLarge."""
    group: list[Frame] = []
    group_bytes = total_bytes = 0
    while True:
        try:
            header = FrameHeader.parse(await request.content.readexactly(HEADER_BYTES))
            payload = await request.content.readexactly(header.payload_bytes)
        except asyncio.IncompleteReadError as error:
            if not error.partial and error.expected == HEADER_BYTES:
                break
            raise FormatError("frame", expected=f"{error.expected} bytes", found=f"{len(error.partial)}") from None
        if header.codec is Codec.MISSING:
            raise FormatError(f"frame of {header.id}", expected="a chunk", found="a missing frame")
        group.append(Frame(header, payload))
        group_bytes += HEADER_BYTES + len(payload)
        if len(group) == READ_GROUP or group_bytes >= _GROUP_BYTES:
            yield group
            total_bytes += group_bytes
            group, group_bytes = [], 0
            if total_bytes >= _UPLOAD_LIMIT_BYTES:
                raise web.HTTPRequestEntityTooLarge(_UPLOAD_LIMIT_BYTES, total_bytes)
    if group:
        yield group
