"""The keeper's thread outlives whatever it is given."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.errors import InvalidNameError, NameTakenError, PvisorError, StoreError
from imaged.fetching.keeper import Keeper, VerifiedFrame
from imaged.frame import Codec, Frame, FrameHeader
from imaged.ids import ChunkId


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def keeper(store: ChunkStore) -> Iterator[Keeper]:
    opened = Keeper(store)
    yield opened
    opened.close()


def verified(data: bytes) -> VerifiedFrame:
    frame = Frame.of(data)
    return VerifiedFrame(frame.header, frame.payload, data)


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def kept(keeper: Keeper, store: ChunkStore) -> bool:
    """Whether it still does its work."""
    frame = verified(b"after")
    keeper.keep(frame)
    keeper.drain(10)
    return store.has(frame.id)


def test_a_frame_that_the_store_refuses(keeper: Keeper, store: ChunkStore) -> None:
    keeper.keep(VerifiedFrame(FrameHeader(ChunkId.of(b""), Codec.RAW, 0, 0), b"", b""))
    assert kept(keeper, store)
    assert keeper.dropped == 1


def test_a_name_that_the_store_refuses(keeper: Keeper, store: ChunkStore) -> None:
    ref = Ref(record=ChunkId.of(b""), created_at=0, source="", origin="", chunks=0, stored_bytes=0)
    named = keeper.after(lambda: store.refs.set("n" * 600, ref))
    with pytest.raises(InvalidNameError, match="600 bytes"):
        named.result(10)
    assert kept(keeper, store)


@pytest.mark.parametrize("error", [PvisorError("known"), RuntimeError("unknown")])
def test_an_action_that_fails(keeper: Keeper, store: ChunkStore, error: Exception) -> None:
    def fail() -> None:
        raise error

    failed = keeper.after(fail)
    keeper.drain(10)
    with pytest.raises(PvisorError, match="known"):
        failed.result(0)
    assert kept(keeper, store)


def test_what_fails_for_one_is_no_failure_of_another(keeper: Keeper) -> None:
    """Many pull at once: who is told must be the one whose pull it is."""

    def fail() -> None:
        raise NameTakenError("snapshot 'b' of this host is another one")

    failed, done = keeper.after(fail), keeper.after(lambda: None)
    for _ in range(2):
        keeper.drain(10)
    assert done.result(0) is None
    for _ in range(2):
        with pytest.raises(NameTakenError):
            failed.result(0)


def test_a_store_that_breaks(keeper: Keeper, store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_frame", fail)
        patch.setattr(store, "flush", fail)
        keeper.keep(verified(b"before"))
        with pytest.raises(StoreError, match="broken"):
            keeper.drain(10)
    assert kept(keeper, store)
    assert keeper.dropped == 1


def test_a_store_that_hangs_holds_nobody_for_ever(keeper: Keeper) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert_set(release)

    keeper.after(hold)
    assert_set(held)
    frame = verified(b"frame")
    while not keeper.dropped:
        keeper.keep(frame)
    waits: tuple[Callable[[], None], ...] = (
        lambda: keeper.after(lambda: None, timeout_s=0.05).result(),
        lambda: keeper.drain(0.05),
    )
    for wait in waits:
        with pytest.raises(StoreError, match="did not take"):
            wait()
    release.set()


def test_a_closed_keeper_takes_nothing(store: ChunkStore) -> None:
    keeper = Keeper(store)
    keeper.close()
    keeper.keep(verified(b"late"))
    assert keeper.dropped == 1
    with pytest.raises(StoreError, match="closed"):
        keeper.drain(10)


def test_who_brings_what_nobody_waits_for_waits_for_room(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Keeper(store)
    monkeypatch.setattr(small, "_queue", queue.Queue(2))
    frames = [verified(b"%d" % number) for number in range(200)]
    for frame in frames:
        small.keep(frame, wait_s=20.0)
    small.close()
    assert small.dropped == 0
    assert all(store.has(frame.id) for frame in frames)
