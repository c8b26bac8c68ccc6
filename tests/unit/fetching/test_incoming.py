"""Chunks that come without being waited for: promises, prefetches, and what becomes of them when they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkMissingError
from imaged.fetching.download import Download
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.incoming import Prefetch
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import ChunkId
from tests.support.crooked import FAST, Crooked, CrookedHandler, add, corrupt, cut, refuse

pytest_plugins = ("tests.support.fetching",)


@pytest.fixture
def fetcher(store: ChunkStore, server: Crooked) -> Iterator[Fetcher]:
    opened = Fetcher(store, [HttpUpstream(server.url)], retry=FAST)
    yield opened
    opened.close()


def joined(fetcher: Fetcher, chunk: ChunkId) -> bool:
    flight = fetcher._flights.get(chunk)
    return flight is not None and bool(flight.waiters)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("waited in vain")


def test_wanted_is_what_is_neither_here_nor_under_way(fetcher: Fetcher, store: ChunkStore, server: Crooked) -> None:
    stored, held, *rest = add(5, server)
    store.put(server.chunks[stored])
    fetcher.get(held, Tally())
    with fetcher.expect([rest[2], stored, held, rest[0], rest[2]], Tally()) as first:
        assert first.wanted == (rest[2], rest[0])
        with fetcher.expect(rest, Tally()) as second:
            assert second.wanted == (rest[1],)
    with fetcher.expect(rest, Tally()) as third:
        assert third.wanted == tuple(rest)
    assert fetcher._flights == {}


@pytest.mark.usefixtures("no_hedges")
def test_a_read_joins_what_is_promised(fetcher: Fetcher, store: ChunkStore, server: Crooked) -> None:
    (chunk,) = add(1, server)
    tally, mine = Tally(), Tally()
    with fetcher.expect([chunk], mine) as incoming, ThreadPoolExecutor(1) as pool:
        read = pool.submit(fetcher.get, chunk, tally)
        until(lambda: joined(fetcher, chunk))
        incoming.arrived(Frame.of(server.chunks[chunk]), server.url)
        assert read.result(10) == server.chunks[chunk]
    fetcher.drain()
    assert store.get(chunk) == server.chunks[chunk]
    assert (server.requests, tally.requests, mine.requests) == (0, 0, 0)
    assert (tally.fetched_chunks, mine.fetched_chunks) == (0, 1)


@pytest.mark.parametrize("what", ["close", "corrupt", "missing", "silence"])
def test_a_promise_that_is_not_kept_is_no_error_of_the_read(
    fetcher: Fetcher,
    server: Crooked,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if what != "silence":  # else a loaded host may seem silent, too
        monkeypatch.setattr("imaged.fetching.link.FIRST_HEDGE_S", 60.0)
    (chunk,) = add(1, server)
    tally = Tally()
    incoming = fetcher.expect([chunk], Tally())
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fetcher.get, chunk, tally)
        until(lambda: joined(fetcher, chunk))
        if what == "close":
            incoming.close()
        elif what == "corrupt":
            frame = Frame.of(server.chunks[chunk])
            incoming.arrived(Frame(frame.header, frame.payload[:-1] + bytes([frame.payload[-1] ^ 1])), server.url)
            assert f"{server.url}: chunk {chunk}: stored bytes do not match" in caplog.text
        elif what == "missing":
            incoming.arrived(Frame.missing(chunk), server.url)
        assert read.result(10) == server.chunks[chunk]
    incoming.close()
    assert (server.requests, tally.requests) == (1, 1)


def test_a_promise_that_is_silent_is_waited_for_once(fetcher: Fetcher, server: Crooked) -> None:
    """And what it brings in the end is taken."""
    chunks = add(5, server)
    with fetcher.expect(chunks, Tally()) as incoming:
        assert fetcher.get(chunks[0], Tally()) == server.chunks[chunks[0]]
        until(lambda: fetcher._flights == {})
        incoming.arrived(Frame.of(server.chunks[chunks[1]]), server.url)
        assert fetcher.get(chunks[1], Tally()) == server.chunks[chunks[1]]
    assert server.requests == 1


def test_a_promise_of_what_nobody_has(fetcher: Fetcher, server: Crooked) -> None:
    chunk = ChunkId.of(b"nowhere")
    prefetch = fetcher.prefetch([chunk], Tally())
    with pytest.raises(ChunkMissingError):
        fetcher.get(chunk, Tally())
    assert prefetch.wait(10)
    assert fetcher._flights == {}


def test_a_prefetch_is_one_request_in_order_of_what_is_not_here(
    fetcher: Fetcher, store: ChunkStore, server: Crooked
) -> None:
    chunks = add(100, server)
    store.put(server.chunks[chunks[3]])
    tally = Tally()
    assert fetcher.prefetch(chunks, tally).wait(20)
    assert server.requests == tally.requests == 1
    assert server.asked == [*chunks[:3], *chunks[4:]]
    server.faults = [refuse(500)] * 1000
    assert fetcher.get_many(chunks, Tally()) == server.chunks
    fetcher.drain()
    assert store.missing(chunks) == []


@pytest.mark.parametrize("fault", [cut, corrupt, refuse(503)], ids=["cut", "corrupt", "503"])
def test_a_prefetch_goes_on_after_a_fault(fetcher: Fetcher, server: Crooked, fault: object) -> None:
    chunks = add(20, server)
    server.faults = [fault]  # type: ignore[list-item]
    tally = Tally()
    assert fetcher.prefetch(chunks, tally).wait(20)
    assert (server.requests, tally.requests) == (2, 2)
    assert fetcher.get_many(chunks, Tally()) == server.chunks
    assert server.requests == 2


def test_a_prefetch_from_a_server_that_is_down_ends(store: ChunkStore, server: Crooked) -> None:
    fetcher = Fetcher(store, [HttpUpstream("http://127.0.0.1:9")], retry=FAST)
    prefetch = fetcher.prefetch(add(20, server), Tally())
    assert prefetch.wait(20)
    assert fetcher._flights == {}
    fetcher.close()


def test_a_demand_read_never_waits_behind_a_prefetch(fetcher: Fetcher, server: Crooked) -> None:
    """However many there are, and however long they take."""
    release = threading.Event()

    def wait(handler: CrookedHandler, body: bytes) -> None:
        release.wait(30)
        handler.answer(200, body)

    sets = [add(3, server) for _ in range(20)]
    (other,) = add(1, server)
    server.faults = [wait] * 20
    prefetches = [fetcher.prefetch(chunks, Tally()) for chunks in sets]
    until(lambda: server.requests == 20)
    assert fetcher.get(other, Tally()) == server.chunks[other]
    assert not any(prefetch.wait(0) for prefetch in prefetches)
    release.set()
    assert all(prefetch.wait(20) for prefetch in prefetches)


def test_a_cancelled_prefetch_ends_and_leaves_what_came(fetcher: Fetcher, server: Crooked) -> None:
    release = threading.Event()
    chunks = add(40, server)
    half = threading.Event()

    def stop_half_way(handler: CrookedHandler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        half.set()
        release.wait(30)

    server.faults = [stop_half_way]
    prefetch = fetcher.prefetch(chunks, Tally())
    assert half.wait(20)
    until(lambda: chunks[0] in fetcher._memory)
    prefetch.cancel()
    assert prefetch.wait(20)
    release.set()
    server.requests = 0
    assert fetcher.get(chunks[0], Tally()) == server.chunks[chunks[0]]
    assert server.requests == 0
    assert fetcher.get_many(chunks, Tally()) == server.chunks


def test_who_cancels_before_there_is_a_download_ends_it(
    fetcher: Fetcher, server: Crooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = add(20, server)
    made = fetcher.download
    prefetches: list[Prefetch] = []
    ready = threading.Event()

    def cancelled_meanwhile(chunks: Sequence[ChunkId], tally: Tally) -> Download:
        ready.wait(20)
        prefetches[0].cancel()
        return made(chunks, tally)

    monkeypatch.setattr(fetcher, "download", cancelled_meanwhile)
    prefetches.append(fetcher.prefetch(chunks, Tally()))
    ready.set()
    assert prefetches[0].wait(20)
    assert server.requests == 0
    assert fetcher._flights == {}
