"""Fills in one process: what they leave alone, and what is remembered of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuse import fill
from fuse import fill as fill_module
from fuse.fill import Fill, Filler, State
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import StoreError, StoreFullError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.reach import reachable
from tests.support.crooked import Crooked, CrookedHandler, crooked_server
from tests.support.node import wait_for
from tests.support.synthetic import Synthetic, add_image

FAST = RetryPolicy(total_s=2.0, first_wait_s=0.01, longest_wait_s=0.05)
RATE = 1 << 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Crooked]:
    with crooked_server() as crooked:
        yield crooked


@pytest.fixture
def image(server: Crooked, tmp_path: Path) -> Synthetic:
    """Of 3 MB in 80 chunks of data, at the server."""
    with ChunkStore.open(tmp_path / "server") as store:
        made = add_image(store, "app:1", chunks=80, chunk_bytes=36864)
        for chunk in reachable(store, made.id):
            server.chunks[chunk] = store.get(chunk)
    return made


@pytest.fixture
def store(tmp_path: Path, image: Synthetic, server: Crooked) -> Iterator[ChunkStore]:
    """A store that knows the image and has nothing but its record."""
    with ChunkStore.open(tmp_path / "store") as opened:
        with ChunkStore.open(tmp_path / "server") as source:
            ref = source.refs.get("app:1")
        assert ref is not None
        opened.put(image.record.to_bytes())
        opened.refs.set("app:1", ref.__class__.from_json({**ref.to_json(), "origin": server.url}))
        yield opened


@pytest.fixture
def fetcher(store: ChunkStore, server: Crooked) -> Iterator[Fetcher]:
    opened = Fetcher(store, [HttpUpstream(server.url)], retry=FAST, memory_bytes=200_000)
    yield opened
    opened.close()


@pytest.fixture
def filler(fetcher: Fetcher) -> Iterator[Filler]:
    made = Filler(fetcher)
    yield made
    made.close()


def state(filler: Filler, image: Synthetic) -> str:
    return str(filler.status()[str(image.id)]["state"])


def test_it_leaves_memory_to_those_who_read(
    filler: Filler, fetcher: Fetcher, image: Synthetic, server: Crooked, store: ChunkStore
) -> None:
    mine = [server.add(bytes([number]) * 60_000) for number in range(3)]
    fetcher.get_many(mine, Tally())
    held = fetcher._memory.size_bytes
    filler.want(image.id, RATE)
    wait_for(lambda: state(filler, image) == State.COMPLETE)
    assert fetcher._memory.size_bytes == held
    assert all(chunk in fetcher._memory for chunk in mine)
    assert fetcher.keeper.dropped == 0
    assert store.missing(reachable(store, image.id)) == []
    ref = store.refs.get("app:1")
    assert ref is not None
    assert (ref.origin, store.fills.get(image.id)) == ("", None)


def test_it_waits_while_others_fetch(
    filler: Filler, fetcher: Fetcher, image: Synthetic, server: Crooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_LONGEST_YIELD_S", 60.0)
    go_on, asked = threading.Event(), threading.Event()

    def slow(handler: CrookedHandler, body: bytes) -> None:
        asked.set()
        assert go_on.wait(30)
        handler.answer(200, body)

    wanted = server.add(b"wanted" * 1000)
    server.faults = [slow] * 100
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fetcher.get, wanted, Tally())
        assert asked.wait(30)
        filler.want(image.id, RATE)
        wait_for(lambda: state(filler, image) == State.FILLING)
        wait_for(lambda: server.requests > 1)  # the read asks again, as it must
        assert fetcher.quiet_s() == 0.0
        assert set(server.asked) == {wanted}
        server.faults = []
        go_on.set()
        assert read.result(30) == server.chunks[wanted]
    wait_for(lambda: state(filler, image) == State.COMPLETE)


def test_it_goes_on_slowly_where_others_never_stop(
    filler: Filler, fetcher: Fetcher, image: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_LONGEST_YIELD_S", 0.02)
    with fetcher.expect([ChunkId.of(b"never comes")], Tally()):
        filler.want(image.id, RATE)
        wait_for(lambda: state(filler, image) == State.COMPLETE)


def test_what_is_stowed_reaches_who_waits_for_it(fetcher: Fetcher, server: Crooked, store: ChunkStore) -> None:
    go_on = threading.Event()

    def slow(handler: CrookedHandler, body: bytes) -> None:
        assert go_on.wait(30)
        handler.answer(200, body)

    chunk = server.add(b"waited for" * 1000)
    server.faults = [slow] * 10
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fetcher.get, chunk, Tally())
        wait_for(lambda: chunk in fetcher._flights and fetcher._flights[chunk].waiters)
        fetcher.stow(Frame.of(server.chunks[chunk]), server.chunks[chunk])
        assert read.result(10) == server.chunks[chunk]
        assert not go_on.is_set()
        go_on.set()
    assert store.has(chunk)


def test_a_full_store_stops_it_and_a_new_wish_starts_it(
    filler: Filler, image: Synthetic, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(frame: Frame) -> None:
        raise StoreFullError("no room")

    with monkeypatch.context() as full:
        full.setattr(store, "put_frame", refuse)
        filler.want(image.id, RATE)
        wait_for(lambda: state(filler, image) == State.STOPPED)
    assert filler.status()[str(image.id)]["error"] == "no room"
    assert store.fills.ids() == [image.id]
    filler.want(image.id, RATE)
    wait_for(lambda: state(filler, image) == State.COMPLETE)


def test_an_image_without_its_record_is_retried(filler: Filler, store: ChunkStore, server: Crooked) -> None:
    lost = ChunkId.of(b"lost")
    filler.want(lost, RATE)
    wait_for(lambda: filler.status()[str(lost)]["state"] == State.RETRYING)
    assert str(lost) in filler.status()[str(lost)]["error"]
    store.fills.delete(lost)


def test_close_ends_it_at_once_and_keeps_the_wish(fetcher: Fetcher, image: Synthetic, store: ChunkStore) -> None:
    filler = Filler(fetcher)
    filler.want(image.id, 1)
    wait_for(lambda: filler.status()[str(image.id)]["fetched_chunks"])
    filler.close()
    assert store.fills.get(image.id) == 1
    again = Filler(fetcher)
    store.fills.set(image.id, RATE)
    again.resume()
    wait_for(lambda: again.status()[str(image.id)]["state"] == State.COMPLETE)
    again.close()


def test_nothing_ends_the_thread(
    filler: Filler, fetcher: Fetcher, image: Synthetic, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a store that fails while it is asked whether anybody still wishes, nor what nobody thought of."""
    asked = threading.Event()

    def fail(image: ChunkId) -> int | None:
        asked.set()
        raise StoreError("the index went away")

    def gone(fill: object) -> None:
        raise fill_module._GoneError

    def burst(fill: object) -> None:
        raise ZeroDivisionError("unheard of")

    with monkeypatch.context() as failing:
        failing.setattr(filler, "_complete", gone)
        failing.setattr(store.fills, "get", fail)
        filler.want(image.id, RATE)
        wait_for(lambda: state(filler, image) == State.STOPPED)
        assert asked.is_set()
    for name in ("_complete", "_turn"):
        with monkeypatch.context() as failing:
            failing.setattr(filler, name, burst)
            filler.want(image.id, RATE)
            wait_for(lambda: "unheard of" in str(filler.status()[str(image.id)]["error"]))
    filler.want(image.id, RATE)
    wait_for(lambda: state(filler, image) == State.COMPLETE)


