"""What is taken along with a miss, and that it is right, bounded, and follows its use."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.blockbuilder import BlockImageBuilder
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkMissingError
from imaged.extent import Extent
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.neighbourhood import FIRST_BYTES, MOST_CHUNKS, QUIET_S, Neighbourhood
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.crooked import Crooked, crooked_server

CHUNK_BYTES = 4 * BLOCK_BYTES
COUNT = 600
SPARE_BYTES = 4 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path_factory.mktemp("store") / "store") as opened:
        yield opened


@pytest.fixture(scope="module")
def content() -> list[bytes]:
    source = random.Random(5)
    return [source.randbytes(CHUNK_BYTES) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def block_image(store: ChunkStore, content: list[bytes]) -> ChunkId:
    """With holes: of a block now and then, and once of more than a leaf."""
    builder = BlockImageBuilder(store)
    for number, data in enumerate(content):
        builder.append(Extent(4, store.put(data)))
        if number % 50 == 49:
            builder.append(Extent(1, None))
        if number == COUNT // 2:
            builder.append(Extent(3000, None))
    return builder.finish()


@pytest.fixture
def image(store: ChunkStore, block_image: ChunkId) -> BlockImage:
    return BlockImage.open(store, block_image)


def order(store: ChunkStore, block_image: ChunkId) -> list[ChunkId]:
    return list(BlockImage.open(store, block_image).chunk_ids())


def peek(store: ChunkStore, chunk: ChunkId) -> bytes | None:
    try:
        return store.get(chunk)
    except ChunkMissingError:
        return None


def touch(image: BlockImage, number: int) -> None:
    """Read the leaf of one chunk, as a read of the disk does before it misses the chunk."""
    image.pieces(position(number), BLOCK_BYTES)


def position(number: int) -> int:
    return (number * 4 + number // 50 + (3000 if number > COUNT // 2 else 0)) * BLOCK_BYTES


def never(chunk: ChunkId) -> bool:
    return False


@pytest.mark.parametrize("place", [0, 1, 250, COUNT // 2, COUNT - 1])
def test_neighbours_lie_around_the_miss_mostly_after_it(
    store: ChunkStore, image: BlockImage, block_image: ChunkId, place: int
) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, place)
    chosen = near.choose([chunks[place]], SPARE_BYTES, never)
    assert len(chosen) == len(set(chosen)) == FIRST_BYTES // (16 << 10)
    places = [chunks.index(chunk) for chunk in chosen]
    assert place not in places
    assert max(abs(other - place) for other in places) <= len(chosen) + 1
    if 4 < place < COUNT - 4:
        assert sum(other > place for other in places) > sum(other < place for other in places) > 0


def test_what_is_known_is_passed_by(store: ChunkStore, image: BlockImage, block_image: ChunkId) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, 100)
    known = set(chunks[95:105])
    chosen = near.choose([chunks[100]], SPARE_BYTES, known.__contains__)
    assert chosen and not known & set(chosen)


def test_more_for_who_goes_on_missing_and_never_more_than_the_link_carries(
    store: ChunkStore, image: BlockImage, block_image: ChunkId
) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, 300)
    counts = []
    for _ in range(60):
        chosen = near.choose([chunks[300]], SPARE_BYTES, never)
        counts.append(len(chosen))
        for _ in chosen:
            near.used()
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == min(MOST_CHUNKS, COUNT - 1)
    small = Neighbourhood(image, lambda chunk: peek(store, chunk))
    assert max(len(small.choose([chunks[300]], 100_000, never)) for _ in range(60)) <= 100_000 // (16 << 10)


def test_guesses_that_nobody_uses_become_few(store: ChunkStore, image: BlockImage, block_image: ChunkId) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, 300)
    counts = [len(near.choose([chunks[300]], SPARE_BYTES, never)) for _ in range(100)]
    assert max(counts) > 4 * counts[-1]
    assert counts[-1] > 0


def test_who_was_quiet_starts_anew(
    store: ChunkStore, image: BlockImage, block_image: ChunkId, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, 300)
    counts = [len(near.choose([chunks[300]], SPARE_BYTES, never)) for _ in range(9)]
    monkeypatch.setattr("imaged.fetching.neighbourhood.QUIET_S", -1.0)
    assert QUIET_S > 0
    assert len(near.choose([chunks[300]], SPARE_BYTES, never)) == counts[0] < counts[-1]


def test_a_leaf_brings_leaves(store: ChunkStore, image: BlockImage) -> None:
    leaves = [leaf for leaf in image.root.leaves if leaf is not None]
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    assert set(near.choose([leaves[2]], SPARE_BYTES, never)) == set(leaves) - {leaves[2]}
    assert near.choose([leaves[0]], 6 << 10, never) == [leaves[1]]


def test_the_walk_ends_at_a_leaf_that_is_not_here_and_asks_for_it(
    store: ChunkStore, image: BlockImage, block_image: ChunkId
) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: None)
    touch(image, 0)
    tables = {chunk for leaf in image.recent_leaves() for chunk in leaf[1].chunks()}
    for _ in range(40):
        chosen = near.choose([chunks[0]], SPARE_BYTES, never)
        for _ in chosen:
            near.used()
    assert len(image.recent_leaves()) == 1
    assert chosen[-1] == image.root.leaves[1]
    assert set(chosen[:-1]) == tables - {chunks[0]}


@pytest.fixture
def server(store: ChunkStore, block_image: ChunkId) -> Iterator[Crooked]:
    image = BlockImage.open(store, block_image)
    with crooked_server() as crooked:
        for chunk in [block_image, *image.leaf_ids(), *image.chunk_ids()]:
            crooked.add(store.get(chunk))
        yield crooked


@pytest.mark.parametrize(("delay_s", "few"), [(0.0, False), (0.02, True)])
def test_a_far_server_is_asked_less_often(
    tmp_path: Path,
    server: Crooked,
    block_image: ChunkId,
    content: list[bytes],
    delay_s: float,
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one that is near, nothing is asked for but what is read."""
    monkeypatch.setattr("imaged.fetching.link.SHORT_S", 0.018)  # a loaded host is slower than a near server
    server.delay_s = delay_s
    wanted = [number for number in range(COUNT // 2) if number % 3 == 0]
    with ChunkStore.open(tmp_path / "cache") as cache:
        fetcher = Fetcher(cache, [HttpUpstream(server.url)])
        tally = Tally()
        reader = fetcher.reader(block_image, tally)
        image = BlockImage.open(reader, block_image)
        reader.guess_in(image)
        for number in wanted:
            assert image.read(position(number), CHUNK_BYTES) == content[number]
        fetcher.close()
    if few:
        assert server.requests == tally.requests <= len(wanted) // 4
    else:
        assert len(server.asked) <= len(wanted) + 10


def test_choosing_holds_no_lock_while_it_looks(store: ChunkStore, image: BlockImage, block_image: ChunkId) -> None:
    """Looking takes the fetcher's lock, and who holds that may just be telling what was used."""
    chunks = order(store, block_image)
    chosen: list[ChunkId] = []

    def look(chunk: ChunkId) -> bytes | None:
        near.used()
        near.came(chunk, 1 << 14)
        return peek(store, chunk)

    near = Neighbourhood(image, look)
    touch(image, 0)
    thread = threading.Thread(target=lambda: chosen.extend(choose_all(near, chunks[0])), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert chosen


def choose_all(near: Neighbourhood, chunk: ChunkId) -> list[ChunkId]:
    def forget(other: ChunkId) -> bool:
        near.used()
        return False

    for _ in range(40):
        chosen = near.choose([chunk], SPARE_BYTES, forget)
    return chosen


def test_many_threads_read_and_guess(
    tmp_path: Path, server: Crooked, block_image: ChunkId, content: list[bytes]
) -> None:
    server.delay_s = 0.005
    done = []
    with ChunkStore.open(tmp_path / "cache") as cache:
        fetcher = Fetcher(cache, [HttpUpstream(server.url)], memory_bytes=100 * CHUNK_BYTES)
        reader = fetcher.reader(block_image, Tally())
        image = BlockImage.open(reader, block_image)
        reader.guess_in(image)

        def read(thread: int) -> None:
            source = random.Random(thread)
            for number in range(source.randrange(40), COUNT, 7):
                assert image.read(position(number), CHUNK_BYTES) == content[number]
            done.append(thread)

        threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == list(range(24))
        fetcher.close()


def test_less_is_taken_along_while_earlier_chunks_still_come(
    store: ChunkStore, image: BlockImage, block_image: ChunkId
) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, 300)
    spare_bytes = 192 << 10
    assert len(near.choose([chunks[300]], spare_bytes, never)) == 8
    assert len(near.choose([chunks[300]], spare_bytes, never, coming=8)) == 8, "they come in a round trip"
    assert len(near.choose([chunks[300]], spare_bytes, never, coming=14)) == 4
    assert near.choose([chunks[300]], spare_bytes, never, coming=18) == []
    leaves = [leaf for leaf in image.root.leaves if leaf is not None]
    assert near.choose([leaves[2]], spare_bytes, never, coming=100) == []


def test_large_chunks_are_fewer(store: ChunkStore, image: BlockImage, block_image: ChunkId) -> None:
    chunks = order(store, block_image)
    near = Neighbourhood(image, lambda chunk: peek(store, chunk))
    touch(image, 300)
    leaf = next(leaf for leaf in image.root.leaves if leaf is not None)
    near.choose([leaf], SPARE_BYTES, never)
    near.came(leaf, 100)
    near.came(chunks[0], FIRST_BYTES // 3)
    assert len(near.choose([chunks[300]], SPARE_BYTES, never)) == 3
