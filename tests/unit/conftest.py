"""A store with a parked machine's memory in it, for those who ask for these; others have a `store` of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from tests.support.parked import Parked, add_snapshot

IMAGE = ChunkId(b"\1" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def parked(store: ChunkStore) -> Parked:
    return add_snapshot(store, "web", IMAGE)


@pytest.fixture
def image(store: ChunkStore, parked: Parked) -> BlockImage:
    """Of its memory."""
    return BlockImage.open(store, parked.record.memory)
