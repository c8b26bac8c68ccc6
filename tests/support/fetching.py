"""Fixtures for tests of the fetcher, as a pytest plugin: a store, servers that misbehave as told, what falls silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.fetching.fetch import Fetcher
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from tests.support.crooked import Crooked, Stall, crooked_server

PATIENT = RetryPolicy(total_s=30.0, first_wait_s=0.01, longest_wait_s=0.05)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def server() -> Iterator[Crooked]:
    with crooked_server() as crooked:
        yield crooked


@pytest.fixture
def second() -> Iterator[Crooked]:
    with crooked_server() as crooked:
        yield crooked


@pytest.fixture
def fetchers(store: ChunkStore) -> Iterator[Callable[..., Fetcher]]:
    """Makes fetchers of these servers, and closes them."""
    made: list[Fetcher] = []

    def make(*servers: Crooked, retry: RetryPolicy = PATIENT) -> Fetcher:
        made.append(Fetcher(store, [HttpUpstream(server.url) for server in servers], retry=retry))
        return made[-1]

    yield make
    for fetcher in made:
        fetcher.close()


@pytest.fixture
def no_hedges(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is late, however loaded this host is: for tests that count requests."""
    for name in ("FIRST_HEDGE_S", "LEAST_HEDGE_S", "MOST_HEDGE_S"):
        monkeypatch.setattr(f"imaged.fetching.link.{name}", 60.0)


@pytest.fixture
def stall() -> Iterator[Stall]:
    made = Stall()
    yield made
    made.release.set()
