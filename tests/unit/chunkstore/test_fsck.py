"""fsck: what it finds, and what a rebuild brings back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import PACKS_DIRECTORY, pack_numbers, pack_path
from imaged.chunkstore.refs import RefTable
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, NotFoundError, StoreBusyError
from imaged.frame import HEADER_BYTES
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.record import ImageRecord
from tests.support.store_images import DIFF_ID, block_bytes, build_image, build_layer, name_image, noise


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def record(root: Path) -> ImageRecord:
    with ChunkStore.open(root) as store:
        record = build_image(store, range(12), layers=(DIFF_ID,))
        store.memos.set(DIFF_ID, build_layer(store, range(6)))
        name_image(store, "whole:1", record)
        name_image(store, "lazy:1", record, origin="http://127.0.0.1:1")
        store.origins.set(record.data, "http://127.0.0.1:1")
    return record


def damage(root: Path, chunk: ChunkId, *, at: int = HEADER_BYTES + 9) -> None:
    with ChunkStore.open(root) as store:
        location = store.index.find(chunk)
    assert location is not None
    with pack_path(root, location.pack).open("r+b") as file:
        file.seek(location.offset + at)
        byte = file.read(1)
        file.seek(location.offset + at)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_sound_store(root: Path, record: ImageRecord) -> None:
    report = check(root)
    assert (report.errors, report.notes, report.images, report.packs) == ([], [], 2, 1)
    with ChunkStore.open(root) as store:
        assert report.chunks == store.df().chunks
        assert report.stored_bytes == store.df().stored_bytes


def test_no_store(root: Path) -> None:
    with pytest.raises(NotFoundError):
        check(root)


@pytest.mark.parametrize("at", [2, 20, HEADER_BYTES + 9])
def test_a_flipped_bit_is_named(root: Path, record: ImageRecord, at: int) -> None:
    chunk = ChunkId.of(block_bytes(10))
    damage(root, chunk, at=at)
    report = check(root)
    assert len(report.errors) == 1
    assert report.errors[0].startswith(f"chunk {chunk}: pack 1 at ")
    # It only looked.
    assert check(root).errors == report.errors


def test_a_damaged_leaf_is_named_with_its_image(root: Path, record: ImageRecord) -> None:
    damage(root, record.data)
    errors = check(root).errors
    assert errors[0].startswith(f"chunk {record.data}")
    assert [error for error in errors if error.startswith("image whole:1: 1 chunks are missing")]
    assert not [error for error in errors if "lazy:1" in error]


def test_a_short_pack(root: Path, record: ImageRecord) -> None:
    path = pack_path(root, 1)
    os.truncate(path, path.stat().st_size - 100)
    errors = check(root).errors
    assert [error for error in errors if "were committed" in error]
    assert [error for error in errors if error.startswith("chunk ")]


def test_a_short_pack_whose_lost_chunks_were_dropped_is_sound(root: Path, record: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        extra = store.put(noise(9000))
    path = pack_path(root, 1)
    os.truncate(path, path.stat().st_size - 100)
    report = check(root)
    assert "image verify NAME" in report.hints[0]
    assert "fsck --rebuild" in report.hints[0]
    with ChunkStore.open(root) as store:
        with pytest.raises(ChunkCorruptError):
            store.get(extra)
        store.put(noise(9000))
    report = check(root)
    assert (report.errors, report.hints) == ([], [])
    assert any("were committed" in note for note in report.notes)


def test_counts_that_differ_suggest_a_rebuild(root: Path, record: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        row = store.index.pack(1)
        assert row is not None
        store.index.put_pack(1, row._replace(live_chunks=1))
    report = check(root)
    assert "the index counts" in report.errors[0]
    assert "fsck --rebuild" in report.hints[0]
    assert check(root, rebuild=True).hints == []


def test_a_missing_pack(root: Path, record: ImageRecord) -> None:
    pack_path(root, 1).unlink()
    assert len(check(root).errors) > 12


def test_an_unknown_pack_is_a_note(root: Path, record: ImageRecord) -> None:
    (root / PACKS_DIRECTORY / "00000007.pack").write_bytes(noise(99))
    report = check(root)
    assert report.errors == []
    assert "pack 7" in report.notes[0]


def whole(root: Path, record: ImageRecord) -> bool:
    with ChunkStore.open(root) as store:
        return all(store.get(chunk) for chunk in reachable(store, record.id))


@pytest.mark.parametrize("loss", ["nothing", "index", "garbage", "empty", "truncated"])
def test_rebuild_brings_back_chunks_and_names(root: Path, record: ImageRecord, loss: str) -> None:
    with ChunkStore.open(root) as store:
        refs, usage = store.refs.items(), store.df()
    index = root / INDEX_NAME
    if loss == "index":
        index.unlink()
    elif loss == "garbage":
        index.write_bytes(noise(9000))
    elif loss == "empty":
        os.truncate(index, 0)
    elif loss == "truncated":
        os.truncate(index, 2 * 4096)
    plain = check(root)
    assert bool(plain.errors) == (loss != "nothing")
    assert all("fsck --rebuild" in hint for hint in plain.hints)
    assert len(plain.hints) == len(plain.errors)
    report = check(root, rebuild=True)
    assert report.rebuilt
    assert report.errors == []
    assert whole(root, record)
    with ChunkStore.open(root) as store:
        assert store.refs.items() == refs
        assert store.df() == usage
        assert store.origins.get(record.data) == "http://127.0.0.1:1"
        assert list(store.memos.items()) == []
    assert check(root).errors == []
    assert list(root.glob("*rebuild*")) == []


def test_rebuild_leaves_out_what_is_damaged(root: Path, record: ImageRecord) -> None:
    chunk = ChunkId.of(block_bytes(10))
    damage(root, chunk)
    report = check(root, rebuild=True)
    assert any("hold no chunk" in error for error in report.errors)
    assert any(error.startswith("image whole:1: 1 chunks are missing") for error in report.errors)
    with ChunkStore.open(root) as store:
        assert not store.has(chunk)
        store.put(block_bytes(10))
    assert check(root).errors == []
    assert whole(root, record)


def test_rebuild_notes_a_torn_tail(root: Path, record: ImageRecord) -> None:
    with pack_path(root, 1).open("ab") as file:
        file.write(noise(70))
    report = check(root, rebuild=True)
    assert report.errors == []
    assert len(report.notes) == 1
    assert whole(root, record)


def test_rebuild_says_which_pack_is_gone(root: Path, record: ImageRecord) -> None:
    with ChunkStore.open(root) as first, ChunkStore.open(root) as second:
        first.put(noise(100))
        first.flush()
        second.put(noise(200))
    assert pack_numbers(root) == [1, 2]
    pack_path(root, 2).unlink()
    assert check(root, rebuild=True).errors == ["pack 2: its file is gone"]


def test_rebuild_without_names(root: Path, record: ImageRecord) -> None:
    (root / INDEX_NAME).unlink()
    (root / RefTable.COPY_NAME).write_text("{")
    report = check(root, rebuild=True)
    assert any("all names are lost" in error for error in report.errors)
    with ChunkStore.open(root) as store:
        assert store.refs.items() == []
        assert store.has(record.id)


def test_rebuild_needs_the_store_alone(root: Path, record: ImageRecord) -> None:
    with ChunkStore.open(root):
        assert check(root).errors == []
        with pytest.raises(StoreBusyError):
            check(root, rebuild=True)


def test_a_copied_store_is_the_same_store(root: Path, record: ImageRecord, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy")
    assert check(tmp_path / "copy").errors == []
