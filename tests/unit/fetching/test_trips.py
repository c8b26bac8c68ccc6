"""Servers that hang: who waits gets the answer of whoever answers, and nobody else is held up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.errors import UpstreamError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.lanes import MOST_SLOTS, Flight, Lane
from imaged.fetching.trips import MOST_TRIPS
from imaged.frame import Frame
from imaged.ids import ChunkId
from tests.support.crooked import FAST, Crooked, CrookedHandler, Fault, Stall, add, refuse

pytest_plugins = ("tests.support.fetching",)


def shapes(stall: Stall) -> dict[str, Fault]:
    return {"no answer": stall.whole, "half an answer": stall.half}


@pytest.mark.parametrize("shape", ["no answer", "half an answer"])
@pytest.mark.parametrize("count", [1, 20])
def test_one_server_hangs_and_the_next_answers(
    fetchers: Callable[..., Fetcher], server: Crooked, second: Crooked, stall: Stall, shape: str, count: int
) -> None:
    """And the one that hung is asked last for a while."""
    chunks, later = add(count, server, second), add(5, server, second)
    server.faults = [shapes(stall)[shape]] * 100
    fetcher = fetchers(server, second)
    found = fetcher.get_many(chunks, Tally())
    assert found == {chunk: server.chunks[chunk] for chunk in chunks}
    asked = server.requests
    for chunk in later:
        assert fetcher.get(chunk, Tally()) == server.chunks[chunk]
    assert server.requests == asked
    assert not stall.release.is_set()


@pytest.mark.parametrize("shape", ["no answer", "half an answer"])
@pytest.mark.parametrize("count", [1, 20])
def test_the_only_server_hangs_once_and_is_asked_again(
    fetchers: Callable[..., Fetcher],
    server: Crooked,
    stall: Stall,
    shape: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("imaged.fetching.link.LEAST_HEDGE_S", 1.0)  # more than a loaded host is late
    chunks = add(count, server)
    fetcher = fetchers(server)
    fetcher.get(add(1, server)[0], Tally())
    before, server.asked = server.requests, []
    server.faults = [shapes(stall)[shape]]
    tally = Tally()
    assert fetcher.get_many(chunks, tally) == {chunk: server.chunks[chunk] for chunk in chunks}
    assert server.requests - before == tally.requests == 2
    if shape == "half an answer" and count > 1:
        assert len(server.asked) < 2 * count, "what came is not asked for again"


def test_a_server_that_hangs_for_good_is_an_error_in_bounded_time(
    fetchers: Callable[..., Fetcher], server: Crooked, stall: Stall
) -> None:
    (chunk,) = add(1, server)
    server.faults = [stall.whole] * 100
    fetcher = fetchers(server, retry=FAST)
    with pytest.raises(UpstreamError, match="no answer from http"):
        fetcher.get(chunk, Tally())
    assert server.requests <= 6
    assert fetcher._flights == {}


def test_who_asks_again_at_once_does_not_wait_as_long_again(
    fetchers: Callable[..., Fetcher], server: Crooked, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does, for a page that it could not read. A moment later the server is asked again."""
    chunk, other = add(2, server)
    server.faults = [stall.whole] * 100
    fetcher = fetchers(server, retry=FAST)
    monkeypatch.setattr("imaged.fetching.fetch._GAVE_UP_S", 60.0)
    asked = []
    for _ in range(3):
        with pytest.raises(UpstreamError, match="no answer from http"):
            fetcher.get(chunk, Tally())
        asked.append(server.asked.count(chunk))
    assert asked == asked[:1] * 3
    server.faults = []
    found = fetcher.resolve([other, chunk], Tally())
    assert found[other] == server.chunks[other]
    assert isinstance(found[chunk], UpstreamError)
    monkeypatch.setattr("imaged.fetching.fetch._GAVE_UP_S", 0.0)
    assert fetcher.get(chunk, Tally()) == server.chunks[chunk]
    assert fetcher._given_up == {}


def test_many_reads_that_hang_keep_nobody_from_reading(
    fetchers: Callable[..., Fetcher], server: Crooked, second: Crooked, stall: Stall
) -> None:
    """More than there are slots, and threads for requests: of a server that never answers again."""
    count = MOST_TRIPS + MOST_SLOTS
    stuck, other = add(count, server), add(1, server, second)[0]
    server.faults = [stall.whole] * 10_000
    fetcher = fetchers(server, second)

    def read(chunk: ChunkId) -> bytes:
        return fetcher.get(chunk, Tally())

    pool = ThreadPoolExecutor(count)
    try:
        reads = [pool.submit(read, chunk) for chunk in stuck]
        assert stall.held.acquire(timeout=10)
        assert fetcher.get(other, Tally()) == server.chunks[other]
        server.faults = []
        assert [one.result(60) for one in reads] == [server.chunks[chunk] for chunk in stuck]
        assert not stall.release.is_set()
    finally:
        stall.release.set()
        pool.shutdown()


