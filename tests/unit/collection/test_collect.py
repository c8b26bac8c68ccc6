"""Garbage collection, and the walk it marks by."""

from __future__ import annotations

from pathlib import Path

import pytest

from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import PACKS_DIRECTORY, pack_numbers, pack_path
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import ChunkMissingError, NotFoundError, StoreError
from imaged.frame import HEADER_BYTES
from imaged.ids import ChunkId
from imaged.reach import Marker, reachable
from tests.support.store_images import DIFF_ID, block_bytes, build_image, build_layer, name_image, noise


def drop(store: ChunkStore, chunk: ChunkId) -> None:
    location = store.index.find(chunk)
    assert location is not None
    store.index.drop([(chunk, location)], forget_memos=False)


def test_reachable_is_everything_once(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(10))
        found = list(reachable(store, record.id))
        assert len(found) == len(set(found)) == store.df().chunks
        assert found[0] == record.id
        assert {ChunkId.of(block_bytes(seed)) for seed in range(10)} < set(found)
        # Ten data chunks, their leaf and root; metadata chunk, its leaf and root; the record.
        assert len(found) == 16


def test_reachable_needs_the_structure(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(2))
        drop(store, record.data)
        with pytest.raises(ChunkMissingError):
            list(reachable(store, record.id))


def test_marker_names_what_is_missing_for_every_image(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        first, second = build_image(store, range(4)), build_image(store, range(4), layers=(DIFF_ID,))
        gone = ChunkId.of(block_bytes(2))
        drop(store, gone)
        marker = Marker(store)
        assert marker.image(first.id) == (first, {gone})
        assert marker.image(second.id) == (second, {gone})
        assert gone not in marker.kept
        assert ChunkId.of(block_bytes(3)) in marker.kept
        assert marker.image(ChunkId.of(b"none")) == (None, {ChunkId.of(b"none")})


def test_what_no_name_keeps_goes(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        kept, dropped = build_image(store, range(40)), build_image(store, range(20, 60))
        name_image(store, "kept:1", kept)
        name_image(store, "dropped:1", dropped)
    report = collect(tmp_path)
    assert (report.removed_chunks, report.rewritten_packs) == (0, 0)
    with ChunkStore.open(tmp_path) as store:
        store.refs.delete("dropped:1")
    report = collect(tmp_path)
    assert report.removed_chunks == 20 + 2 + 3 + 1
    with ChunkStore.open(tmp_path) as store:
        assert [store.get(ChunkId.of(block_bytes(seed))) for seed in range(40)] == [block_bytes(n) for n in range(40)]
        assert not store.has(ChunkId.of(block_bytes(50)))
        assert not store.has(dropped.id)
    assert check(tmp_path).errors == []


def test_sparse_packs_are_rewritten_and_empty_ones_removed(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as one, ChunkStore.open(tmp_path) as two:
        garbage = [one.put(noise(50_000, seed)) for seed in range(10)]
        record = build_image(one, range(5))
        name_image(one, "kept:1", record)
        two.put(noise(60_000, 99))
    before = sum(pack_path(tmp_path, n).stat().st_size for n in pack_numbers(tmp_path))
    report = collect(tmp_path)
    after = sum(pack_path(tmp_path, n).stat().st_size for n in pack_numbers(tmp_path))
    assert (report.removed_packs, report.rewritten_packs, report.removed_chunks) == (1, 1, 11)
    assert report.freed_bytes == before - after > 500_000
    with ChunkStore.open(tmp_path) as store:
        assert len(set(reachable(store, record.id))) == store.df().chunks
        assert store.df().dead_bytes == 0
        assert store.missing(garbage) == garbage
    assert check(tmp_path).errors == []
    again = collect(tmp_path)
    assert (again.removed_chunks, again.rewritten_packs, again.removed_packs, again.freed_bytes) == (0, 0, 0, 0)


def test_a_damaged_chunk_stops_the_rewrite_of_its_pack(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        store.put(noise(500_000))
        record = build_image(store, range(5))
        name_image(store, "kept:1", record)
        location = store.index.find(ChunkId.of(block_bytes(2)))
        assert location is not None
    with pack_path(tmp_path, location.pack).open("r+b") as file:
        file.seek(location.offset + HEADER_BYTES + 40)
        file.write(b"damage")
    report = collect(tmp_path)
    assert report.damaged_packs == (location.pack,)
    assert report.rewritten_packs == 0
    with ChunkStore.open(tmp_path) as store:
        assert store.get(ChunkId.of(block_bytes(3))) == block_bytes(3)
    assert len(check(tmp_path).errors) == 1


def test_layer_memos_live_with_the_image(tmp_path: Path) -> None:
    other = DIFF_ID.replace("0", "1")
    with ChunkStore.open(tmp_path) as store:
        store.memos.set(DIFF_ID, build_layer(store, range(8)))
        store.memos.set(other, build_layer(store, range(100, 108)))
        name_image(store, "kept:1", build_image(store, range(4), layers=(DIFF_ID,)))
    report = collect(tmp_path)
    assert report.forgotten_layers == 1
    with ChunkStore.open(tmp_path) as store:
        assert [diff_id for diff_id, _ in store.memos.items()] == [DIFF_ID]
        # A file that an upper layer deleted is in no image, but the memo promises it.
        assert store.has(ChunkId.of(block_bytes(7)))
        assert not store.has(ChunkId.of(block_bytes(107)))


def test_a_memo_that_lacks_a_chunk_is_forgotten(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        store.memos.set(DIFF_ID, build_layer(store, range(8)))
        name_image(store, "kept:1", build_image(store, range(4), layers=(DIFF_ID,)))
        drop(store, ChunkId.of(block_bytes(6)))
    assert [error for error in check(tmp_path).errors if error.startswith("layer")]
    assert collect(tmp_path).forgotten_layers == 1
    assert check(tmp_path).errors == []


def test_a_lazy_image_may_lack_chunks_and_another_may_not(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(4))
        name_image(store, "lazy:1", record, origin="http://127.0.0.1:1")
        store.origins.set(record.data, "http://127.0.0.1:1")
        store.origins.set(ChunkId.of(b"gone"), "http://127.0.0.1:1")
        store.profiles.merge(record.data, [ChunkId.of(block_bytes(1))])
        store.profiles.merge(ChunkId.of(b"gone"), [ChunkId.of(block_bytes(1))])
        drop(store, ChunkId.of(block_bytes(1)))
    assert collect(tmp_path).removed_chunks == 0
    assert check(tmp_path).errors == []
    with ChunkStore.open(tmp_path) as store:
        assert [image for image, _ in store.origins.items()] == [record.data]
        assert store.profiles.ids() == [record.data]
        name_image(store, "whole:1", record)
        extra = store.put(b"not named")
    with pytest.raises(StoreError, match="whole:1 lacks 1 chunks") as caught:
        collect(tmp_path)
    assert "image rm whole:1" in caught.value.hint
    with ChunkStore.open(tmp_path) as store:
        assert store.has(extra)


def test_images_to_keep_need_no_name(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        kept, dropped = build_image(store, range(10)), build_image(store, range(5, 15))
        name_image(store, "kept:1", kept)
        store.refs.delete("kept:1")
    assert collect(tmp_path, keep=lambda: [kept.id, ChunkId.of(b"a stage of another store")]).removed_chunks > 0
    with ChunkStore.open(tmp_path) as store:
        assert store.missing(reachable(store, kept.id)) == []
        assert not store.has(dropped.id)
    assert collect(tmp_path).kept_chunks == 0


def test_what_to_keep_is_asked_again_before_anything_goes(tmp_path: Path) -> None:
    """A stage or VM that comes to stand on an image while its names are marked is then told of."""
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(10))
    asked: list[int] = []

    def keep() -> list[ChunkId]:
        asked.append(len(asked))
        return [record.id] if len(asked) > 1 else []

    assert collect(tmp_path, keep=keep).removed_chunks == 0
    assert len(asked) >= 2
    with ChunkStore.open(tmp_path) as store:
        assert store.missing(reachable(store, record.id)) == []


def test_a_lazy_image_to_keep_may_lack_chunks(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(4))
        drop(store, ChunkId.of(block_bytes(1)))
    with pytest.raises(StoreError, match="is in use, lacks 1 chunks"):
        collect(tmp_path, keep=lambda: [record.id])
    with ChunkStore.open(tmp_path) as store:
        store.origins.set(record.data, "http://127.0.0.1:1")
    assert collect(tmp_path, keep=lambda: [record.id]).removed_chunks == 0
    with ChunkStore.open(tmp_path) as store:
        assert store.origins.get(record.data) == "http://127.0.0.1:1"
        odd = store.put(b"no record")
    with pytest.raises(StoreError, match=f"image {odd}"):
        collect(tmp_path, keep=lambda: [odd])


def test_space_between_live_chunks_is_freed_at_once(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        kept = build_image(store, range(400))
        garbage = [store.put(noise(50_000, seed)) for seed in range(20)]
        build_image(store, range(400, 420))
        name_image(store, "kept:1", kept)
        pack_bytes = store.df().stored_bytes
    path = pack_path(tmp_path, 1)
    length, before = path.stat().st_size, path.stat().st_blocks * 512
    report = collect(tmp_path)
    assert (report.removed_packs, report.rewritten_packs) == (0, 0)
    assert path.stat().st_size == length
    assert report.freed_bytes == pytest.approx(before - path.stat().st_blocks * 512, abs=4096)
    assert report.freed_bytes > 20 * 50_000
    with ChunkStore.open(tmp_path) as store:
        usage = store.df()
        assert usage.dead_bytes == report.dead_bytes < 100_000
        assert report.freed_bytes + report.dead_bytes == pytest.approx(pack_bytes - usage.stored_bytes, abs=4096)
        assert store.missing(garbage) == garbage
        assert store.missing(reachable(store, kept.id)) == []
    again = collect(tmp_path)
    assert (again.removed_chunks, again.freed_bytes, again.dead_bytes) == (0, 0, report.dead_bytes)
    assert check(tmp_path).errors == []
    rebuilt = check(tmp_path, rebuild=True)
    assert (rebuilt.errors, [note for note in rebuilt.notes if "removed by a collection" in note]) == (
        [],
        rebuilt.notes,
    )


def test_a_name_of_something_else_stops_it(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(1))
        ref = name_image(store, "odd:1", record)
        store.refs.set("odd:1", type(ref)(**{**ref.to_json(), "record": store.put(b"no record")}))
    with pytest.raises(StoreError, match="odd:1"):
        collect(tmp_path)


def test_a_pack_that_somebody_writes_is_left_to_him(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        garbage = [store.put(noise(50_000, seed)) for seed in range(10)]
        store.flush()
        store.put(noise(50_000, 99))
        report = collect(tmp_path)
        assert (report.removed_chunks, report.removed_packs, report.rewritten_packs) == (10, 0, 0)
        assert report.freed_bytes > 480_000
        assert store.absent(garbage) == garbage
        store.flush()
        assert store.get(ChunkId.of(noise(50_000, 99))) == noise(50_000, 99)
    assert check(tmp_path).errors == []
    report = collect(tmp_path)
    assert (report.removed_packs, pack_numbers(tmp_path)) == (1, [])


def test_leftovers_of_killed_processes_go(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        name_image(store, "kept:1", build_image(store, range(4)))
    with pack_path(tmp_path, 1).open("ab") as file:
        file.write(noise(1000))
    (tmp_path / PACKS_DIRECTORY / "00000009.pack").write_bytes(noise(3000))
    report = collect(tmp_path)
    assert report.freed_bytes == 4000
    assert pack_numbers(tmp_path) == [1]


def test_an_empty_store_and_none(tmp_path: Path) -> None:
    ChunkStore.open(tmp_path / "new").close()
    assert collect(tmp_path / "new").removed_chunks == 0
    with pytest.raises(NotFoundError):
        collect(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