def test_a_wish_that_comes_while_the_last_one_ends_is_kept(
    filler: Filler, image: Synthetic, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, calls = store.fills.get, []

    def late(wanted: ChunkId) -> int | None:
        calls.append(wanted)
        if len(calls) == 1:
            store.fills.delete(wanted)
        found = get(wanted)
        if len(calls) == 2:
            filler.want(wanted, RATE)
        return found

    monkeypatch.setattr(store.fills, "get", late)
    filler.want(image.id, RATE)
    wait_for(lambda: state(filler, image) == State.COMPLETE)
    assert len(calls) > 2


# What is remembered


def test_a_wish_lasts_as_long_as_a_name(store: ChunkStore, image: Synthetic, tmp_path: Path) -> None:
    other = add_image(store, "other:1", seed=2, chunks=3)
    store.fills.set(image.id, 7)
    store.fills.set(other.id, 8)
    ref = store.refs.get("app:1")
    assert ref is not None
    store.refs.set("second:1", ref)
    store.refs.delete("app:1")
    assert store.fills.get(image.id) == 7
    moved = store.refs.get("other:1")
    assert moved is not None
    store.refs.set("second:1", moved)
    assert store.fills.get(image.id) is None
    assert store.fills.ids() == [other.id]
    assert store.fills.delete(other.id)
    assert not store.fills.delete(other.id)


def test_a_collection_forgets_fills_of_images_that_are_gone(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        kept = add_image(store, "kept:1", chunks=3)
        store.fills.set(kept.id, 5)
        store.fills.set(ChunkId.of(b"gone"), 5)
    collect(tmp_path / "store")
    with ChunkStore.open(tmp_path / "store") as store:
        assert store.fills.ids() == [kept.id]


def test_complete_images_need_no_server_by_any_name(store: ChunkStore, image: Synthetic) -> None:
    ref = store.refs.get("app:1")
    assert ref is not None
    store.refs.set("second:1", ref)
    store.fills.set(image.id, 7)
    store.refs.complete(image.id)
    assert {ref.origin for _, ref in store.refs.items()} == {""}
    assert store.fills.ids() == []


def test_why_a_fill_was_retried_is_told_only_while_it_waits() -> None:
    told = {
        state: Fill(image=ChunkId.of(b"image"), name="app:1", error="no answer", state=state).to_json()["error"]
        for state in State
    }
    assert [state for state in State if told[state]] == [State.RETRYING, State.STOPPED]