def test_a_slow_server_is_not_asked_twice_for_ever(fetchers: Callable[..., Fetcher], server: Crooked) -> None:
    """Once it is known how slow it is."""
    server.delay_s = 0.7
    fetcher = fetchers(server)
    chunks = add(4, server)
    for chunk in chunks:
        fetcher.get(chunk, Tally())
    assert server.requests <= len(chunks) + 1


def test_what_a_server_asks_to_wait_is_no_silence(fetchers: Callable[..., Fetcher], server: Crooked) -> None:
    (chunk,) = add(1, server)
    server.faults = [refuse(429, Retry_After="1")]
    fetcher = fetchers(server)
    started = time.monotonic()
    assert fetcher.get(chunk, Tally()) == server.chunks[chunk]
    assert time.monotonic() - started >= 1
    assert server.requests == 2


def test_a_prefetch_that_hangs_goes_on_and_holds_up_no_read(
    fetchers: Callable[..., Fetcher], server: Crooked, stall: Stall
) -> None:
    chunks = add(40, server)
    server.faults = [stall.half]
    fetcher = fetchers(server)
    prefetch = fetcher.prefetch(chunks, Tally())
    assert stall.held.acquire(timeout=10)
    assert fetcher.get(chunks[-1], Tally()) == server.chunks[chunks[-1]]
    assert prefetch.wait(20)
    assert not stall.release.is_set()
    before = server.requests
    assert fetcher.get_many(chunks, Tally()) == server.chunks
    assert server.requests == before <= 3


def test_answers_of_both_are_one_chunk(
    fetchers: Callable[..., Fetcher], server: Crooked, second: Crooked, stall: Stall, store: ChunkStore
) -> None:
    """The late answer comes after all: nothing is stored twice, nothing is wrong, the connection is not mixed up."""
    chunks = add(10, server, second)
    server.faults = [stall.half]
    fetcher = fetchers(server, second)
    assert fetcher.get_many(chunks, Tally()) == server.chunks
    stall.release.set()
    more = add(10, server, second)
    assert fetcher.get_many(more, Tally()) == {chunk: server.chunks[chunk] for chunk in more}
    fetcher.drain()
    assert store.missing([*chunks, *more]) == []
    assert fetcher._flights == {}


@pytest.mark.parametrize("length", [b"1" * 5000, b"-1", b"many"])
def test_a_length_that_is_none_is_not_a_missing_chunk(
    fetchers: Callable[..., Fetcher], server: Crooked, second: Crooked, length: bytes
) -> None:
    def nonsense(handler: CrookedHandler, body: bytes) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n")
        handler.close_connection = True

    (chunk,) = add(1, server, second)
    server.faults = [nonsense] * 100
    assert fetchers(server, second).get(chunk, Tally()) == second.chunks[chunk]
    with pytest.raises(UpstreamError):
        fetchers(server, retry=FAST).get(chunk_of_nobody(), Tally())


def chunk_of_nobody() -> ChunkId:
    return ChunkId.of(os.urandom(8))


def test_whatever_goes_wrong_in_a_request_is_not_a_missing_chunk(
    fetchers: Callable[..., Fetcher], server: Crooked, second: Crooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chunk,) = add(1, server, second)

    def burst(chunks: object, call: object) -> Iterator[Frame]:
        raise ZeroDivisionError("unheard of")

    fetcher = fetchers(server, retry=FAST)
    monkeypatch.setattr(fetcher.upstreams[0], "fetch", burst)
    with pytest.raises(UpstreamError, match="unheard of"):
        fetcher.get(chunk, Tally())


def test_asking_again_is_bounded(
    fetchers: Callable[..., Fetcher], server: Crooked, stall: Stall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a server takes in one batch, however much is late."""
    monkeypatch.setattr("imaged.fetching.trips.BATCH_LIMIT", 4)
    chunks = add(10, server)
    server.faults = [stall.whole]
    assert fetchers(server).get_many(chunks, Tally()) == server.chunks
    sizes = [len(server.asked), server.requests]
    assert sizes[0] == 2 * len(chunks)
    assert sizes[1] >= 4


def test_what_should_have_gone_along_goes_alone() -> None:
    lane = Lane("")
    late, also = Flight(ChunkId.of(b"late"), Tally()), Flight(ChunkId.of(b"also"), Tally())
    lane.add([late], [also])
    lane.withdraw([late])
    assert not late.queued
    assert lane.take() == ([also], [])
    assert lane.take() is None
