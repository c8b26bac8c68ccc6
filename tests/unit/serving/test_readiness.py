"""Looking whether the memory of a snapshot can be had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import readiness
from fuse.readiness import Readiness
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.ids import ChunkId
from tests.support.parked import Parked, add_snapshot, damage, lose

CELL = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def parked(store: ChunkStore) -> Parked:
    return add_snapshot(store, "web", ChunkId(b"\1" * 32))


@pytest.fixture
def fetcher(store: ChunkStore) -> Iterator[Fetcher]:
    made = Fetcher(store)
    yield made
    made.close()


@pytest.fixture
def image(store: ChunkStore, parked: Parked) -> BlockImage:
    return BlockImage.open(store, parked.record.memory)


def look(fetcher: Fetcher, image: BlockImage, *chunks: ChunkId) -> Readiness:
    made = Readiness(fetcher, image, chunks, Tally())
    made.run()
    return made


def chunk_at(image: BlockImage, offset: int) -> ChunkId:
    return image.way(offset, 1)[-1]


def test_a_whole_memory_is_ready_and_its_working_set_is_in_memory(fetcher: Fetcher, image: BlockImage) -> None:
    touched = image.way(3 * CELL, 1)
    assert look(fetcher, image, *touched).wait()
    tally = Tally()
    fetcher.get_many(touched, tally)
    assert tally.hits == len(touched)
    assert look(fetcher, image).wait()


def test_a_lost_chunk_is_named_wherever_it_is(store: ChunkStore, fetcher: Fetcher, image: BlockImage) -> None:
    lost = chunk_at(image, 67 * CELL)
    lose(store, lost)
    with pytest.raises(ChunkMissingError) as raised:
        look(fetcher, image, *image.way(3 * CELL, 1)).wait()
    assert raised.value.chunk == lost


def test_a_damaged_chunk_of_the_working_set_is_named(store: ChunkStore, fetcher: Fetcher, image: BlockImage) -> None:
    bad = chunk_at(image, 67 * CELL)
    damage(store, bad)
    assert look(fetcher, image, *image.way(3 * CELL, 1)).wait()
    with pytest.raises((ChunkCorruptError, ChunkMissingError)) as raised:
        look(fetcher, image, *image.way(67 * CELL, 1)).wait()
    assert raised.value.chunk == bad


def test_before_the_working_set_is_known_no_chunk_is_read(
    store: ChunkStore, fetcher: Fetcher, image: BlockImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a machine that was just parked is not read back before it goes on: a read of it verifies."""
    bad = chunk_at(image, 67 * CELL)
    damage(store, bad)
    image.preload()
    with monkeypatch.context() as patched:
        patched.setattr(ChunkStore, "get", None)
        patched.setattr(ChunkStore, "frames", None)
        assert look(fetcher, image).wait()
    with pytest.raises((ChunkCorruptError, ChunkMissingError)):
        image.read(67 * CELL, 1)
    # Who reads it finds it damaged, and it is dropped: from then on it is named.
    with pytest.raises(ChunkMissingError, match=str(bad)):
        look(fetcher, image).wait()


def test_it_is_looked_again_after_a_while_and_after_an_error(
    store: ChunkStore, fetcher: Fetcher, image: BlockImage
) -> None:
    fresh = Readiness(fetcher, image, [], Tally())
    assert not fresh.wait(0.0)
    assert not fresh.is_over(time.monotonic()), "somebody is at it"
    fresh.run()
    assert not fresh.is_over(time.monotonic())
    assert fresh.is_over(time.monotonic() + 2 * readiness._FRESH_S)
    lose(store, chunk_at(image, 67 * CELL))
    assert look(fetcher, image).is_over(time.monotonic())
