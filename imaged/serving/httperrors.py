"""Every error of a request as JSON {"error", "hint"} with the status that fits, and an id that the log has too."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from imaged.chunkstore.tenant import ForeignNameError
from imaged.errors import (
    ChunkError,
    ChunkUnreadableError,
    FormatError,
    InvalidNameError,
    NameTakenError,
    NotFoundError,
    PvisorError,
    StoreBusyError,
    StoreFullError,
    StoreReadOnlyError,
    UpstreamError,
)
from imaged.jobs.jobstore import JobEndedError, QueueFullError
from imaged.measure import IncompleteError
from imaged.serving.access import AccessError, ForbiddenError, TooManyError, UnauthorizedError
from imaged.serving.chunkapi import BadUploadError
from imaged.serving.foreign import ForeignPageError
from imaged.serving.imageapi import SourceRefusedError
from imaged.serving.through import LoopError
from imaged.serving.traffic import ROUTE

log = logging.getLogger(__name__)
STATUS: tuple[tuple[type[PvisorError], int], ...] = (
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (ForeignNameError, 403),
    (ForeignPageError, 403),
    (TooManyError, 429),
    (NotFoundError, 404),
    (BadUploadError, 400),
    (FormatError, 400),
    (InvalidNameError, 400),
    (IncompleteError, 409),
    (NameTakenError, 409),
    (SourceRefusedError, 403),
    (JobEndedError, 409),
    (QueueFullError, 429),
    (StoreFullError, 507),
    (StoreReadOnlyError, 403),
    (StoreBusyError, 503),
    (LoopError, 508),
    (UpstreamError, 502),
)
"""The status of each error; the first that matches counts, anything else is 500."""
REQUEST_ID = "X-Request-Id"
_NAME = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DAMAGED_HINT = "at the server: `pvisor image verify NAME` drops damaged chunks; then upload or convert the image again"
_BROKEN_OFF = 499
_EXPECTED = (503, 507)
"""A store that is busy or full, or a bucket that does not answer, is told elsewhere, once, and refuses very many."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """An answer already begun is cut off instead, which a client notices."""
    response = await _answer(request, handler)
    if response.status >= 400 and not response.prepared:
        response.headers[REQUEST_ID] = request_id(request)
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    resource = request.match_info.route.resource
    if resource is not None:
        request[ROUTE] = resource.canonical
    try:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return error_response(415, "a compressed body", "send it as it is, without Content-Encoding")
        return await handler(request)
    except PvisorError as error:
        status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
        if isinstance(error, ChunkError):
            _tell(request, error)
            message = f"the server's own store is damaged: {error.message}"
            hint = error.hint if isinstance(error, ChunkUnreadableError) else _DAMAGED_HINT
            return error_response(status, message, hint)
        if status >= 500 and status not in _EXPECTED:
            _tell(request, error)
        headers = error.headers if isinstance(error, AccessError) else None
        return error_response(status, error.message, error.hint, headers)
    except web.RequestPayloadError as error:
        return error_response(400, f"request body: {error}", "send it whole")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allowed = error.headers.get("Allow")
        hint = "see /v1/openapi.json"
        return error_response(error.status, error.reason, hint, {"Allow": allowed} if allowed else {})
    except ConnectionError as error:
        log.info("%s %s: broken off: %s", request.method, request.path, error)
        if request.transport is not None:
            request.transport.abort()
        # Nobody gets this, but aiohttp answers an exception with a traceback in the log.
        return web.Response(status=_BROKEN_OFF)
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("%s %s [request %s]", request.method, request.path, request_id(request))
        return error_response(500, "the server failed to answer", "its log says why")


def error_response(status: int, message: str, hint: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": message, "hint": hint}
    return web.json_response(body, status=status, headers={"Cache-Control": "no-store", **(headers or {})})


def _tell(request: web.Request, error: PvisorError) -> None:
    log.error("%s %s: %s [request %s]", request.method, request.path, error.message, request_id(request))


def request_id(request: web.Request) -> str:
    """What the client, or a balancer before us, calls this request; else a name that it keeps."""
    if _NAME not in request:
        given = request.headers.get(REQUEST_ID, "")
        request[_NAME] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(6)
    return request[_NAME]
