"""Answers about one image or snapshot: its JSON, or with it in a header the frames that it starts with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from imaged.errors import FormatError, PvisorError
from imaged.ids import ChunkId
from imaged.serving.bootview import BootView
from imaged.serving.chunkapi import ChunkApi
from imaged.signature import Signature, entity_tag


class DamagedError(PvisorError):
    """An image or snapshot that has a name here and can not be read."""


def choice(request: web.Request, parameter: str, *choices: str) -> str | None:
    """A query parameter that has one of these values when it is there. FormatError."""
    found = request.query.get(parameter)
    if found not in (None, *choices):
        raise FormatError(f"query parameter {parameter}", expected=" or ".join(choices), found=repr(found)[:80])
    return found


def known(request: web.Request) -> str:
    """What the client says that it has already."""
    return request.headers.get("If-None-Match", "")


def is_known(record: ChunkId, known: str, signatures: Sequence[Signature] = ()) -> bool:
    """Whether the client has this image or snapshot, with these signatures."""
    return entity_tag(record, signatures) in known


async def answer(
    request: web.Request,
    chunks: ChunkApi,
    document: dict[str, Any],
    view: BootView | None,
    *,
    header: str,
    profile: str | None,
    signatures: Sequence[Signature] = (),
) -> web.StreamResponse:
    """The document, or with a view its frames, and the document without its record in a header.

    `profile` is the request's: "frame" puts the profile before the frames, "chunks" also what it names after them.
    """
    record = ChunkId.parse(document["id"])
    headers = {"Cache-Control": "no-cache", "ETag": entity_tag(record, signatures)}
    if is_known(record, known(request), signatures):
        return web.Response(status=304, headers=headers)
    if view is None:
        return web.json_response(document, headers=headers)
    shown = {key: value for key, value in document.items() if key != "record"}
    shown["frames"] = len(view.chunks)
    lead = b""
    if view.profile is not None and profile is not None:
        shown["profile"] = str(view.profile.id)
        lead = view.profile.pack()
    headers[header] = json.dumps(shown)
    sent = [*view.chunks, *view.ahead] if profile == "chunks" else view.chunks
    return await chunks.send_frames(request, sent, headers, lead=lead)
