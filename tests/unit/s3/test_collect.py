"""Collections of a bucket in memory, in which each step is told when to happen."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from imaged.chunkstore.fsck import check
from imaged.chunkstore.refs import Ref
from imaged.collection import lastcollection
from imaged.collection.collect import collect
from imaged.errors import BucketUnavailableError
from imaged.ids import ChunkId
from imaged.measure import IncompleteError, measure
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.s3 import collect as bucket_collect
from imaged.s3.store import MirrorStore
from tests.support.memory_objects import MemoryObjects
from tests.support.store_images import DIFF_ID, block_bytes, build_image, build_layer, name_image, noise

Open = Callable[[str], MirrorStore]


def _packs(objects: MemoryObjects) -> set[str]:
    return {key for key in objects.objects if key.endswith(".pack")}


def _look(*stores: MirrorStore) -> None:
    """As the keepers of these servers do it."""
    for store in stores:
        store.bucket.sync.everything()
        store.bucket.renew_if_changed()


def _read(store: MirrorStore, image: ChunkId) -> int:
    """How many chunks an image has, each of them read and verified."""
    return sum(ChunkId.of(store.get(chunk)) == chunk for chunk in reachable(store, image))


def test_what_nothing_names_goes_from_the_bucket(server: Open, objects: MemoryObjects) -> None:
    store = server("a")
    name_image(store, "kept:1", build_image(store, range(5)))
    before = _packs(objects)
    name_image(store, "gone:1", build_image(store, range(100, 110)))
    store.refs.delete("gone:1")
    report = collect(store.root)
    assert report.removed_chunks > 10 and report.removed_packs == 1 and report.freed_bytes > 50_000
    noted = lastcollection.noted(store.index)
    assert noted is not None and noted.freed_bytes == report.freed_bytes
    assert _packs(objects) == before
    assert not [key for key in objects.objects if key.startswith("gc/")]
    assert check(store.root).errors == []
    again = collect(store.root)
    assert (again.removed_chunks, again.removed_packs, again.rewritten_packs) == (0, 0, 0)


def test_what_lives_in_a_pack_that_goes_is_in_another_before(server: Open, objects: MemoryObjects) -> None:
    store, other = server("a"), server("b")
    with store.lease("test"):
        kept = build_image(store, range(2))
    stays = [store.put(block_bytes(seed)) for seed in range(200, 202)]
    for seed in range(300, 330):
        store.put(block_bytes(seed))
    name_image(store, "kept:1", build_image(store, range(200, 202)))
    name_image(store, "also:1", kept)
    other.bucket.sync.everything()
    seen: list[int] = []

    def watch(operation: str, key: str) -> None:
        if operation == "delete" and key.startswith("packs/"):
            objects.before = None
            fresh = server("c")
            seen.append(sum(_read(fresh, ref.record) for _, ref in fresh.refs.items()))

    objects.before = watch
    _look(store, other)
    report = _collect_with(store, other)
    assert report.rewritten_packs == 1 and report.removed_chunks == 30
    assert seen and seen[0] > 0
    # A server that has not noticed finds it in its new place.
    assert all(ChunkId.of(other.get(chunk)) == chunk for chunk in stays)
    assert check(store.root).errors == []


def _collect_with(store: MirrorStore, *others: MirrorStore) -> bucket_collect.CollectReport:
    """A collection for which the other servers do their part."""
    collect(store.root)  # writes the list, and waits for nobody
    _look(*others)
    return collect(store.root)


def test_a_collection_waits_for_the_servers(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    name_image(first, "gone:1", build_image(first, range(10)))
    first.refs.delete("gone:1")
    report = collect(first.root)
    assert report.removed_chunks == 0 and report.waiting_chunks > 0
    assert report.waiting_for == (second.bucket.lease.server,)
    assert len(_packs(objects)) == 1
    _look(second)
    assert collect(first.root).removed_chunks > 0
    assert _packs(objects) == set()


def test_a_server_that_is_gone_is_waited_for_no_longer_than_its_lease(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    name_image(first, "gone:1", build_image(first, range(10)))
    first.refs.delete("gone:1")
    assert collect(first.root).waiting_chunks > 0
    key = second.bucket.lease.key
    body, at = objects.objects[key]
    objects.objects[key] = (body, at - 3700)
    objects._show(key)
    assert collect(first.root).removed_chunks > 0


def test_who_relied_before_is_waited_for_and_loses_nothing(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    image = build_image(first, range(10))
    ref = name_image(first, "gone:1", image)
    second.bucket.sync.everything()
    with second.lease("uploading"):
        assert second.missing(reachable(second, image.id)) == []
        first.refs.delete("gone:1")
        assert collect(first.root).waiting_chunks > 0
        _look(second)
        assert collect(first.root).removed_chunks == 0
        # Long after the list is known here it still counts for who began before.
        assert second.missing(reachable(second, image.id)) == []
        second.refs.set("new:1", ref)
    _look(second)
    assert collect(first.root).removed_chunks == 0
    assert _read(server("c"), image.id) > 10
    assert check(first.root).errors == []


def test_who_comes_later_does_not_rely_on_what_is_condemned(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    image = build_image(first, range(10))
    name_image(first, "gone:1", image)
    first.refs.delete("gone:1")
    collect(first.root)
    _look(second)
    with second.lease("uploading"):
        lacking = second.missing(reachable(second, image.id))
        assert len(lacking) > 10
        with pytest.raises(IncompleteError):
            measure(second, "image", image.id, reachable)
        assert build_image(second, range(10)) == image
        assert second.missing(reachable(second, image.id)) == []
        # The list is finished meanwhile: what was put anew lies elsewhere.
        assert collect(first.root).removed_packs == 1
        name_image(second, "new:1", image)
    _look(second, first)
    assert _read(server("c"), image.id) == _read(first, image.id) > 10
    assert check(first.root).errors == []


def test_a_lease_of_a_client_keeps_what_has_no_name(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    image = build_image(first, range(10))
    name_image(first, "gone:1", image)
    second.bucket.sync.everything()
    lease = second.keeping("a node", [image.id])
    second.bucket.renew()
    first.refs.delete("gone:1")
    assert _collect_with(first, second).removed_chunks == 0
    assert _read(second, image.id) > 10
    lease.release()
    second.bucket.renew()
    assert _collect_with(first, second).removed_chunks > 10


def test_memos_go_before_the_chunks_that_they_promise(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    image = build_image(first, range(5), layers=(DIFF_ID,))
    layer = build_layer(first, range(5))
    first.memos.set(DIFF_ID, layer)
    name_image(first, "gone:1", image)
    _look(second)
    assert second.memos.get(DIFF_ID) == layer
    first.refs.delete("gone:1")
    report = collect(first.root)
    assert report.forgotten_layers == 1
    _look(second)
    assert second.memos.get(DIFF_ID) is None
    assert collect(first.root).removed_chunks > 0


def test_copies_of_one_chunk_become_one(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    image = build_image(first, range(10))
    objects.before = lambda operation, key: None
    second.bucket.catch_up = lambda: None  # type: ignore[method-assign]
    build_image(second, range(10))
    del second.bucket.catch_up  # type: ignore[attr-defined]
    name_image(first, "one:1", image)
    assert len(_packs(objects)) == 2
    _look(first, second)
    report = _collect_with(first, second)
    assert len(_packs(objects)) == 1 and report.kept_chunks > 10
    _look(second)
    assert _read(second, image.id) == _read(server("c"), image.id) > 10
    assert check(first.root).errors == []


def test_many_small_packs_become_one(server: Open, objects: MemoryObjects) -> None:
    store = server("a")
    for seed in range(bucket_collect.SMALL_COUNT):
        name_image(store, f"i{seed}:1", build_image(store, range(seed, seed + 1)))
    assert len(_packs(objects)) >= bucket_collect.SMALL_COUNT
    report = collect(store.root)
    assert report.removed_chunks == 0 and len(_packs(objects)) == 1
    fresh = server("b")
    assert all(_read(fresh, ref.record) for _, ref in fresh.refs.items())


def test_a_killed_collection_is_finished_by_the_next(server: Open, objects: MemoryObjects) -> None:
    """Killed before each of its writes to the bucket, one after the other."""
    store = server("a")
    for seed in range(50, 80):
        store.put(block_bytes(seed))
    kept = build_image(store, range(3))
    name_image(store, "kept:1", kept)
    store.close()
    begin = dict(objects.objects)
    for at in range(20):
        objects.objects = dict(begin)
        objects.list_anew()
        collector = server(f"collector{at}")
        left = [at]

        def kill(operation: str, key: str, left: list[int] = left) -> None:
            if operation in ("put", "delete", "put_new") and not key.startswith("leases/"):
                if not left[0]:
                    raise BucketUnavailableError("killed")
                left[0] -= 1

        objects.before = kill
        killed = False
        try:
            collect(collector.root)
        except BucketUnavailableError:
            killed = True
        objects.before = None
        reader = server(f"reader{at}")
        assert _read(reader, kept.id) > 3
        reader.close()
        collect(collector.root)
        assert _read(collector, kept.id) > 3
        collect(collector.root)  # what was moved twice is there once
        assert _read(collector, kept.id) > 3
        # A pack without a table of contents counts no more; it goes after a day.
        assert len([key for key in objects.objects if key.endswith(".idx")]) == 1
        assert check(collector.root).errors == []
        collector.close()
        if not killed:
            break
    assert 5 <= at < 19


def test_two_collections_at_once_lose_nothing(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    kept = build_image(first, range(3))
    for seed in range(50, 80):
        first.put(block_bytes(seed))
    name_image(first, "kept:1", kept)
    _look(second)
    collect(first.root)
    collect(second.root)
    _look(first, second)
    once = [True]

    def meanwhile(operation: str, key: str) -> None:
        if operation == "delete" and key.endswith(".idx") and once:
            once.clear()
            objects.before = None
            collect(second.root)

    objects.before = meanwhile
    collect(first.root)
    _look(first, second)
    _collect_with(first, second)
    assert _read(server("c"), kept.id) > 3
    assert check(first.root).errors == [] and check(second.root).errors == []


@pytest.mark.parametrize(("seed", "lag"), [(0, 0), (1, 0), (2, 0), (0, 3), (1, 3)])
def test_whatever_servers_do_what_is_named_can_be_read(
    server: Open, objects: MemoryObjects, seed: int, lag: int
) -> None:
    """Three servers convert, publish what another has, take names away and collect, in any order; with `lag`, listings
    are behind by some operations, and names are claimed by conditional PUT."""
    objects.lag, objects.conditional = lag, lag > 0
    chance = random.Random(seed)
    servers = [server(name) for name in "abc"]
    records: list[ImageRecord] = []
    for step in range(40):
        store = chance.choice(servers)
        act = chance.choice(["convert", "convert", "publish", "remove", "collect", "look", "noise"])
        if act == "convert":
            start = chance.randrange(20)
            with store.lease("converting"):
                record = build_image(store, range(start, start + 3))
                name_image(store, f"n{chance.randrange(6)}:1", record)
            records.append(record)
        elif act == "publish" and records:
            record = chance.choice(records)
            with store.lease("publishing"):
                try:
                    measure(store, "image", record.id, reachable)
                except Exception:  # some of it is not here, or on its way out
                    continue
                store.refs.set(
                    f"n{chance.randrange(6)}:1",
                    Ref(record=record.id, created_at=step, source="x", origin="", chunks=1, stored_bytes=1),
                )
        elif act == "remove":
            store.refs.delete(f"n{chance.randrange(6)}:1")
        elif act == "noise":
            store.put(noise(50_000, step))
            store.flush()
        elif act == "collect":
            collect(store.root)
        else:
            _look(store)
    for _ in range(10):
        objects.list("")
    _look(*servers)
    for store in servers:
        collect(store.root)
        _look(*servers)
    fresh = server("fresh")
    names = dict(fresh.refs.items())
    assert names
    for ref in names.values():
        assert _read(fresh, ref.record) > 3
    assert check(fresh.root).errors == []
