from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.collection import lastcollection
from imaged.collection.collect import collect
from imaged.errors import StoreFullError


def test_a_collection_is_noted_by_whoever_did_it(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        store.put(b"nobody names this" * 100)
        store.flush()
        assert lastcollection.noted(store.index) is None
        report = collect(tmp_path)
        first = lastcollection.noted(store.index)
        assert first is not None
        assert (first.removed_chunks, first.freed_bytes) == (report.removed_chunks, report.freed_bytes)
        assert report.removed_chunks == 1
        collect(tmp_path)
        second = lastcollection.noted(store.index)
        assert second is not None
        assert second.removed_chunks == 0 and second.ended_at >= first.ended_at


@pytest.mark.parametrize("raw", [b"", b"no JSON", b"[]", b"{}", b'{"ended_at": "x", "removed_chunks": 1}'])
def test_a_row_that_can_not_be_read_is_none(tmp_path: Path, raw: bytes) -> None:
    with ChunkStore.open(tmp_path) as store:
        with store.index.write("a test") as txn:
            store.index.put(txn, "meta", b"last_collection", raw)
        assert lastcollection.noted(store.index) is None
        collect(tmp_path)
        found = lastcollection.noted(store.index)
        assert found is not None and asdict(found).keys() == {"ended_at", "removed_chunks", "freed_bytes"}


def test_a_collection_that_can_not_be_noted_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(tmp_path) as store:
        write = store.index.write

        def full(what: str):  # type: ignore[no-untyped-def]
            if what == "note a collection":
                raise StoreFullError("no space")
            return write(what)

        monkeypatch.setattr(store.index, "write", full)
        assert collect(tmp_path).removed_chunks == 0
        assert lastcollection.noted(store.index) is None
