"""Evictions: what goes, what stays, and what is left when something goes wrong half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.chunkstore import condemned
from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.storelock import CollectionLock
from imaged.collection import eviction
from imaged.collection.eviction import Evictor
from imaged.errors import ChunkMissingError, StoreFullError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.serving import throughstore
from tests.support.store_images import DIFF_ID, block_bytes, build_image, build_layer, name_image, noise

MIB = 1 << 20
SIZE = 60_000
MAX_BYTES = 16 * MIB
ORIGIN = "http://origin"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        opened.uses.record()
        yield opened


def fetch(store: ChunkStore, seeds: range) -> list[ChunkId]:
    """As if a server had given these chunks."""
    chunks = []
    for seed in seeds:
        frame = Frame.of(noise(SIZE, seed))
        store.put_frame(frame)
        store.uses.fetched([frame.id])
        chunks.append(frame.id)
    return chunks


def evict(store: ChunkStore, max_bytes: int = MAX_BYTES) -> Evictor:
    """One that has done its work."""
    store.flush()
    evictor = Evictor(store, max_bytes)
    evictor.make_room(0)
    return evictor


def test_the_least_recently_used_goes(store: ChunkStore) -> None:
    chunks = fetch(store, range(300))
    store.uses.touch(chunks[:20])
    evictor = evict(store)
    present = [index for index, chunk in enumerate(chunks) if store.has(chunk)]
    assert present == [*range(20), *range(300 - (len(present) - 20), 300)]
    assert evictor.used_bytes <= MAX_BYTES * 0.9
    assert evictor.used_bytes > MAX_BYTES * 0.8
    status = evictor.status()
    assert (status.evicted_chunks, status.held_back) == (300 - len(present), "")
    assert all(store.get(chunks[index]) == noise(SIZE, index) for index in present)
    with pytest.raises(ChunkMissingError):
        store.get(chunks[20])
    assert store.absent(chunks) == [chunk for index, chunk in enumerate(chunks) if index not in present]
    # What went can come again, to a place of its own.
    (again,) = fetch(store, range(20, 21))
    assert store.get(again) == noise(SIZE, 20)
    store.flush()
    assert check(store.root).errors == []


def test_uses_outlive_the_process(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store, Evictor(store, 1 << 40):
        chunks = fetch(store, range(300))
        store.uses.touch(chunks[:100])
    with ChunkStore.open(tmp_path / "store") as store:
        store.uses.record()
        evict(store)
        assert [store.has(chunk) for chunk in chunks[:100]] == [True] * 100
        assert [store.has(chunk) for chunk in chunks[100:110]] == [False] * 10


def test_what_only_this_host_has_stays(store: ChunkStore) -> None:
    mine = [store.put(noise(SIZE, seed)) for seed in range(1000, 1300)]
    evictor = evict(store)
    assert [store.has(chunk) for chunk in mine] == [True] * 300
    assert evictor.status().evicted_chunks == 0
    assert "promised" in evictor.status().held_back


def test_names_without_an_origin_lack_nothing_afterwards(store: ChunkStore) -> None:
    local, lazy = build_image(store, range(100)), build_image(store, range(50, 150))
    layer = build_layer(store, range(200, 240))
    for record in (local, lazy):
        store.uses.fetched(reachable(store, record.id))
    store.uses.fetched(store.index.chunks().__next__()[:1])
    store.uses.fetched([chunk for chunk, _ in store.index.chunks()])
    name_image(store, "local:1", local)
    name_image(store, "lazy:1", lazy, origin=ORIGIN)
    store.memos.set(DIFF_ID, layer)
    filler = fetch(store, range(300))
    store.uses.touch(filler)
    evictor = evict(store)
    assert evictor.used_bytes <= MAX_BYTES
    assert store.absent(reachable(store, local.id)) == []
    report = check(store.root)
    assert report.errors == []
    assert store.memos.get(DIFF_ID) == layer
    # Of the lazy one the map is still here, and what it shares.
    lacking = store.absent(reachable(store, lazy.id))
    assert len(lacking) == 50


def test_what_is_being_filled_stays(store: ChunkStore) -> None:
    lazy = build_image(store, range(100))
    store.uses.fetched(reachable(store, lazy.id))
    name_image(store, "lazy:1", lazy, origin=ORIGIN)
    fetch(store, range(300))
    evict(store)
    lacking = store.absent(reachable(store, lazy.id))
    assert len(lacking) == 100
    for seed in range(100):
        store.uses.fetched([store.put(block_bytes(seed))])
    store.fills.set(lazy.id, 1)
    fetch(store, range(300, 500))
    evict(store)
    assert store.absent(reachable(store, lazy.id)) == []


def test_what_was_lazy_before_there_was_a_bound_is_given_away(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        for number in range(3):
            record = build_image(store, range(number * 1000, number * 1000 + 150))
            name_image(store, f"lazy:{number}", record, origin=ORIGIN if number else "")
        store.uses.record()
        evictor = evict(store, Evictor(store, None).used_bytes * 2 // 3)
        assert evictor.status().evicted_chunks > 0
        for number in range(3):
            ref = store.refs.get(f"lazy:{number}")
            assert ref is not None
            assert (number == 0) == (store.absent(reachable(store, ref.record)) == [])


def test_a_lease_or_a_collection_holds_it_back(store: ChunkStore) -> None:
    fetch(store, range(300))
    with store.lease("converting"):
        evictor = evict(store)
        assert evictor.status().evicted_chunks == 0
        assert "converted" in evictor.status().held_back
    with CollectionLock.alone(store.root):
        assert not Evictor(store, MAX_BYTES).make_room(0)
    with store.keeping("a node daemon"):
        assert evict(store).status().evicted_chunks > 0


def test_a_name_that_is_set_meanwhile_is_kept(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = build_image(store, range(100))
    store.uses.fetched(reachable(store, record.id))
    fetch(store, range(300))
    finish = condemned.finish

    def named_now(index: object) -> None:
        finish(index)  # type: ignore[arg-type]
        name_image(store, "new:1", record)

    monkeypatch.setattr(condemned, "finish", named_now)
    evictor = evict(store)
    assert evictor.status().evicted_chunks > 0
    assert store.absent(reachable(store, record.id)) == []
    assert store.missing(reachable(store, record.id)) == []


def test_packs_that_hold_nothing_go_and_those_with_little_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaged.chunkstore.appender.PACK_LIMIT_BYTES", MIB)
    with ChunkStore.open(tmp_path / "store") as store:
        store.uses.record()
        chunks = fetch(store, range(600))
        hot = chunks[::40]
        store.uses.touch(hot)
        evictor = evict(store, MAX_BYTES)
        for _ in range(3):
            evictor.max_bytes = 3 * MIB
            evictor._not_before_s = 0.0
            evictor.make_room(0)
        assert [store.get(chunk) for chunk in hot] == [noise(SIZE, 40 * index) for index in range(len(hot))]
        assert len(list((tmp_path / "store/packs").iterdir())) < 8
        store.flush()
        assert check(store.root).errors == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from imaged.chunkstore import condemned
from imaged.collection import compact, victims
from imaged.collection.eviction import Evictor
from imaged.chunkstore.store import ChunkStore
root, where, after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
module, name = {"condemn": (condemned, "condemn"), "remove": (condemned, "remove"), "punch": (compact, "punch")}[where]
real, count = getattr(module, name), 0
def dying(*arguments, **options):
    global count
    count += 1
    if count > after:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(module, name, dying)
victims._SWEEP_COUNT = 50
with ChunkStore.open(root) as store:
    store.uses.record()
    Evictor(store, 16 << 20).make_room(0)
"""


