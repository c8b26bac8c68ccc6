"""A chunk server with two made-up images, and a client and a store to meet it with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from tests.support.chunkserver import ChunkServer, chunk_server
from tests.support.swift import S3Server, run_swift
from tests.support.synthetic import Synthetic, add_image

QUICK = RetryPolicy(total_s=1.0, first_wait_s=0.02, longest_wait_s=0.1)


@pytest.fixture(scope="session")
def swift() -> Iterator[S3Server]:
    """An S3 server without conditional PUT."""
    with run_swift() as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def image(home: Path) -> Synthetic:
    with ChunkStore.open(home / "store") as store:
        add_image(store, "other:latest", seed=2, chunks=3)
        return add_image(store, "registry.test:5000/team/app:v1")


@pytest.fixture(scope="module")
def server(home: Path, image: Synthetic) -> Iterator[ChunkServer]:
    with chunk_server(home / "store") as running:
        yield running


@pytest.fixture
def upstream(server: ChunkServer) -> Iterator[HttpUpstream]:
    opened = HttpUpstream(server.url, retry=QUICK)
    yield opened
    opened.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "local") as store:
        yield store
