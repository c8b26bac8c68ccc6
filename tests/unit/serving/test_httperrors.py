"""What goes wrong in a request is in the log when the client is told that it is there."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from imaged.errors import BucketUnavailableError, ChunkMissingError, PvisorError, StoreError, UpstreamError
from imaged.ids import ChunkId
from imaged.serving.httperrors import REQUEST_ID, STATUS, errors

_FLOODS = {503, 507}


def answer(error: Exception) -> web.StreamResponse:
    async def fail(request: web.Request) -> web.StreamResponse:
        raise error

    return asyncio.run(errors(make_mocked_request("GET", "/v1/images"), fail))


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
