"""Fetcher: single-flight, batches, failover, retries, and a local store that fails."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError, StoreFullError, UpstreamError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from tests.support.crooked import FAST, Crooked, corrupt, cut, drop, nonsense, refuse

pytest_plugins = ("tests.support.fetching",)
pytestmark = pytest.mark.usefixtures("no_hedges")
HASTY = RetryPolicy(total_s=0.1, first_wait_s=0.01, longest_wait_s=0.05)


def fetcher_of(store: ChunkStore, *servers: Crooked, retry: RetryPolicy = FAST, memory_bytes: int = 1 << 20) -> Fetcher:
    return Fetcher(store, [HttpUpstream(server.url) for server in servers], retry=retry, memory_bytes=memory_bytes)


def test_fetched_once_then_from_memory_then_from_the_store(store: ChunkStore, server: Crooked) -> None:
    chunk = server.add(b"a" * 5000)
    tally = Tally()
    fetcher = fetcher_of(store, server)
    assert fetcher.get(chunk, tally) == b"a" * 5000
    assert fetcher.get(chunk, tally) == b"a" * 5000
    fetcher.drain()
    assert store.get(chunk) == b"a" * 5000
    fetcher.close()
    again = fetcher_of(store, server)
    assert again.get(chunk, tally) == b"a" * 5000
    again.close()
    wire_bytes = Frame.of(b"a" * 5000).stored_bytes
    assert tally.to_dict() == {
        "reads": 0,
        "hits": 2,
        "fetched_chunks": 1,
        "fetched_bytes": wire_bytes,
        "requests": 1,
    }
    assert server.requests == 1


def test_the_misses_of_one_call_are_one_request_and_repeats_are_asked_once(store: ChunkStore, server: Crooked) -> None:
    data = [os.urandom(4096) for _ in range(50)]
    chunks = [server.add(part) for part in data]
    tally = Tally()
    fetcher = fetcher_of(store, server)
    found = fetcher.get_many([*chunks, *chunks], tally)
    assert [found[chunk] for chunk in chunks] == data
    assert server.requests == tally.requests == 1
    assert len(server.asked) == 50
    fetcher.close()


def test_many_threads_that_want_one_chunk_make_one_request(store: ChunkStore, server: Crooked) -> None:
    chunk = server.add(b"x" * 4096)
    server.delay_s = 0.05
    fetcher = fetcher_of(store, server)
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda _: fetcher.get(chunk, Tally()), range(16)))
    assert results == [b"x" * 4096] * 16
    assert server.requests == 1
    fetcher.close()


def test_misses_that_arrive_together_share_requests(
    store: ChunkStore, server: Crooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaged.fetching.lanes.SLOW_S", 10.0)
    chunks = [server.add(os.urandom(4096)) for _ in range(40)]
    server.delay_s = 0.05
    fetcher = fetcher_of(store, server)
    tally = Tally()
    with ThreadPoolExecutor(40) as pool:
        results = list(pool.map(lambda chunk: fetcher.get(chunk, tally), chunks))
    assert results == [server.chunks[chunk] for chunk in chunks]
    assert server.requests == tally.requests <= 12
    assert tally.fetched_chunks == 40
    fetcher.close()


def test_a_slow_chunk_does_not_hold_up_others(store: ChunkStore, server: Crooked) -> None:
    slow, quick = server.add(b"slow" * 1024), server.add(b"quik" * 1024)
    stuck = [server.add(os.urandom(4096)) for _ in range(4)]
    release = threading.Event()

    def wait(handler: object, body: bytes) -> None:
        release.wait(60)
        handler.answer(200, body)  # type: ignore[attr-defined]

    server.faults = [wait] * 5
    fetcher = fetcher_of(store, server)
    threads = [threading.Thread(target=fetcher.get, args=(chunk, Tally())) for chunk in (slow, *stuck)]
    for number, thread in enumerate(threads):
        thread.start()
        while server.requests <= number:
            time.sleep(0.005)
    assert fetcher.get(quick, Tally()) == b"quik" * 1024
    assert all(thread.is_alive() for thread in threads)
    release.set()
    for thread in threads:
        thread.join()
    fetcher.close()


@pytest.mark.parametrize(
    "fault",
    [refuse(503), refuse(500), refuse(429, Retry_After="0"), cut, drop, nonsense, corrupt],
    ids=["503", "500", "429", "cut", "drop", "nonsense", "corrupt"],
)
@pytest.mark.parametrize("count", [1, 20])
def test_a_fault_that_passes_is_survived(store: ChunkStore, server: Crooked, fault: object, count: int) -> None:
    chunks = [server.add(os.urandom(9000)) for _ in range(count)]
    server.faults = [fault]  # type: ignore[list-item]
    fetcher = fetcher_of(store, server)
    assert fetcher.get_many(chunks, Tally()) == server.chunks
    assert server.requests == 2
    fetcher.close()


def test_a_cut_batch_goes_on_where_it_stopped(store: ChunkStore, server: Crooked) -> None:
    chunks = [server.add(os.urandom(9000)) for _ in range(20)]
    server.faults = [cut]
    fetcher = fetcher_of(store, server)
    fetcher.get_many(chunks, Tally())
    assert 25 <= len(server.asked) <= 35
    fetcher.close()


def test_corrupt_twice_goes_to_the_next_server(store: ChunkStore, server: Crooked, second: Crooked) -> None:
    chunk = server.add(b"c" * 4096)
    second.add(b"c" * 4096)
    server.faults = [corrupt, corrupt]
    fetcher = fetcher_of(store, server, second)
    assert fetcher.get(chunk, Tally()) == b"c" * 4096
    assert (server.requests, second.requests) == (2, 1)
    fetcher.close()


def test_corrupt_everywhere_is_an_error_and_nothing_is_stored(store: ChunkStore, server: Crooked) -> None:
    chunk = server.add(b"c" * 4096)
    server.faults = [corrupt] * 4
    fetcher = fetcher_of(store, server)
    with pytest.raises(ChunkCorruptError):
        fetcher.get(chunk, Tally())
    fetcher.drain()
    assert not store.has(chunk)
    server.faults = []
    assert fetcher.get(chunk, Tally()) == b"c" * 4096
    fetcher.close()


def test_missing_at_one_server_is_taken_from_the_next(store: ChunkStore, server: Crooked, second: Crooked) -> None:
    here, there = server.add(b"1" * 4096), second.add(b"2" * 4096)
    fetcher = fetcher_of(store, server, second)
    assert fetcher.get_many([here, there], Tally()) == {here: b"1" * 4096, there: b"2" * 4096}
    nowhere = ChunkId.of(b"nowhere")
    with pytest.raises(ChunkMissingError):
        fetcher.get(nowhere, Tally())
    fetcher.close()


def test_the_origin_is_asked_first(store: ChunkStore, server: Crooked, second: Crooked) -> None:
    chunk = server.add(b"o" * 4096)
    second.add(b"o" * 4096)
    image = ChunkId.of(b"image")
    store.origins.set(image, second.url)
    fetcher = fetcher_of(store, server)
    assert fetcher.reader(image, Tally()).get(chunk) == b"o" * 4096
    assert (server.requests, second.requests) == (0, 1)
    fetcher.close()


def test_a_server_that_is_down_fails_in_bounded_time_then_quickly_then_heals(
    store: ChunkStore, server: Crooked
) -> None:
    chunk, other = server.add(b"d" * 4096), server.add(b"e" * 4096)
    server.faults = [drop] * 1000
    fetcher = fetcher_of(store, server, retry=HASTY)
    with pytest.raises(UpstreamError):
        fetcher.get(chunk, Tally())
    before = server.requests
    with pytest.raises(UpstreamError):
        fetcher.get(other, Tally())
    assert server.requests == before + 1
    server.faults = []
    assert fetcher.get(chunk, Tally()) == b"d" * 4096
    fetcher.close()


def test_an_origin_that_is_down_costs_the_images_of_others_no_patience(
    store: ChunkStore, server: Crooked, second: Crooked
) -> None:
    chunk, other = server.add(b"d" * 4096), second.add(b"e" * 4096)
    server.faults = [drop] * 1000
    fetcher = fetcher_of(store, retry=HASTY)
    with pytest.raises(UpstreamError):
        fetcher.get(chunk, Tally(), origin=server.url)
    second.faults = [refuse(503)]
    assert fetcher.get(other, Tally(), origin=second.url) == b"e" * 4096
    fetcher.close()


def test_no_server_at_all(store: ChunkStore) -> None:
    fetcher = fetcher_of(store)
    chunk = store.put(b"local" * 1000)
    assert fetcher.get(chunk, Tally()) == b"local" * 1000
    with pytest.raises(ChunkMissingError):
        fetcher.get(ChunkId.of(b"no"), Tally())
    fetcher.close()


def test_a_damaged_local_chunk_is_fetched_again(store: ChunkStore, server: Crooked) -> None:
    data = os.urandom(9000)
    chunk = server.add(data)
    store.put(data)
    store.flush()
    pack = next((store.root / "packs").glob("*.pack"))
    raw = bytearray(pack.read_bytes())
    raw[-100] ^= 1
    pack.write_bytes(raw)
    fetcher = fetcher_of(store, server)
    assert fetcher.get(chunk, Tally()) == data
    assert server.requests == 1
    fetcher.drain()
    assert store.get(chunk) == data
    fetcher.close()


def spoil(store: ChunkStore) -> None:
    """Damage the last chunk of its only pack."""
    store.flush()
    pack = next((store.root / "packs").glob("*.pack"))
    raw = bytearray(pack.read_bytes())
    raw[-100] ^= 1
    pack.write_bytes(raw)


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_damaged_chunk_that_nobody_else_has_is_called_damaged(
    store: ChunkStore, server: Crooked, *, looked_at: bool
) -> None:
    """Each time, though the store has dropped it at the first; until it is here again."""
    data = os.urandom(9000)
    chunk = store.put(data)
    spoil(store)
    fetcher = fetcher_of(store, server) if looked_at else fetcher_of(store)
    if looked_at:
        assert fetcher.peek(chunk) is None
    for _ in range(2):
        with pytest.raises(ChunkCorruptError, match=r"damaged in pack \d+ at \d+ and dropped .*; nobody else has it"):
            fetcher.get(chunk, Tally())
    store.put(data)
    store.flush()
    assert fetcher.get(chunk, Tally()) == data
    absent = ChunkId.of(b"never here")
    with pytest.raises(ChunkMissingError):
        fetcher.get(absent, Tally())
    assert not fetcher._damaged
    fetcher.close()


def test_a_full_store_costs_the_cache_not_the_read(
    store: ChunkStore, server: Crooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(frame: Frame) -> None:
        raise StoreFullError("no space")

    monkeypatch.setattr(store, "put_frame", full)
    fetcher = fetcher_of(store, server)
    chunk = server.add(b"f" * 4096)
    assert fetcher.get(chunk, Tally()) == b"f" * 4096
    fetcher.drain()
    assert fetcher.keeper.dropped == 1
    fetcher.close()


def test_memory_is_bounded(store: ChunkStore, server: Crooked) -> None:
    fetcher = fetcher_of(store, server, memory_bytes=10_000)
    chunks = [server.add(os.urandom(4096)) for _ in range(5)]
    fetcher.get_many(chunks, Tally())
    assert fetcher._memory.size_bytes <= 10_000
    fetcher.close()


def test_what_is_loaded_is_read_from_memory_and_leaves_room_for_the_rest(store: ChunkStore, server: Crooked) -> None:
    chunks = [store.put(bytes([number]) * 1000) for number in range(10)]
    store.flush()
    fetcher = fetcher_of(store, server, memory_bytes=10_000)
    fetcher.load([ChunkId.of(b"not here"), *chunks])
    store.index.drop(
        [(chunk, location) for chunk in chunks if (location := store.index.find(chunk))], forget_memos=True
    )
    assert [fetcher.get(chunk, Tally()) for chunk in chunks[:5]] == [bytes([number]) * 1000 for number in range(5)]
    assert not server.requests
    fetcher.close()


def test_reader_frames_are_in_order_with_missing_ones(store: ChunkStore, server: Crooked) -> None:
    chunks = [server.add(os.urandom(5000)) for _ in range(3)]
    absent = ChunkId.of(b"absent")
    reader = fetcher_of(store, server).reader(ChunkId.of(b"image"), Tally())
    frames = list(reader.frames([chunks[2], absent, chunks[0]]))
    assert [frame.id for frame in frames] == [chunks[2], absent, chunks[0]]
    assert frames[1].header.codec is Codec.MISSING
    assert frames[2].open() == server.chunks[chunks[0]]


def test_threads_hammering_overlapping_sets_all_get_theirs(store: ChunkStore, server: Crooked) -> None:
    chunks = [server.add(os.urandom(4096)) for _ in range(60)]
    server.faults = [cut, refuse(503), corrupt, drop, nonsense]
    fetcher = fetcher_of(store, server, memory_bytes=20 * 4096)

    def read(number: int) -> None:
        for start in range(0, 60, 5):
            wanted = [chunks[(start * (number + 1) + step) % 60] for step in range(7)]
            found = fetcher.get_many(wanted, Tally())
            assert all(found[chunk] == server.chunks[chunk] for chunk in wanted)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(read, range(12)))
    fetcher.drain()
    assert fetcher._flights == {}
    assert len(store.missing(chunks)) == 0
    fetcher.close()