@pytest.mark.parametrize(("where", "after"), [("condemn", 1), ("remove", 0), ("remove", 2), ("punch", 0)])
def test_a_kill_leaves_a_sound_store(tmp_path: Path, where: str, after: int) -> None:
    root = tmp_path / "store"
    with ChunkStore.open(root) as store, Evictor(store, 1 << 40):
        record = build_image(store, range(50))
        name_image(store, "local:1", record)
        chunks = fetch(store, range(400))
    command = [sys.executable, "-c", _KILLED, str(root), where, str(after)]
    died = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert died.returncode == -signal.SIGKILL
    assert check(root).errors == []
    with ChunkStore.open(root) as store:
        for number, chunk in enumerate(chunks):
            if store.has(chunk):
                assert store.get(chunk) == noise(SIZE, number)
        assert store.absent(reachable(store, record.id)) == []
        store.uses.record()
        # What the killed one took from the index the next one gives back to the disk.
        evictor = evict(store)
        assert evictor.used_bytes <= MAX_BYTES
        assert evictor.used_bytes > MAX_BYTES * 0.7
    assert check(root).errors == []


def test_a_view_of_a_store_with_upstreams_leaves_out_nothing(store: ChunkStore) -> None:
    """What a store of another class does in its own way it does also below `ThroughStore`."""
    public = {name for name, value in vars(ChunkStore).items() if callable(value) and not name.startswith("_")}
    assert public - set(vars(throughstore.ThroughStore)) - set(throughstore._AS_BELOW) <= {"open", "open_locked"}


def test_what_could_not_be_noted_as_given_is_noted_by_the_next(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, which is why there is an eviction, must not keep what a lazy image left behind for ever."""
    record = build_image(store, range(300))
    name_image(store, "lazy:1", record, origin=ORIGIN)

    def full(chunks: object) -> None:
        raise StoreFullError("no space")

    store.flush()
    evictor = Evictor(store, Evictor(store, None).used_bytes * 2 // 3)
    with monkeypatch.context() as patch:
        patch.setattr(store.uses, "adopt", full)
        patch.setattr(eviction, "_PAUSE_S", 0.0)
        assert not evictor.make_room(0)
    assert evictor.make_room(0)
    assert evictor.status().evicted_chunks > 0
