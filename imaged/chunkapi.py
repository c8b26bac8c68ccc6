"""HTTP handlers for chunks: frames out, one or many, and frames in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from aiohttp import web

from imaged.errors import (
    ChunkCorruptError,
    ChunkError,
    ChunkMissingError,
    FormatError,
    NotFoundError,
    PvisorError,
    StoreError,
)
from imaged.frame import HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.store import ChunkStore
from imaged.upstream import BATCH_LIMIT

log = logging.getLogger(__name__)
FRAME_TYPE = "application/vnd.pvisor.frame"
IMMUTABLE = "public, max-age=31536000, immutable"
_GROUP = 16
"""Frames read in one go: at 64 KiB, a megabyte waits for a client that reads slowly, and one more is read ahead."""
_READERS = 4
P = ParamSpec("P")
T = TypeVar("T")


class BadUploadError(PvisorError):
    """A frame from a client whose bytes do not match its id."""


class Blocking:
    """A bounded pool for what blocks: disk reads, verification. For one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="store")

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class ChunkApi:
    """The handlers under /v1/chunks of one store."""

    def __init__(self, store: ChunkStore, blocking: Blocking) -> None:
        self._store = store
        self._blocking = blocking

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
        headers = {"Cache-Control": IMMUTABLE, "ETag": tag}
        known = request.headers.get("If-None-Match")
        if known is not None and (known == "*" or tag in known) and self._store.has(chunk):
            return web.Response(status=304, headers=headers)
        await self._look_again(request, [chunk])
        body = self._cached([chunk])
        if body is None:
            frame = await self._blocking.run(self._store.frame, chunk)
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
            await self._blocking.run(self._verify, chunks)

    def _verify(self, chunks: Sequence[ChunkId]) -> None:
        for chunk in chunks:
            try:
                self._store.get(chunk)
            except ChunkCorruptError as error:
                log.error("%s", error.message)
            except ChunkMissingError:
                continue

    async def missing(self, request: web.Request) -> web.Response:
        """POST chunks/missing: which of these ids are not here."""
        absent = await self._blocking.run(self._store.missing, await read_ids(request))
        return web.json_response({"missing": [str(chunk) for chunk in absent]})

    async def upload(self, request: web.Request) -> web.Response:
        """PUT chunks: a stream of frames. Each is verified before it is kept; the first wrong one ends the request."""
        count = 0
        async for group in _incoming(request):
            await self._blocking.run(self._put, group)
            count += len(group)
        await self._blocking.run(self._store.flush)
        return web.json_response({"stored": count})

    def _put(self, frames: list[Frame]) -> None:
        for frame in frames:
            try:
                self._store.put_frame(frame)
            except ChunkCorruptError as error:
                raise BadUploadError(error.message, hint="send the frame again") from error

    async def send_frames(
        self, request: web.Request, chunks: Sequence[ChunkId], headers: dict[str, str], *, lead: bytes = b""
    ) -> web.StreamResponse:
        """All frames in order, a group at a time: the next is read while one is sent, and no further ahead.

        `lead` goes before them: a frame that is not in the store.
        """
        if len(chunks) <= _GROUP:
            body = self._cached(chunks)
            if body is None:
                body = await self._blocking.run(self._group, chunks)
            return web.Response(body=lead + body, headers=headers, content_type=FRAME_TYPE)
        response = web.StreamResponse(headers=headers)
        response.content_type = FRAME_TYPE
        promised = await self._blocking.run(self._store.frames_bytes, chunks)
        response.content_length = len(lead) + promised
        await response.prepare(request)
        if lead:
            await response.write(lead)
        try:
            sent = await self._send_groups(response, chunks)
            if sent != promised:
                raise StoreError(f"{promised - sent} bytes less than the index said: a frame was found damaged")
        except (ChunkError, StoreError) as error:
            # The status is out: cutting the connection is how a client learns of it, and it asks again.
            log.error("%s %s: cut off: %s", request.method, request.path, error.message)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError(error.message) from error
        await response.write_eof()
        return response

    async def _send_groups(self, response: web.StreamResponse, chunks: Sequence[ChunkId]) -> int:
        """The number of bytes sent."""
        sent = 0
        groups = [chunks[start : start + _GROUP] for start in range(0, len(chunks), _GROUP)]
        following = asyncio.ensure_future(self._blocking.run(self._group, groups[0]))
        try:
            for group in [*groups[1:], None]:
                body = await following
                if group is not None:
                    following = asyncio.ensure_future(self._blocking.run(self._group, group))
                await response.write(body)
                sent += len(body)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return sent

    def _cached(self, chunks: Sequence[ChunkId]) -> bytes | None:
        """Frames that the page cache has, read on the event loop: the trip to a thread and back costs more than the
        rest of the answer (0.15 to 0.4 ms a request, measured). None when one would have to come from the disk."""
        parts = []
        for chunk in chunks:
            part = self._store.packed_cached(chunk)
            if part is None:
                return None
            parts.append(part)
        return b"".join(parts)

    def _group(self, chunks: Sequence[ChunkId]) -> bytes:
        parts: list[bytes] = []
        for frame in self._store.frames(chunks):
            parts += (frame.header.pack(), frame.payload)
        return b"".join(parts)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The request's body as a JSON object. FormatError."""
    try:
        document = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise FormatError("request body", expected="a JSON object", found=str(error)[:200]) from error
    if not isinstance(document, dict):
        raise FormatError("request body", expected="a JSON object", found=type(document).__name__)
    return document


async def read_id(request: web.Request) -> ChunkId:
    """The id in `{"id": hex}`. FormatError."""
    return parse_id(await read_json(request), "id")


def parse_id(document: Mapping[str, Any], field: str) -> ChunkId:
    """A field of a request that is an id. FormatError."""
    text = document.get(field)
    if not isinstance(text, str):
        raise FormatError(f"field {field}", expected="an id", found=repr(text)[:80])
    return ChunkId.parse(text)


async def read_ids(request: web.Request) -> list[ChunkId]:
    """Ids from `{"ids": [hex, ...]}`, or raw 32-byte ids in an application/octet-stream body. FormatError."""
    size = ChunkId.SIZE_BYTES
    if request.content_type == "application/octet-stream":
        raw = await request.read()
        if len(raw) % size:
            raise FormatError("request body", expected=f"ids of {size} bytes each", found=f"{len(raw)} bytes")
        ids = [ChunkId(raw[at : at + size]) for at in range(0, len(raw), size)]
    else:
        listed = (await read_json(request)).get("ids")
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise FormatError("field ids", expected="a list of chunk ids", found=repr(listed)[:80])
        ids = [ChunkId.parse(text) for text in listed]
    if len(ids) > BATCH_LIMIT:
        raise FormatError("request body", expected=f"at most {BATCH_LIMIT} ids", found=f"{len(ids)}")
    return ids


async def _incoming(request: web.Request) -> AsyncIterator[list[Frame]]:
    """The frames of a request's body, some at a time, not verified. FormatError at the first that is none."""
    group: list[Frame] = []
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
        if len(group) == _GROUP:
            yield group
            group = []
    if group:
        yield group
