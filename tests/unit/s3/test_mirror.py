from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import disk_bytes, pack_path
from imaged.chunkstore.refs import Ref, RefTable
from imaged.chunkstore.rows import FOREIGN_PACKS
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.collection.eviction import Evictor
from imaged.errors import (
    BucketUnavailableError,
    ChunkCorruptError,
    ChunkError,
    ChunkMissingError,
    StoreError,
    StoreReadOnlyError,
)
from imaged.frame import HEADER_BYTES
from imaged.ids import ChunkId
from imaged.s3.address import BucketAddress
from imaged.s3.mirror import Mirror, make_mirror
from imaged.s3.names import Names
from imaged.s3.store import MirrorStore
from tests.support.memory_objects import MemoryObjects
from tests.support.store_images import build_image, name_image

Open = Callable[[str], MirrorStore]
_random = random.Random(7)


def _data(size: int = 5000) -> bytes:
    return _random.randbytes(size)


def _ref(record: ChunkId) -> Ref:
    return Ref(record=record, created_at=1, source="x", origin="", chunks=1, stored_bytes=1)


def _packs(objects: MemoryObjects) -> list[str]:
    return sorted(key for key in objects.objects if key.endswith(".pack"))


def test_what_one_server_flushed_another_reads(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    data = _data()
    chunk = first.put(data)
    assert _packs(objects) == []
    first.flush()
    assert second.get(chunk) == data
    assert second.missing([chunk]) == [] and second.absent([chunk]) == []
    assert next(iter(server("c").frames([chunk]))).open() == data


def test_nothing_is_uploaded_when_nothing_is_new(server: Open, objects: MemoryObjects) -> None:
    store = server("a")
    store.put(b"x" * 100)
    store.flush()
    before = len(_packs(objects))
    store.put(b"x" * 100)
    store.flush()
    store.refs.set("one", _ref(store.put(b"x" * 100)))
    assert len(_packs(objects)) == before == 1


def test_an_empty_server_reads_with_few_requests_and_keeps_what_it_read(server: Open, objects: MemoryObjects) -> None:
    first = server("a")
    chunks = [first.put(_data(20_000)) for _ in range(60)]
    first.flush()
    second = server("b")
    objects.calls.clear()
    assert [frame.id for frame in second.frames(chunks)] == chunks
    reads = [call for call in objects.calls if call[0] == "read"]
    assert len(reads) == 1
    objects.fail()
    for chunk in chunks:
        assert ChunkId.of(second.get(chunk)) == chunk


def test_a_damaged_local_copy_is_fetched_again(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    data = _data()
    chunk = first.put(data)
    first.flush()
    assert second.get(chunk) == data
    place = second.index.find(chunk)
    assert place is not None and place.pack >= FOREIGN_PACKS
    for at in (place.offset + HEADER_BYTES + 7, place.offset + 3):
        with pack_path(second.root, place.pack).open("r+b") as file:
            file.seek(at)
            file.write(b"damaged")
        assert second.get(chunk) == data
        assert next(iter(second.frames([chunk]))).open() == data


def test_damage_in_the_bucket_is_told_and_can_be_put_right(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    data = _data()
    chunk = first.put(data)
    first.memos.set("sha256:1", chunk)
    key = _packs(objects)[0]
    body, at = objects.objects[key]
    objects.objects[key] = (body[:200] + b"damaged" + body[207:], at)
    second.bucket.sync.everything()
    with pytest.raises(ChunkCorruptError):
        second.get(chunk)
    assert second.missing([chunk]) == [chunk]
    assert not [key for key in objects.objects if key.startswith("memos/")]
    second.put(data)
    second.flush()
    assert second.get(chunk) == data


def test_a_server_that_does_not_answer_is_no_reason_to_call_anything_missing(
    server: Open, objects: MemoryObjects
) -> None:
    first, second = server("a"), server("b")
    chunk = first.put(_data())
    first.flush()
    unknown = first.put(_data())
    second.bucket.catch_up()
    first.flush()
    objects.fail()
    for one in (chunk, unknown):
        with pytest.raises(BucketUnavailableError):
            second.get(one)
        with pytest.raises(BucketUnavailableError):
            list(second.frames([chunk, one]))
    for ask in (second.missing, second.absent, second.prepare):
        with pytest.raises(BucketUnavailableError):
            ask([unknown])
    second.put(_data())
    with pytest.raises(BucketUnavailableError):
        second.flush()
    with pytest.raises(BucketUnavailableError):
        second.refs.set("one", _ref(chunk))
    objects.before = None
    second.flush()
    assert second.refs.items() == [] and second.get(chunk)


def test_a_pack_that_is_lost_is_a_clear_error(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    chunk = first.put(_data())
    first.flush()
    second.bucket.catch_up()
    pack = _packs(objects)[0]
    objects.delete(pack)
    with pytest.raises(ChunkError, match="no such object"):
        second.get(chunk)
    objects.delete(pack.replace(".pack", ".idx"))
    with pytest.raises(ChunkError):
        second.get(chunk)
    with pytest.raises(ChunkMissingError):
        second.get(chunk)
    assert second.missing([chunk]) == [chunk]


def test_what_only_another_process_of_this_host_has_is_put_again(server: Open, objects: MemoryObjects) -> None:
    """Until it is uploaded: who knows whether it ever is."""
    first, other = server("a"), server("a")
    data = _data()
    chunk = first.put(data)
    first._writer.flush()
    assert other.get(chunk) == data
    assert other.missing([chunk]) == [chunk] and first.missing([chunk]) == []
    other.put(data)
    other.flush()
    assert len(_packs(objects)) == 1
    assert other.missing([chunk]) == [] and first.missing([chunk]) == []
    assert server("b").get(chunk) == data


def test_what_a_killed_process_committed_is_uploaded_by_the_next(
    server: Open, objects: MemoryObjects, tmp_path: Path
) -> None:
    make_mirror(tmp_path / "a", BucketAddress("images", "p"))
    killed = ChunkStore.open(tmp_path / "a")
    data = _data()
    chunk = killed.put(data)
    killed._writer.flush()
    killed._writer._appender.close()  # as the kernel does
    assert _packs(objects) == []
    again = server("a")
    assert len(_packs(objects)) == 1
    assert server("b").get(chunk) == data and again.missing([chunk]) == []
    killed.close()


@pytest.mark.parametrize("at", [".pack", ".idx"])
def test_an_upload_that_was_broken_off_is_finished_as_the_same_objects(
    server: Open, objects: MemoryObjects, at: str
) -> None:
    store = server("a")
    chunk = store.put(_data())

    def broken(operation: str, key: str) -> None:
        if operation == "put" and key.endswith(at):
            raise BucketUnavailableError("no answer")

    objects.before = broken
    with pytest.raises(BucketUnavailableError):
        store.flush()
    seen = set(_packs(objects))
    assert server("b").absent([chunk]) == [chunk]
    objects.before = None
    store.flush()
    assert len(_packs(objects)) == 1 and seen <= set(_packs(objects))
    assert server("b").missing([chunk]) == []


def test_an_import_that_was_broken_off_is_finished(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    chunk = first.put(_data())
    first.flush()
    second.bucket.packs.import_new([_packs(objects)[0].removeprefix("packs/").removesuffix(".pack")])
    assert second.get(chunk)
    assert len(second.bucket.packs.all()) == 1 and second.df().packs == 1


def test_names_memos_profiles_and_origins_are_everywhere(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    chunk = first.put(_data())
    first.refs.set("repo/one:1", _ref(chunk))
    first.snapshots.set("snap", SnapshotRef(record=chunk, created_at=1))
    first.memos.set("sha256:1", chunk)
    first.profiles.merge(chunk, [chunk])
    first.origins.set(chunk, "http://origin")
    assert second.refs.get("repo/one:1") == _ref(chunk)  # looked for, as it is not known
    second.bucket.sync.everything()
    assert second.snapshots.get("snap") is not None
    assert second.memos.get("sha256:1") == chunk
    assert second.profiles.get(chunk) == first.profiles.get(chunk)
    assert second.origins.get(chunk) == "http://origin"
    assert not any((store.root / RefTable.COPY_NAME).exists() for store in (first, second))  # the bucket has them
    assert second.refs.delete("repo/one:1") and not second.refs.delete("repo/one:1")
    second.memos.delete("sha256:1")
    second.profiles.delete(chunk)
    second.origins.delete(chunk)
    first.bucket.sync.everything()
    assert first.refs.items() == [] and first.memos.get("sha256:1") is None
    assert first.profiles.get(chunk) is None and first.origins.get(chunk) is None
    assert server("c").refs.items() == []


def test_a_name_moves_only_from_what_its_writer_thinks_it_is(server: Open) -> None:
    first, second = server("a"), server("b")
    one, two, three = (first.put(_data()) for _ in range(3))
    first.snapshots.set("snap", SnapshotRef(record=one, created_at=1))
    assert second.snapshots.get("snap") is not None
    assert first.snapshots.replace("snap", SnapshotRef(record=two, created_at=2), over=one)
    assert not second.snapshots.replace("snap", SnapshotRef(record=three, created_at=3), over=one)
    held = second.snapshots.get("snap")
    assert held is not None and held.record == two


def test_reading_only_writes_nothing(server: Open, objects: MemoryObjects, tmp_path: Path) -> None:
    first = server("a")
    chunk = first.put(_data())
    first.refs.set("one", _ref(chunk))
    before = dict(objects.objects)
    make_mirror(tmp_path / "r", BucketAddress("images", "p"))
    with ChunkStore.open(tmp_path / "r", readonly=True) as reader:
        assert reader.get(chunk) and reader.df().chunks == 1
        with pytest.raises(StoreReadOnlyError):
            reader.put(b"x")
        with pytest.raises(StoreError):
            reader.refs.set("two", _ref(chunk))
    assert objects.objects == before


def test_a_mirror_is_of_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mirror(tmp_path, BucketAddress("images", "p"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere:1")
    with pytest.raises(StoreError, match="mirrors s3://images/p at AWS"):
        Mirror.read(tmp_path)


def test_the_cache_is_given_back_and_nothing_is_lost(server: Open, objects: MemoryObjects) -> None:
    first = server("a")
    chunks = [first.put(_data(40_000)) for _ in range(50)]
    first.flush()
    used = sum(disk_bytes(first.root, number) for number in (1,))
    assert used > 50 * 40_000
    first.uses.record()
    first.uses.touch([chunks[7]])
    first.uses.flush()
    freed = first.evict_copies(used // 2)
    assert freed is not None and used // 2 <= freed < used * 3 // 4
    assert first.missing(chunks) == []
    objects.calls.clear()
    first.get(chunks[7])  # used last
    assert objects.calls == []
    assert all(ChunkId.of(first.get(chunk)) == chunk for chunk in chunks)
    assert objects.calls


def test_what_the_bucket_does_not_have_is_not_given_back(server: Open) -> None:
    store = server("a")
    chunk = store.put(_data(40_000))
    store._writer.flush()
    assert store.evict_copies(1 << 20) == 0
    assert store.get(chunk)


def test_fsck_finds_what_is_wrong_in_the_bucket(server: Open, objects: MemoryObjects, tmp_path: Path) -> None:
    store = server("a")
    name_image(store, "one:1", build_image(store, range(3)))
    assert check(store.root).errors == []
    key = _packs(objects)[0]
    body, at = objects.objects[key]
    objects.objects[key] = (body[:200] + b"damaged" + body[207:], at)
    report = check(store.root)
    assert any("not sound" in error for error in report.errors) and report.hints
    del objects.objects[key]
    assert any("no such object" in error for error in check(store.root).errors)


def test_a_mirror_is_made_anew_with_what_only_it_had(server: Open, objects: MemoryObjects, tmp_path: Path) -> None:
    make_mirror(tmp_path / "a", BucketAddress("images", "p"))
    with ChunkStore.open(tmp_path / "a") as store:
        there = store.put(_data())
        store.refs.set("one", _ref(there))
        here = store.put(_data())
        store._writer.flush()
        store._commit_s = None  # as when it is killed
    (tmp_path / "a/index.mdb").write_bytes(b"nonsense" * 4096)
    report = check(tmp_path / "a", rebuild=True)
    assert report.rebuilt and any("1 chunks that only this host had" in note for note in report.notes)
    other = server("b")
    assert other.missing([there, here]) == [] and other.refs.get("one") == _ref(there)


def test_no_name_is_set_above_what_was_collected_while_the_bucket_was_out_of_reach(
    server: Open, objects: MemoryObjects
) -> None:
    first, second = server("a"), server("b")
    ref = name_image(first, "one:1", build_image(first, range(3)))
    second.bucket.sync.everything()
    (second.root / "bucketlease.json").unlink()  # it could not be renewed
    objects.delete(second.bucket.lease.key)
    first.refs.delete("one:1")
    assert collect(first.root).removed_chunks > 0
    with pytest.raises(StoreError):
        second.refs.set("two:1", ref)
    second.bucket.sync.everything()
    assert second.refs.items() == []


def test_what_was_read_just_now_is_evicted_last(server: Open, objects: MemoryObjects) -> None:
    """Though it is not noted yet: that is done every half minute."""
    first = server("a")
    old = [first.put(_data(60_000)) for _ in range(20)]
    first.flush()
    new = [first.put(_data(60_000)) for _ in range(20)]
    first.flush()
    second = server("b")
    second.uses.record()
    evictor = Evictor(second, 1 << 40)
    list(second.frames(old))
    second.uses.flush()
    list(second.frames(new))
    evictor.max_bytes = evictor.used_bytes * 3 // 4
    assert evictor.make_room(0)
    objects.calls.clear()
    list(second.frames(new))
    assert objects.calls == []
    list(second.frames(old))
    assert objects.calls
    assert evictor.status().held_back == ""


def test_what_holds_back_an_eviction_is_told(server: Open) -> None:
    store = server("a")
    for _ in range(20):
        store.put(_data(60_000))
    store._writer.flush()
    evictor = Evictor(store, 60_000)
    assert not evictor.make_room(0)
    assert "not in the bucket" in evictor.status().held_back


def _listings(objects: MemoryObjects) -> int:
    """Of all names, since the last time."""
    count = objects.calls.count(("list", "refs/"))
    objects.calls.clear()
    return count


def test_names_are_listed_only_when_one_has_changed(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    one, two = (first.put(_data()) for _ in range(2))
    often = second.bucket.sync.often
    first.refs.set("one:1", _ref(one))
    often()
    assert second.refs.items() == [("one:1", _ref(one))]
    _listings(objects)
    often()
    often()
    assert _listings(objects) == 0
    first.refs.set("two:1", _ref(two))
    first.refs.delete("one:1")
    assert _listings(objects) == 0
    often()
    assert [name for name, _ in second.refs.items()] == ["two:1"]
    assert _listings(objects) == 1
    second.bucket.sync.everything()
    assert _listings(objects) == 1


def test_a_change_that_nobody_was_told_of_is_found_by_a_whole_look(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    first.refs.set("one:1", _ref(first.put(_data())))
    second.bucket.sync.often()

    def before(operation: str, key: str) -> None:
        if (operation, key) == ("put", "refs.changed"):
            raise BucketUnavailableError("no answer")

    objects.before = before
    first.refs.set("two:1", _ref(first.put(_data())))  # that is true, and said to be
    objects.before = None
    second.bucket.sync.often()
    assert [name for name, _ in second.refs.items()] == ["one:1"]
    second.bucket.sync.everything()
    assert [name for name, _ in second.refs.items()] == ["one:1", "two:1"]


def test_names_that_could_not_be_read_are_listed_again(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    first.refs.set("one:1", _ref(first.put(_data())))
    second.bucket.sync.often()
    first.refs.set("two:1", _ref(first.put(_data())))

    def before(operation: str, key: str) -> None:
        if operation == "get" and key.startswith("refs/"):
            raise BucketUnavailableError("no answer")

    objects.before = before
    with pytest.raises(BucketUnavailableError):
        second.bucket.sync.often()
    objects.before = None
    second.bucket.sync.often()
    assert [name for name, _ in second.refs.items()] == ["one:1", "two:1"]


def test_names_are_listed_for_as_long_as_listings_may_lag(objects: MemoryObjects) -> None:
    now_s = [100.0]
    names = Names(objects, settle_s=30.0, clock=lambda: now_s[0])
    names.tell()
    seen = []
    for now_s[0] in (100.0, 101.0, 129.0, 131.0, 200.0):
        with names.all(whole=False) as entries:
            seen.append(entries is not None)
    assert seen == [True, True, True, False, False]


def test_a_bucket_in_which_nobody_tells_is_listed_each_time(objects: MemoryObjects) -> None:
    names = Names(objects, settle_s=0.0)
    for _ in range(3):
        with names.all(whole=False) as entries:
            assert entries == []
