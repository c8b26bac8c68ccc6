"""What goes wrong in a request is in the log when the client is told that it is there."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from imaged.errors import BucketUnavailableError, ChunkMissingError, PvisorError, StoreError, UpstreamError
from imaged.ids import ChunkId
from imaged.serving.httperrors import REQUEST_ID, STATUS, error_response, errors

_FLOODS = {503, 507}


def answer(error: Exception, **headers: str) -> web.StreamResponse:
    async def fail(request: web.Request) -> web.StreamResponse:
        raise error

    return asyncio.run(errors(make_mocked_request("GET", "/v1/images", headers=headers), fail))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *((kind("what went wrong"), status) for kind, status in STATUS if kind.__init__ is PvisorError.__init__),
        (PvisorError("what went wrong"), 500),
        (StoreError("what went wrong"), 500),
        (RuntimeError("what went wrong"), 500),
        (ChunkMissingError(ChunkId.of(b"x")), 500),
        (BucketUnavailableError("what went wrong"), 503),
        (UpstreamError("what went wrong"), 502),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_every_failure_of_the_server_is_in_the_log(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """But for what refuses very many requests, and is told once elsewhere."""
    with caplog.at_level(logging.ERROR, "imaged.serving.httperrors"):
        response = answer(error)
    assert response.status == status
    is_told = any(response.headers[REQUEST_ID] in record.getMessage() for record in caplog.records)
    assert is_told == (status >= 500 and status not in _FLOODS)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (web.HTTPNotFound(), 404),
        (web.HTTPMethodNotAllowed("PATCH", ["GET"]), 405),
        (web.HTTPRequestEntityTooLarge(1, 2), 413),
        (web.RequestPayloadError("cut off"), 400),
        (PvisorError("what went wrong"), 500),
        (RuntimeError("what went wrong"), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_every_refused_request_has_a_name(error: Exception, status: int) -> None:
    given = answer(error, **{REQUEST_ID: "from-balancer.1"})
    assert (given.status, given.headers[REQUEST_ID]) == (status, "from-balancer.1")
    assert len(answer(error).headers[REQUEST_ID]) == 12


def test_what_is_answered_without_an_exception_has_a_name_when_it_is_a_refusal() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return error_response(503, "the server is stopping", "")

    async def give(request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    compressed = make_mocked_request("PUT", "/v1/chunks", headers={"Content-Encoding": "gzip"})
    for request, handler, status in (
        (make_mocked_request("GET", "/readyz"), refuse, 503),
        (compressed, give, 415),
        (make_mocked_request("GET", "/healthz"), give, 200),
    ):
        response = asyncio.run(errors(request, handler))
        assert (response.status, REQUEST_ID in response.headers) == (status, status != 200)
