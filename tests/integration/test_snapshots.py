"""Snapshots between hosts through a real chunk server: pushed, pulled lazily, damaged, collected."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from imaged import snapshots
from imaged.blockimage import BlockImage, read_blob
from imaged.chunks import ChunkReader
from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import pack_path
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.config import Config
from imaged.errors import ChunkCorruptError, ChunkMissingError, NotFoundError, UpstreamError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import HEADER_BYTES, FrameHeader
from imaged.ids import ChunkId
from imaged.profile import Profile
from imaged.progress import NoProgress
from imaged.reach import reachable, reachable_snapshot
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord
from imaged.transfer import acquire
from imaged.transfer.acquire import snapshot_reader
from imaged.transfer.push import push_snapshot
from imaged.transfer.snapshotpull import PulledSnapshot, pull_snapshot
from imaged.verify import verify_snapshot
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.snapshots import build_snapshot, disk_bytes
from tests.support.store_images import block_bytes, build_image, name_image

pytest_plugins = ("tests.support.fetching",)
pytestmark = pytest.mark.network
QUICK = RetryPolicy(total_s=1.0, first_wait_s=0.02, longest_wait_s=0.1)
MEMORY = [*range(100, 164), *[None] * 400, *range(164, 200)]
LATER = [*range(100, 140), 900, 901, *range(142, 164), *[None] * 400, *range(164, 200)]
DISK = [300, None, 301]


@pytest.fixture
def image(tmp_path: Path) -> ImageRecord:
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        record = build_image(store, range(30))
        name_image(store, "box:1", record)
    return record


@pytest.fixture
def parent(tmp_path: Path, image: ImageRecord) -> SnapshotRecord:
    """On host a."""
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        record = build_snapshot(store, image, MEMORY, disk=DISK)
        snapshots.publish(store, "parent", record)
    return record


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChunkServer]:
    with chunk_server(tmp_path / "server") as running:
        yield running


def config(tmp_path: Path, host: str, server: ChunkServer | None = None) -> Config:
    url = None if server is None else server.url
    return Config(home=tmp_path / host, run=tmp_path / host / "run", server=url)


def push(tmp_path: Path, server: ChunkServer, name: str, host: str = "a") -> dict[str, Any]:
    return acquire.push_snapshot(config(tmp_path, host, server), name, progress=NoProgress()).details


@contextmanager
def fetching(store: Path, server: ChunkServer) -> Iterator[tuple[Fetcher, HttpUpstream]]:
    upstream = HttpUpstream(server.url, retry=QUICK)
    with ChunkStore.open(store) as opened:
        fetcher = Fetcher(opened, [upstream], retry=QUICK)
        try:
            yield fetcher, upstream
        finally:
            fetcher.close()


def damage(store: ChunkStore, chunk: ChunkId) -> None:
    location = store.index.find(chunk)
    assert location is not None
    with pack_path(store.root, location.pack).open("r+b") as file:
        file.seek(location.offset + HEADER_BYTES + 9)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


def whole(reader: ChunkReader, block_image: ChunkId) -> bytes:
    opened = BlockImage.open(reader, block_image)
    return opened.read(0, opened.size_bytes)


def test_a_push_sends_what_the_server_lacks(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        chunks = len(list(reachable_snapshot(store, parent.id)))
        image = ImageRecord.parse(store.get(parent.image))
        child = build_snapshot(store, image, LATER, disk=DISK, parent=parent.id, created_ns=parent.created_ns + 1)
        snapshots.publish(store, "child", child)
        alone = set(reachable_snapshot(store, child.id)) - set(reachable_snapshot(store, parent.id))
    assert push(tmp_path, server, "parent") == {"pushed_chunks": chunks}
    assert push(tmp_path, server, "parent") == {"pushed_chunks": 0}
    # Two pages' chunks, their leaf, root, state (chunk, leaf, root) and record.
    assert push(tmp_path, server, "child") == {"pushed_chunks": len(alone)}
    assert len(alone) == 8
    with HttpUpstream(server.url, retry=QUICK) as upstream:
        assert [found.name for found in upstream.snapshots()] == ["child", "parent"]
        for text in ("child", str(child.id), str(child.id)[:8]):
            found = upstream.snapshot(text)
            assert (found.name, found.id, found.record) == ("child", child.id, child)
        with pytest.raises(NotFoundError):
            upstream.snapshot("other")
    with ChunkStore.open(tmp_path / "server", readonly=True) as store:
        ref = store.snapshots.get("parent")
        assert ref is not None and (ref.chunks, ref.origin) == (chunks, "")
        assert store.refs.items() == []


@pytest.mark.usefixtures("no_hedges")
def test_a_lazy_pull_is_one_request_and_reads_fetch_the_rest(
    tmp_path: Path, server: ChunkServer, parent: SnapshotRecord
) -> None:
    push(tmp_path, server, "parent")
    with fetching(tmp_path / "b" / "store", server) as (fetcher, upstream):
        tally = Tally()
        pulled = pull_snapshot(fetcher, upstream, "parent", lazy=True, tally=tally)
        assert pulled == PulledSnapshot(parent.id, parent, "parent")
        assert tally.requests == 1
        # Two records, device state and metadata (root, leaf, chunk), memory, disk, data: no leaf, no page.
        assert tally.fetched_chunks == 11
        fetcher.drain()
        store = fetcher.store
        found = snapshots.find(store, "parent")
        assert found.ref is not None and found.ref.origin == server.url
        assert found.ref.stored_bytes and found.ref.stored_bytes > 40_000
        reader = fetcher.reader(parent.memory, tally)
        memory = BlockImage.open(reader, parent.memory)
        assert memory.read(70_000, 10) == disk_bytes(MEMORY)[70_000:70_010]
        assert tally.requests == 3  # a leaf, a chunk
        assert whole(reader, parent.memory) == disk_bytes(MEMORY)
        assert parent.disk is not None
        assert whole(fetcher.reader(parent.disk, tally), parent.disk) == disk_bytes(DISK)
        assert len(read_blob(store, parent.state)) == 30_000
        image = ImageRecord.parse(store.get(parent.image))
        for block_image in (*parent.block_images, image.metadata, image.data):
            assert store.origins.get(block_image) == server.url
            assert fetcher.origin(block_image) == server.url
    assert check(tmp_path / "b" / "store").errors == []


def test_a_disk_is_fetched_where_the_memory_is_all_here(
    tmp_path: Path, server: ChunkServer, parent: SnapshotRecord
) -> None:
    """Of one without a name, as a machine may stand on it when it is parked."""
    push(tmp_path, server, "parent")
    here = config(tmp_path, "b", server)
    acquire.pull_snapshot(here, "parent", lazy=True, progress=NoProgress())
    with ChunkStore.open(here.store) as store:
        image = ImageRecord.parse(store.get(parent.image))
        with store.index.write("forget origins") as txn:
            for block_image in (parent.memory, image.metadata, image.data):
                store.index.delete(txn, "origins", block_image)
        unnamed = snapshots.Snapshot(name=None, id=parent.id, record=parent, ref=None)
        assert parent.disk is not None
        with snapshot_reader(store, unnamed) as reader:
            assert whole(reader, parent.disk) == disk_bytes(DISK)


def test_pulled_again_it_is_not_sent_again(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    for count in (11, 0):
        with fetching(tmp_path / "b" / "store", server) as (fetcher, upstream):
            tally = Tally()
            pull_snapshot(fetcher, upstream, "parent", lazy=True, tally=tally)
            assert (tally.requests, tally.fetched_chunks) == (1, count)
            fetcher.drain()


def test_a_complete_pull_needs_no_server(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    store_b = tmp_path / "b" / "store"
    for lazy in (True, False, True):
        acquire.pull_snapshot(config(tmp_path, "b", server), "parent", lazy=lazy, progress=NoProgress())
    server.stop()
    with ChunkStore.open(store_b) as store:
        found = snapshots.find(store, "parent")
        assert found.ref is not None and found.ref.origin == ""
        report = verify_snapshot(store, found, NoProgress())
        assert (report.sound, report.absent, report.lazy) == (True, 0, False)
        assert whole(store, parent.memory) == disk_bytes(MEMORY)
    collect(store_b)
    assert check(store_b).errors == []
    # Without a server set, and all of it here: nothing to ask.
    assert acquire.pull_snapshot(config(tmp_path, "b"), "parent", lazy=True, progress=NoProgress()).id == parent.id


def test_pulled_by_id_it_has_its_name(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    for text in (str(parent.id), str(parent.id)[:10]):
        pulled = acquire.pull_snapshot(config(tmp_path, text, server), text, lazy=True, progress=NoProgress())
        assert (pulled.name, pulled.id) == ("parent", parent.id)
        assert pulled.details["requests"] == 1


def child_on_b(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> tuple[SnapshotRecord, set[ChunkId]]:
    """Made there from a parent that was pulled lazily: host b has of the parent only what it read, and of the child's
    leaves those that it changed. With the chunks that are its own."""
    push(tmp_path, server, "parent")
    acquire.pull_snapshot(config(tmp_path, "b", server), "parent", lazy=True, progress=NoProgress())
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        image = ImageRecord.parse(store.get(parent.image))
        child = build_snapshot(store, image, LATER, disk=DISK, parent=parent.id, created_ns=parent.created_ns + 1)
        store.flush()
        store.put(child.pack())
        new = set(reachable_snapshot(store, child.id)) - set(reachable_snapshot(store, parent.id))
        frames = list(store.frames(sorted(new)))
    with ChunkStore.open(tmp_path / "b" / "store") as store:
        for frame in frames:
            store.put_frame(frame)
        snapshots.publish(store, "child", child)
        found = snapshots.find(store, "child")
        assert found.ref is not None and found.ref.origin == server.url
    return child, new


@pytest.mark.parametrize("set_server", [True, False])
def test_a_child_that_no_server_has_is_completed(
    tmp_path: Path, server: ChunkServer, parent: SnapshotRecord, set_server: bool
) -> None:
    child, _ = child_on_b(tmp_path, server, parent)
    at = config(tmp_path, "b", server if set_server else None)
    assert acquire.pull_snapshot(at, "child", lazy=True, progress=NoProgress()).details == {}
    with ChunkStore.open(tmp_path / "b" / "store") as store:
        assert verify_snapshot(store, snapshots.find(store, "child"), NoProgress()).lazy
    pulled = acquire.pull_snapshot(at, "child", lazy=False, progress=NoProgress())
    assert (pulled.name, pulled.id) == ("child", child.id) and pulled.details["fetched_chunks"] > 50
    server.stop()
    with ChunkStore.open(tmp_path / "b" / "store") as store:
        report = verify_snapshot(store, snapshots.find(store, "child"), NoProgress())
        assert (report.sound, report.absent, report.lazy) == (True, 0, False)
        assert whole(store, child.memory) == disk_bytes(LATER)
    assert acquire.pull_snapshot(config(tmp_path, "b"), "child", lazy=False, progress=NoProgress()).details == {}
    with pytest.raises(NotFoundError, match="no snapshot nothing"):
        acquire.pull_snapshot(config(tmp_path, "b"), "nothing", lazy=False, progress=NoProgress())


def test_a_child_made_on_another_host_comes_back(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    child, new = child_on_b(tmp_path, server, parent)
    with ChunkStore.open(tmp_path / "b" / "store", readonly=True) as store:
        before = store.df().chunks
    collect(tmp_path / "b" / "store")
    assert push(tmp_path, server, "child", host="b") == {"pushed_chunks": len(new)}
    with ChunkStore.open(tmp_path / "b" / "store", readonly=True) as store:
        # To know what the server lacks it read leaves, and no page.
        assert store.df().chunks < before + 20
        assert not store.has(ChunkId.of(block_bytes(110)))
    acquire.pull_snapshot(config(tmp_path, "c", server), "child", lazy=False, progress=NoProgress())
    with ChunkStore.open(tmp_path / "c" / "store") as store:
        assert whole(store, child.memory) == disk_bytes(LATER)
        assert not store.has(parent.id)
    assert check(tmp_path / "c" / "store").errors == []


def test_a_lazy_snapshot_goes_on_to_another_server(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    acquire.pull_snapshot(config(tmp_path, "b", server), "parent", lazy=True, progress=NoProgress())
    with chunk_server(tmp_path / "second") as second:
        push(tmp_path, second, "parent", host="b")
        acquire.pull_snapshot(config(tmp_path, "c", second), "parent", lazy=False, progress=NoProgress())
    with ChunkStore.open(tmp_path / "c" / "store") as store:
        assert whole(store, parent.memory) == disk_bytes(MEMORY)


def test_the_profile_of_the_memory_travels(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        leaf = BlockImage.open(store, parent.memory).leaf_ids()[0]
        touched = [leaf, ChunkId.of(block_bytes(110)), ChunkId.of(block_bytes(101))]
        store.profiles.merge(parent.memory, [*touched, ChunkId.of(b"of another image")])
    push(tmp_path, server, "parent")
    push(tmp_path, server, "parent")
    status, _, body = ask(server, "GET", f"/v1/profiles/{parent.id}")
    assert (status, Profile.parse(body).chunks, Profile.parse(body).runs) == (200, tuple(touched), 1)
    with fetching(tmp_path / "b" / "store", server) as (fetcher, upstream):
        tally = Tally()
        pull_snapshot(fetcher, upstream, "parent", lazy=True, tally=tally)
        # The leaf that it names came with the first answer.
        assert (tally.requests, tally.fetched_chunks) == (1, 12)
        fetcher.drain()
        kept = fetcher.store.profiles.get(parent.memory)
        assert kept is not None and kept.chunks == tuple(touched)
        upstream.merge_profile(parent.id, [leaf, ChunkId.of(block_bytes(105))])
        merged = upstream.profile(parent.id)
        assert merged is not None and merged.runs == 2
        with pytest.raises(UpstreamError, match="none of them"):
            upstream.merge_profile(parent.id, [ChunkId.of(b"x")])
        assert upstream.profile(ChunkId.of(b"no snapshot")) is None


def test_a_child_has_its_parents_profile_and_what_changed(
    tmp_path: Path, server: ChunkServer, parent: SnapshotRecord
) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        leaves = BlockImage.open(store, parent.memory).leaf_ids()
        touched = [ChunkId.of(block_bytes(number)) for number in (110, 140, 190)]
        store.profiles.merge(parent.memory, [*leaves, *touched])
        image = ImageRecord.parse(store.get(parent.image))
        child = build_snapshot(store, image, LATER, parent=parent.id, created_ns=parent.created_ns + 1)
        snapshots.publish(store, "child", child)
        changed = BlockImage.open(store, child.memory).leaf_ids()[0]
    push(tmp_path, server, "child")
    with HttpUpstream(server.url, retry=QUICK) as upstream:
        profile = upstream.profile(child.id)
    assert profile is not None
    # 140 was overwritten: by 900, of which nobody knows yet whether it is touched, but it was just now.
    new = [ChunkId.of(block_bytes(number)) for number in (900, 901)]
    assert profile.chunks == (leaves[-1], touched[0], touched[2], changed, *new)


def test_a_snapshot_that_is_not_whole_gets_no_name(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store, HttpUpstream(server.url, retry=QUICK) as upstream:
        with pytest.raises(UpstreamError, match="not complete"):
            upstream.publish_snapshot("parent", parent.id)
        chunks = list(reachable_snapshot(store, parent.id))
        upstream.upload([store.frame(chunk) or pytest.fail() for chunk in chunks if chunk != chunks[-1]])
        with pytest.raises(UpstreamError, match="1 of"):
            upstream.publish_snapshot("parent", parent.id)
        body = json.dumps({"id": str(parent.id)}).encode()
        assert ask(server, "PUT", "/v1/snapshots/parent", body, Content_Type="application/json")[0] == 409
        assert upstream.snapshots() == []
        upstream.upload([store.frame(chunks[-1]) or pytest.fail()])
        upstream.publish_snapshot("parent", parent.id)
        assert [found.name for found in upstream.snapshots()] == ["parent"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/snapshots/none", None, 404),
        ("GET", "/v1/snapshots/" + "0" * 64, None, 404),
        ("GET", "/v1/snapshots/Bad%20Name", None, 400),
        ("GET", "/v1/snapshots/a%2Fb", None, 400),
        ("GET", "/v1/snapshots/%00", None, 400),
        ("GET", "/v1/snapshots/parent?view=all", None, 400),
        ("GET", "/v1/snapshots/parent?profile=chunks", None, 400),
        ("PUT", "/v1/snapshots/x", b"{}", 400),
        ("PUT", "/v1/snapshots/x", b'{"id": 5}', 400),
        ("PUT", "/v1/snapshots/x", b'{"id": "zz"}', 400),
        ("PUT", "/v1/snapshots/x", b'{"id": "' + b"0" * 64 + b'", "replaces": 5}', 400),
        ("PUT", "/v1/snapshots/-x", b'{"id": "zz"}', 400),
        ("PUT", "/v1/snapshots/" + "0" * 64, b'{"id": "zz"}', 400),
        ("DELETE", "/v1/snapshots/nobody", None, 404),
        ("PATCH", "/v1/snapshots/parent", None, 405),
        ("POST", "/v1/snapshots", b"{}", 405),
        ("GET", "/v1/profiles/parent", None, 404),
    ],
)
def test_bad_requests(
    tmp_path: Path,
    server: ChunkServer,
    parent: SnapshotRecord,
    method: str,
    path: str,
    body: bytes | None,
    status: int,
) -> None:
    push(tmp_path, server, "parent")
    found, _, answer = ask(server, method, path, body, Content_Type="application/json")
    assert (found, json.loads(answer).keys()) == (status, {"error", "hint"})


def test_what_is_no_snapshot_gets_no_name(tmp_path: Path, server: ChunkServer, image: ImageRecord) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store, HttpUpstream(server.url, retry=QUICK) as upstream:
        upstream.upload([store.frame(chunk) or pytest.fail() for chunk in reachable(store, image.id)])
        with pytest.raises(UpstreamError, match="snapshot record"):
            upstream.publish_snapshot("odd", image.id)


def test_the_boot_view_answers_304(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    path = "/v1/snapshots/parent?view=boot&profile=frame"
    status, headers, body = ask(server, "GET", path)
    shown = json.loads(headers["pvisor-snapshot"])
    assert (status, shown["id"], shown["frames"], "record" in shown) == (200, str(parent.id), 11, False)
    assert FrameHeader.parse(body[:HEADER_BYTES]).id == parent.id
    assert ask(server, "GET", path, If_None_Match=headers["etag"])[0] == 304
    assert ask(server, "GET", path, If_None_Match='"' + "0" * 64 + '"')[0] == 200
    document = json.loads(ask(server, "GET", "/v1/snapshots/parent")[2])
    assert document["record"] == parent.to_json()


def test_a_chunk_the_server_lost_is_named(tmp_path: Path, parent: SnapshotRecord) -> None:
    lost, bad = ChunkId.of(block_bytes(110)), ChunkId.of(block_bytes(120))
    with chunk_server(tmp_path / "server") as server:
        push(tmp_path, server, "parent")
    with ChunkStore.open(tmp_path / "server") as store:
        location = store.index.find(lost)
        assert location is not None
        store.index.drop([(lost, location)], forget_memos=False)
        damage(store, bad)
    with chunk_server(tmp_path / "server") as server:
        with fetching(tmp_path / "b" / "store", server) as (fetcher, upstream):
            pull_snapshot(fetcher, upstream, "parent", lazy=True)
            fetcher.drain()
            memory = BlockImage.open(fetcher.reader(parent.memory, Tally()), parent.memory)
            piece = 16384
            assert memory.read(0, piece) == block_bytes(100)
            with pytest.raises(ChunkMissingError, match=str(lost)):
                memory.read(10 * piece, piece)
            with pytest.raises((ChunkCorruptError, ChunkMissingError), match=str(bad)):
                memory.read(20 * piece, piece)
            with pytest.raises((ChunkCorruptError, ChunkMissingError)):
                pull_snapshot(fetcher, upstream, "parent", lazy=False)
            found = snapshots.find(fetcher.store, "parent")
            assert found.ref is not None and found.ref.origin == server.url
        # A push of the same snapshot from a host that has it puts both right.
        assert push(tmp_path, server, "parent") == {"pushed_chunks": 2}
        acquire.pull_snapshot(config(tmp_path, "c", server), "parent", lazy=False, progress=NoProgress())


@pytest.mark.parametrize("part", ["record", "state", "memory", "image", "metadata"])
def test_a_damaged_part_of_the_first_answer(tmp_path: Path, parent: SnapshotRecord, part: str) -> None:
    """Without it nothing can be restored: the pull fails, and no name says otherwise."""
    with chunk_server(tmp_path / "server") as server:
        push(tmp_path, server, "parent")
    with ChunkStore.open(tmp_path / "server") as store:
        metadata = ImageRecord.parse(store.get(parent.image)).metadata
    parts = {"state": parent.state, "memory": parent.memory, "image": parent.image, "metadata": metadata}
    chunk = parts.get(part, parent.id)
    with ChunkStore.open(tmp_path / "server") as store:
        damage(store, chunk)
    with chunk_server(tmp_path / "server") as server, fetching(tmp_path / "b" / "store", server) as (fetcher, upstream):
        with pytest.raises((ChunkCorruptError, ChunkMissingError, UpstreamError)) as caught:
            pull_snapshot(fetcher, upstream, "parent", lazy=True)
        assert str(chunk) in caught.value.message
        fetcher.drain()
        assert fetcher.store.snapshots.items() == []


def test_a_damaged_snapshot_hides_no_other(tmp_path: Path, parent: SnapshotRecord) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        snapshots.publish(store, "copy", build_snapshot(store, ImageRecord.parse(store.get(parent.image)), [1]))
    with chunk_server(tmp_path / "server") as server:
        push(tmp_path, server, "parent")
        push(tmp_path, server, "copy")
    with ChunkStore.open(tmp_path / "server") as store:
        damage(store, parent.id)
    with chunk_server(tmp_path / "server") as server, HttpUpstream(server.url, retry=QUICK) as upstream:
        assert [found.name for found in upstream.snapshots()] == ["copy"]
        assert ask(server, "GET", "/v1/snapshots/parent")[0] == 500


def test_a_servers_collection_keeps_snapshots(tmp_path: Path, parent: SnapshotRecord) -> None:
    with chunk_server(tmp_path / "server") as server:
        push(tmp_path, server, "parent")
    assert collect(tmp_path / "server").removed_chunks == 0
    with chunk_server(tmp_path / "server") as server:
        acquire.pull_snapshot(config(tmp_path, "b", server), "parent", lazy=False, progress=NoProgress())
    with ChunkStore.open(tmp_path / "server") as store:
        snapshots.remove(store, "parent")
    assert collect(tmp_path / "server").kept_chunks == 0


class Renaming(HttpUpstream):
    """A server that answers with another snapshot than was asked for."""

    @contextmanager
    def boot_snapshot(self, name: str, *, known: ChunkId | None = None) -> Iterator[Any]:
        with super().boot_snapshot("parent", known=known) as stream:
            yield stream


def test_a_server_does_not_choose_the_name(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    for asked in ("other", "0" * 64, "00000000"):
        with fetching(tmp_path / "b" / "store", server) as (fetcher, _):
            with pytest.raises(UpstreamError, match="answers with 'parent'"):
                pull_snapshot(fetcher, Renaming(server.url, retry=QUICK), asked, lazy=True)
            assert fetcher.store.snapshots.items() == []


def test_without_a_server_the_hint_says_so(tmp_path: Path, parent: SnapshotRecord) -> None:
    with pytest.raises(NotFoundError) as caught:
        acquire.pull_snapshot(config(tmp_path, "a"), "other", lazy=True, progress=NoProgress())
    assert "PVISOR_SERVER" in caught.value.hint


def test_one_without_a_name_is_not_pushed(tmp_path: Path, server: ChunkServer, image: ImageRecord) -> None:
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        record = build_snapshot(store, image, [5])
        snapshots.publish(store, None, record)
    with pytest.raises(NotFoundError, match="has no name"):
        push(tmp_path, server, str(record.id))


def test_a_push_of_what_is_not_whole_here(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    lost = ChunkId.of(block_bytes(110))
    with ChunkStore.open(tmp_path / "a" / "store") as store:
        location = store.index.find(lost)
        assert location is not None
        store.index.drop([(lost, location)], forget_memos=False)
    with pytest.raises(ChunkMissingError, match=str(lost)):
        push(tmp_path, server, "parent")
    with HttpUpstream(server.url, retry=QUICK) as upstream:
        assert upstream.snapshots() == []


def test_many_hosts_pull_and_push_at_once(tmp_path: Path, server: ChunkServer, parent: SnapshotRecord) -> None:
    push(tmp_path, server, "parent")
    failures: list[BaseException] = []

    def worker(number: int) -> None:
        try:
            own = config(tmp_path, f"w{number}", server)
            acquire.pull_snapshot(own, "parent", lazy=True, progress=NoProgress())
            with ChunkStore.open(own.store) as store:
                image = ImageRecord.parse(store.get(parent.image))
                memory = [5000 + number, *MEMORY[1:]]
                child = build_snapshot(store, image, memory, created_ns=parent.created_ns + number, vm=f"w{number}")
                snapshots.publish(store, f"child-{number}", child)
                with HttpUpstream(server.url) as upstream:
                    found = snapshots.find(store, f"child-{number}")
                    with snapshot_reader(store, found) as reader:
                        push_snapshot(store, reader, upstream, found, NoProgress())
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    with HttpUpstream(server.url, retry=QUICK) as upstream:
        assert {found.record.vm for found in upstream.snapshots()} == {"box", *(f"w{number}" for number in range(6))}
