"""What a page of another site can have a browser do: nothing, over any route that may change something."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from imaged.chunkstore.store import ChunkStore
from imaged.serving.access import ROUTES
from imaged.serving.foreign import SAFE_METHODS
from imaged.serving.server import application

UNSAFE = [route for route in ROUTES if route[0] not in SAFE_METHODS]
FOREIGN: tuple[dict[str, str], ...] = (
    {"Origin": "http://evil.test"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://own"},
)
OWN: tuple[dict[str, str], ...] = (
    {},
    {"Origin": "http://own"},
    {"Origin": "http://OWN", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
)
"""With `own` in the place of what the server is called."""
Ask = Callable[[str, str, dict[str, str]], Awaitable[tuple[int, str]]]


def _asking(root: Path, use: Callable[[Ask], Awaitable[None]]) -> None:
    async def run() -> None:
        with ChunkStore.open(root) as store:
            async with application(store) as app, TestClient(TestServer(app)) as client:

                async def ask(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
                    sent = {
                        name: re.sub("own", f"{client.host}:{client.port}", value, flags=re.IGNORECASE)
                        for name, value in headers.items()
                    }
                    answer = await client.request(method, path, headers=sent, allow_redirects=False)
                    return answer.status, await answer.text()

                await use(ask)

    asyncio.run(run())


@pytest.mark.parametrize("route", UNSAFE, ids=lambda route: " ".join(route))
def test_a_page_of_another_site_changes_nothing(tmp_path: Path, route: tuple[str, str]) -> None:
    method, path = route[0], re.sub(r"\{[a-z]+\}", "x", route[1])

    async def use(ask: Ask) -> None:
        for headers in FOREIGN:
            status, said = await ask(method, path, headers)
            assert (status, "another site" in said) == (403, True), headers
        assert (await ask("GET", "/v1/jobs", {}))[1] == '{"jobs": []}'
        for headers in OWN:
            assert "another site" not in (await ask(method, path, headers))[1], headers

    _asking(tmp_path, use)


def test_reading_is_not_asked_whose_page_it_is(tmp_path: Path) -> None:
    async def use(ask: Ask) -> None:
        for headers in FOREIGN:
            assert (await ask("GET", "/v1/images", headers))[0] == 200
            assert (await ask("HEAD", "/v1/images", headers))[0] == 200

    _asking(tmp_path, use)
