"""What the node daemon has open stays: in the local store, and at the servers that it may be asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import keeping
from fuse.files import BlockFiles
from fuse.keeping import GRACE_S, Keeping
from imaged.chunkstore import condemned
from imaged.chunkstore.index import Index
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import NotFoundError
from imaged.fetching.fetch import Fetcher
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.record import ImageRecord
from tests.support.store_images import build_image, name_image


class Host:
    """A node daemon's parts, and a clock."""

    def __init__(self, store: ChunkStore) -> None:
        self.store, self.now_s = store, 1000.0
        self.fetcher = Fetcher(store, [])
        self.files = BlockFiles(self.fetcher)
        self.keeping = Keeping(self.fetcher, self.files, lambda: self.now_s)

    def open(self, record: ImageRecord, name: str) -> None:
        self.keeping.open(record.id, [record.data], name=name, lazy=False)

    def kept(self) -> set[ChunkId]:
        return {record for lease in self.store.leases.live() for record in lease.keeps}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with ChunkStore.open(tmp_path) as store:
        host = Host(store)
        yield host
        host.keeping.close()
        host.fetcher.close()
        assert store.leases.live() == []


def test_an_open_image_needs_no_name(host: Host) -> None:
    record = build_image(host.store, range(5))
    name_image(host.store, "box:1", record)
    host.open(record, "box:1")
    handle = host.files.open(str(record.data))
    host.store.refs.delete("box:1")
    host.now_s += GRACE_S
    host.keeping.tidy()
    assert collect(host.store.root).removed_chunks == 0
    assert host.store.absent(reachable(host.store, record.id)) == []
    host.files.release(handle)
    host.keeping.tidy()
    assert host.kept() == set()
    assert collect(host.store.root).kept_chunks == 0


def test_who_opened_it_has_a_moment_to_mount_it(host: Host) -> None:
    record = build_image(host.store, range(5))
    name_image(host.store, "box:1", record)
    host.open(record, "box:1")
    host.now_s += GRACE_S - 1
    host.open(record, "box:1")
    host.now_s += GRACE_S - 1
    host.keeping.tidy()
    assert host.kept() == {record.id}
    host.now_s += 1
    host.keeping.tidy()
    assert host.kept() == set()


def test_a_name_that_has_just_gone_is_told(host: Host) -> None:
    """A collection may have condemned it, and looked at the leases already."""
    record = build_image(host.store, range(5))
    seen = []

    def keep() -> list[ChunkId]:
        seen.append(None)
        if len(seen) == 2:
            with pytest.raises(NotFoundError, match="removed just now"):
                host.open(record, "box:1")
        return []

    report = collect(host.store.root, keep=keep)
    assert report.removed_chunks > 0
    whole = build_image(host.store, range(5, 10))
    host.open(whole, str(whole.id))
    assert collect(host.store.root).removed_chunks == 0


def test_what_is_kept_is_opened_again_beside_a_collection_that_condemned_it(host: Host) -> None:
    """A collection that has seen the lease pardons it: until then it only looks as if it were to go."""
    record = build_image(host.store, range(5))
    lease = host.store.lease("converting")  # what is condemned under it can still be relied on
    looks = 0

    def keep() -> list[ChunkId]:
        nonlocal looks
        looks += 1
        if looks == 2:
            host.open(record, "box:1")
        return []

    real = condemned.finish

    def finish(index: Index) -> None:
        host.open(record, "box:1")  # the collection has not looked at the leases since it condemned it
        real(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(condemned, "finish", finish)
        assert collect(host.store.root, keep=keep).removed_chunks == 0
    lease.release()
    assert looks > 1
    assert collect(host.store.root).removed_chunks == 0
    assert host.store.absent(reachable(host.store, record.id)) == []


def test_one_of_two_that_open_at_once_looks_whether_it_is_safe(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second, asked a moment later, may let go of what the first has."""
    record = build_image(host.store, range(5))
    other = threading.Thread(target=host.open, args=(record, "box:1"))
    calls = []

    def slow(store: ChunkStore, records: list[ChunkId]) -> list[ChunkId]:
        calls.append(records)
        if len(calls) > 1:
            return records
        other.start()
        other.join(0.2)  # it has had time to look, too
        return []

    monkeypatch.setattr(keeping, "unsafe", slow)
    host.open(record, "box:1")
    other.join()
    assert calls == [[record.id]]
    assert host.kept() == {record.id}
