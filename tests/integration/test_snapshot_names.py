"""Which snapshot a name stands for, when hosts and a server have different ones; and what a server takes as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imaged import snapshots
from imaged.blockbuilder import BlockImageBuilder
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.config import Config
from imaged.errors import FormatError, NameTakenError, UpstreamError
from imaged.extent import Extent
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.progress import NoProgress
from imaged.reach import reachable_snapshot
from imaged.record import ImageRecord
from imaged.snapshot import STATE_LIMIT_BYTES, SnapshotRecord
from imaged.transfer import acquire
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.snapshots import build_snapshot
from tests.support.store_images import build_image, name_image

pytestmark = pytest.mark.network
QUICK = RetryPolicy(total_s=1.0, first_wait_s=0.02, longest_wait_s=0.1)
HOSTS = ("a", "b")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChunkServer]:
    with chunk_server(tmp_path / "server") as running:
        yield running


@pytest.fixture
def image(tmp_path: Path) -> ImageRecord:
    """On both hosts."""
    for host in HOSTS:
        with ChunkStore.open(tmp_path / host / "store") as store:
            record = build_image(store, range(30))
            name_image(store, "box:1", record)
    return record


def config(tmp_path: Path, host: str, server: ChunkServer) -> Config:
    return Config(home=tmp_path / host, run=tmp_path / host / "run", server=server.url)


def park(
    tmp_path: Path, host: str, image: ImageRecord, seed: int, *, parent: ChunkId | None = None, name: str = "golden"
) -> SnapshotRecord:
    with ChunkStore.open(tmp_path / host / "store") as store:
        record = build_snapshot(store, image, [seed, seed + 1], created_ns=seed, parent=parent)
        snapshots.publish(store, name, record)
    return record


def push(tmp_path: Path, host: str, server: ChunkServer, **options: Any) -> None:
    acquire.push_snapshot(config(tmp_path, host, server), "golden", progress=NoProgress(), **options)


def pull(tmp_path: Path, host: str, server: ChunkServer, *, lazy: bool, text: str = "golden") -> None:
    acquire.pull_snapshot(config(tmp_path, host, server), text, lazy=lazy, progress=NoProgress())


def named(tmp_path: Path, host: str) -> ChunkId:
    with ChunkStore.open(tmp_path / host / "store", readonly=True) as store:
        ref = store.snapshots.get("golden")
    assert ref is not None
    return ref.record


def at_server(server: ChunkServer) -> ChunkId:
    with HttpUpstream(server.url, retry=QUICK) as upstream:
        return upstream.snapshot("golden").id


@pytest.mark.parametrize("lazy", [True, False])
def test_a_pull_takes_no_name_from_a_snapshot_that_is_only_here(
    tmp_path: Path, server: ChunkServer, image: ImageRecord, *, lazy: bool
) -> None:
    old = park(tmp_path, "a", image, 100)
    push(tmp_path, "a", server)
    new = park(tmp_path, "a", image, 200, parent=old.id)
    for text in ("golden", str(old.id), str(old.id)[:8]):
        with pytest.raises(NameTakenError) as caught:
            pull(tmp_path, "a", server, lazy=lazy, text=text)
        assert "`pvisor snapshot push golden`" in caught.value.hint
    collect(tmp_path / "a" / "store")
    with ChunkStore.open(tmp_path / "a" / "store", readonly=True) as store:
        assert snapshots.find(store, "golden").record == new
        assert not store.missing(reachable_snapshot(store, new.id))


def test_a_child_of_a_pulled_one_is_only_here_too(tmp_path: Path, server: ChunkServer, image: ImageRecord) -> None:
    old = park(tmp_path, "a", image, 100)
    push(tmp_path, "a", server)
    pull(tmp_path, "b", server, lazy=True)
    child = park(tmp_path, "b", image, 200, parent=old.id)
    with pytest.raises(NameTakenError):
        pull(tmp_path, "b", server, lazy=True)
    assert named(tmp_path, "b") == child.id


def test_a_pull_follows_a_name_that_was_pulled_or_pushed(
    tmp_path: Path, server: ChunkServer, image: ImageRecord
) -> None:
    first = park(tmp_path, "a", image, 100)
    push(tmp_path, "a", server)
    pull(tmp_path, "b", server, lazy=True)
    second = park(tmp_path, "b", image, 200, parent=first.id)
    push(tmp_path, "b", server)  # it descends from what the server has
    assert at_server(server) == second.id
    pull(tmp_path, "a", server, lazy=False)
    assert named(tmp_path, "a") == second.id
    third = park(tmp_path, "a", image, 300, parent=second.id)
    push(tmp_path, "a", server)
    pull(tmp_path, "b", server, lazy=True)
    assert named(tmp_path, "b") == third.id


def test_what_was_made_here_stays_complete_when_it_is_pulled(
    tmp_path: Path, server: ChunkServer, image: ImageRecord
) -> None:
    park(tmp_path, "a", image, 100)
    park(tmp_path, "b", image, 100)
    push(tmp_path, "a", server)
    pull(tmp_path, "b", server, lazy=True)
    with ChunkStore.open(tmp_path / "b" / "store", readonly=True) as store:
        ref = store.snapshots.get("golden")
    assert ref is not None and (ref.origin, ref.server) == ("", server.url)


def test_a_push_replaces_what_it_descends_from_and_with_force_any(
    tmp_path: Path, server: ChunkServer, image: ImageRecord
) -> None:
    base = park(tmp_path, "a", image, 100)
    push(tmp_path, "a", server)
    middle = park(tmp_path, "a", image, 200, parent=base.id)
    last = park(tmp_path, "a", image, 300, parent=middle.id)
    push(tmp_path, "a", server)
    assert at_server(server) == last.id
    other = park(tmp_path, "b", image, 400)
    with pytest.raises(NameTakenError) as caught:
        push(tmp_path, "b", server)
    assert str(last.id) in caught.value.message
    assert "--force" in caught.value.hint
    assert at_server(server) == last.id
    with ChunkStore.open(tmp_path / "server", readonly=True) as store:
        assert not store.has(other.memory), "refused before anything was sent"
    push(tmp_path, "b", server, replace=True)
    assert at_server(server) == other.id


def test_two_that_push_at_the_same_time_do_not_replace_each_other(
    tmp_path: Path, server: ChunkServer, image: ImageRecord
) -> None:
    """The second looked before the first had the name: the server compares once more."""
    first, second = park(tmp_path, "a", image, 100), park(tmp_path, "a", image, 200, name="other")
    push(tmp_path, "a", server)
    with ChunkStore.open(tmp_path / "a" / "store") as store, HttpUpstream(server.url, retry=QUICK) as upstream:
        upstream.upload([store.frame(chunk) or pytest.fail() for chunk in reachable_snapshot(store, second.id)])
        for replaces in (None, second.id, second.memory):
            with pytest.raises(UpstreamError, match="another snapshot 'golden'"):
                upstream.publish_snapshot("golden", second.id, replaces=replaces)
        assert at_server(server) == first.id
        upstream.publish_snapshot("golden", first.id)  # a repeated request
        upstream.publish_snapshot("golden", second.id, replaces=first.id)
        assert at_server(server) == second.id
        upstream.publish_snapshot("golden", first.id, replaces="*")
        assert at_server(server) == first.id
    body = json.dumps({"id": str(second.id)}).encode()
    status, _, answer = ask(server, "PUT", "/v1/snapshots/golden", body, Content_Type="application/json")
    assert (status, "--force" in json.loads(answer)["hint"]) == (409, True)


def odd_records(store: ChunkStore, record: SnapshotRecord) -> Iterator[bytes]:
    """What is put as records that no machine could go on from, or that would spoil a listing."""
    yield record.pack() + b" "
    yield json.dumps({**record.to_json(), "more": 1}, sort_keys=True, separators=(",", ":")).encode()
    yield replace(record, vm="\x1b]0;title\x07").pack()
    for memory_bytes in (record.machine.memory_bytes - BLOCK_BYTES, record.machine.memory_bytes + BLOCK_BYTES):
        yield replace(record, machine=replace(record.machine, memory_bytes=memory_bytes)).pack()
    yield replace(record, disk=record.memory, disk_bytes=BLOCK_BYTES).pack()
    yield replace(record, machine=replace(record.machine, machine="q35,kernel=/etc/shadow")).pack()
    huge = BlockImageBuilder(store)
    huge.append(Extent(STATE_LIMIT_BYTES // BLOCK_BYTES + 1, None))
    yield replace(record, state=huge.finish()).pack()


def test_a_server_takes_no_odd_record_and_lists_the_others(
    tmp_path: Path, server: ChunkServer, image: ImageRecord, caplog: pytest.LogCaptureFixture
) -> None:
    record = park(tmp_path, "a", image, 100)
    push(tmp_path, "a", server)
    with ChunkStore.open(tmp_path / "a" / "store") as store, HttpUpstream(server.url, retry=QUICK) as upstream:
        odd = [store.put(raw) for raw in odd_records(store, record)]
        for chunk in odd:
            upstream.upload([store.frame(one) or pytest.fail() for one in (chunk, *_new(store, chunk))])
            with pytest.raises(UpstreamError, match=r"expected"):
                upstream.publish_snapshot("odd", chunk)
        assert [found.name for found in upstream.snapshots()] == ["golden"]

        def answer(*_: Any) -> dict[str, Any]:
            good = {"name": "golden", "id": str(record.id), "record": record.to_json()}
            return {"snapshots": [5, {**good, "record": {**record.to_json(), "more": 1}}, good]}

        upstream._json = answer  # type: ignore[method-assign]
        assert [found.id for found in upstream.snapshots()] == [record.id]
    assert caplog.text.count("is not listed") == 2


def _new(store: ChunkStore, chunk: ChunkId) -> list[ChunkId]:
    """The device state of this record, when it is one that the server does not have."""
    try:
        return [SnapshotRecord.parse(store.get(chunk)).state]
    except FormatError:
        return []
