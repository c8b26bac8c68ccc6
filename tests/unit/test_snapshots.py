"""Snapshots in a store: their names, what keeps them, and what is found of them after damage."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imaged import snapshots
from imaged.blockimage import BlockImage
from imaged.chunkstore import environment
from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import pack_path
from imaged.chunkstore.refs import RefTable
from imaged.chunkstore.snapshotrefs import SnapshotRef, SnapshotTable
from imaged.chunkstore.store import ChunkStore
from imaged.collection.census import Census
from imaged.collection.collect import collect
from imaged.errors import ChunkError, FormatError, InvalidNameError, NameTakenError, NotFoundError, StoreError
from imaged.frame import HEADER_BYTES
from imaged.ids import ChunkId
from imaged.measure import IncompleteError, measure
from imaged.progress import NoProgress
from imaged.reach import Marker, reachable, reachable_snapshot
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord
from imaged.verify import verify_snapshot
from tests.support.snapshots import build_snapshot, disk_bytes
from tests.support.store_images import block_bytes, build_image, name_image

ORIGIN = "http://127.0.0.1:1"
MEMORY = [*range(100, 108), *[None] * 200, *range(108, 116)]
LATER = [*range(100, 104), 900, *range(105, 108), *[None] * 200, *range(108, 116)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def image(root: Path) -> ImageRecord:
    with ChunkStore.open(root) as store:
        record = build_image(store, range(12))
        name_image(store, "box:1", record)
    return record


@pytest.fixture
def parent(root: Path, image: ImageRecord) -> SnapshotRecord:
    with ChunkStore.open(root) as store:
        record = build_snapshot(store, image, MEMORY, disk=[200, None, 201])
        snapshots.publish(store, "parent", record)
    return record


@pytest.fixture
def child(root: Path, image: ImageRecord, parent: SnapshotRecord) -> SnapshotRecord:
    """Of the parent it has all memory but for one piece, and a disk with one piece more."""
    with ChunkStore.open(root) as store:
        created_ns = parent.created_ns + 5
        disk = [200, 202, 201]
        record = build_snapshot(store, image, LATER, disk=disk, parent=parent.id, created_ns=created_ns)
        snapshots.publish(store, "child", record)
    return record


def drop(root: Path, chunk: ChunkId) -> None:
    with ChunkStore.open(root) as store:
        location = store.index.find(chunk)
        assert location is not None
        store.index.drop([(chunk, location)], forget_memos=False)


def damage(root: Path, chunk: ChunkId) -> None:
    with ChunkStore.open(root) as store:
        location = store.index.find(chunk)
    assert location is not None
    with pack_path(root, location.pack).open("r+b") as file:
        file.seek(location.offset + HEADER_BYTES + 9)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_published_snapshot_is_found(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    with ChunkStore.open(root, readonly=True) as store:
        for text in ("child", str(child.id), str(child.id)[:8], str(child.id)[:20]):
            found = snapshots.find(store, text)
            assert (found.name, found.id, found.record) == ("child", child.id, child)
            assert found.ref is not None and found.ref.origin == ""
        assert [one.name for one in snapshots.listing(store)] == ["child", "parent"]
        for text in ("other", "0" * 64, "00000000", str(child.id)[:7]):
            with pytest.raises(NotFoundError) as caught:
                snapshots.find(store, text)
            assert "snapshot ls" in caught.value.hint
        with pytest.raises(InvalidNameError):
            snapshots.find(store, "a/b")


def test_a_name_of_another_is_not_moved(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    with ChunkStore.open(root) as store:
        for name, over in (("parent", None), ("parent", child.id), ("child", parent.id)):
            with pytest.raises(NameTakenError, match=name):
                snapshots.publish_over(store, name, child if name == "parent" else parent, over=over)
        assert {name: ref.record for name, ref in store.snapshots.items()} == {"parent": parent.id, "child": child.id}
        assert snapshots.publish_over(store, "parent", child, over=parent.id) == child.id
        assert snapshots.publish_over(store, "new", parent, over=child.id) == parent.id
        assert snapshots.find(store, "new").record == parent
        assert snapshots.find(store, "parent").record == child


def test_of_many_that_want_a_free_name_one_gets_it(root: Path, image: ImageRecord) -> None:
    """As VMs that are parked at the same time under the same name."""
    with ChunkStore.open(root) as store:
        records = [build_snapshot(store, image, [seed], created_ns=seed) for seed in range(1, 9)]
        together = threading.Barrier(len(records))

        def publish(record: SnapshotRecord) -> bool:
            together.wait(30)
            try:
                snapshots.publish_over(store, "same", record, over=None)
            except NameTakenError:
                return False
            return True

        with ThreadPoolExecutor(len(records)) as pool:
            won = list(pool.map(publish, records))
        assert won.count(True) == 1
        assert snapshots.find(store, "same").record == records[won.index(True)]


def test_a_name_comes_before_an_id(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    name = str(parent.id)[:10]
    with ChunkStore.open(root) as store:
        snapshots.publish(store, name, child)
        assert snapshots.find(store, name).id == child.id


def test_one_without_a_name_is_found_by_its_whole_id(root: Path, image: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        record = build_snapshot(store, image, [1, 2])
        assert snapshots.publish(store, None, record) == record.id
        found = snapshots.find(store, str(record.id))
        assert (found.name, found.ref, found.label) == (None, None, str(record.id))
        with pytest.raises(NotFoundError):
            snapshots.find(store, str(record.id)[:20])
        with pytest.raises(FormatError):
            snapshots.find(store, str(image.id))
        assert store.snapshots.items() == []


def test_what_a_text_means_is_known_of_damaged_and_ambiguous_ones_too(
    root: Path, parent: SnapshotRecord, child: SnapshotRecord
) -> None:
    with ChunkStore.open(root) as store:
        assert snapshots.knows(store, "parent") and snapshots.knows(store, str(parent.id))
        assert snapshots.knows(store, str(parent.id)[:8])
        assert not any(snapshots.knows(store, text) for text in ("other", "deadbeef", "ab" * 32))
        with pytest.raises(InvalidNameError):
            snapshots.knows(store, "a/b")
    damage(root, parent.id)
    with ChunkStore.open(root) as store:
        assert snapshots.knows(store, "parent")


def test_a_name_moves_and_goes(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    with ChunkStore.open(root) as store:
        snapshots.publish(store, "parent", child)
        assert snapshots.find(store, "parent").id == child.id
        assert snapshots.remove(store, "parent") == "parent"
        with pytest.raises(NotFoundError):
            snapshots.remove(store, "parent")
        assert SnapshotTable.read_copy(root) == dict(store.snapshots.items())


def test_a_bad_name_publishes_nothing(root: Path, image: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        record = build_snapshot(store, image, [1, 2])
        with pytest.raises(InvalidNameError):
            snapshots.publish(store, "a/b", record)
        assert not store.has(record.id)


def test_a_damaged_row_can_be_removed_and_set(root: Path, parent: SnapshotRecord) -> None:
    with ChunkStore.open(root) as store:
        with store.index.write("break a name") as txn:
            store.index.put(txn, "snapshots", b"odd", b"{")
        with pytest.raises(FormatError) as caught:
            store.snapshots.items()
        assert "snapshot rm odd" in caught.value.hint
        assert snapshots.remove(store, "odd") == "odd"
        assert [name for name, _ in store.snapshots.items()] == ["parent"]


def test_a_store_of_an_earlier_version_opens(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no table of snapshots until somebody opens it for writing, and what it has stays as it is."""
    with monkeypatch.context() as earlier:
        earlier.setattr(environment, "TABLES", tuple(name for name in environment.TABLES if name != "snapshots"))
        with ChunkStore.open(root) as store:
            record = build_image(store, range(3))
            name_image(store, "box:1", record)
    with ChunkStore.open(root, readonly=True) as store:
        assert store.snapshots.items() == []
        assert store.snapshots.get("any") is None
        assert [name for name, _ in store.refs.items()] == ["box:1"]
    report = check(root)
    assert (report.errors, report.notes, report.images, report.snapshots) == ([], [], 1, 0)
    assert collect(root).removed_chunks == 0
    with ChunkStore.open(root) as store:
        snapshots.publish(store, "first", build_snapshot(store, record, [1]))
    assert check(root, rebuild=True).errors == []
    assert check(root).snapshots == 1


def test_reachable_is_everything_once_and_no_parent(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    with ChunkStore.open(root, readonly=True) as store:
        found = list(reachable_snapshot(store, child.id))
        assert len(found) == len(set(found))
        assert set(reachable(store, child.image)) < set(found)
        assert ChunkId.of(block_bytes(900)) in found
        assert ChunkId.of(block_bytes(104)) not in found
        assert parent.id not in found
        assert measure(store, "snapshot", child.id, reachable_snapshot).chunks == len(found)
        census = Census(store)
        assert census.snapshot(child.id) == set(found)
        assert census.present(found) == measure(store, "snapshot", child.id, reachable_snapshot)


def test_a_census_of_what_is_not_all_here(root: Path, child: SnapshotRecord) -> None:
    with ChunkStore.open(root, readonly=True) as store:
        before = Census(store).snapshot(child.id)
    drop(root, ChunkId.of(block_bytes(900)))
    with ChunkStore.open(root, readonly=True) as store:
        assert Census(store).snapshot(child.id) == before
        assert Census(store).present(before).chunks == len(before) - 1
    drop(root, child.memory)
    with ChunkStore.open(root, readonly=True) as store:
        assert child.memory in Census(store).snapshot(child.id) < before
        with pytest.raises(IncompleteError, match=str(child.memory)):
            measure(store, "snapshot", child.id, reachable_snapshot)


def test_marker_names_what_a_snapshot_lacks(root: Path, child: SnapshotRecord) -> None:
    gone = ChunkId.of(block_bytes(900))
    drop(root, gone)
    with ChunkStore.open(root, readonly=True) as store:
        marker = Marker(store)
        assert marker.snapshot(child.id) == (child, {gone})
        assert child.state in marker.kept
        assert marker.snapshot(gone) == (None, {gone})


def test_a_name_keeps_its_image_memory_disk_and_state(root: Path, parent: SnapshotRecord) -> None:
    with ChunkStore.open(root) as store:
        assert store.refs.delete("box:1")
    # Nothing goes: the metadata, the data and the record of the image are the snapshot's, too.
    assert collect(root).removed_chunks == 0
    with ChunkStore.open(root) as store:
        assert snapshots.find(store, "parent").record == parent
        snapshots.remove(store, "parent")
    collect(root)
    with ChunkStore.open(root, readonly=True) as store:
        assert store.df().chunks == 0


def test_children_need_no_parent(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    with ChunkStore.open(root) as store:
        snapshots.remove(store, "parent")
        store.refs.delete("box:1")
        whole = set(reachable_snapshot(store, child.id))
    collect(root)
    with ChunkStore.open(root, readonly=True) as store:
        assert store.df().chunks == len(whole)
        assert not store.has(parent.id)
        assert verify_snapshot(store, snapshots.find(store, "child"), NoProgress()).sound
        # What was the parent's alone is gone.
        assert not store.has(ChunkId.of(block_bytes(104)))
    assert check(root).errors == []


def test_what_a_machine_stands_on_is_kept(root: Path, image: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        record = build_snapshot(store, image, MEMORY)
        snapshots.publish(store, None, record)
        store.refs.delete("box:1")
        kept = len(set(reachable_snapshot(store, record.id)))
    assert collect(root, keep_snapshots=lambda: [record.id, ChunkId.of(b"never was")]).kept_chunks == kept
    assert collect(root).kept_chunks == 0


def test_a_collection_stops_at_a_snapshot_that_lacks_chunks(root: Path, child: SnapshotRecord) -> None:
    drop(root, ChunkId.of(block_bytes(900)))
    with pytest.raises(StoreError, match="snapshot child lacks 1 chunks") as caught:
        collect(root)
    assert "snapshot verify child" in caught.value.hint
    with ChunkStore.open(root) as store:
        ref = store.snapshots.get("child")
        assert ref is not None
        snapshots.remove(store, "child")
    with pytest.raises(StoreError, match="which is in use, lacks 1 chunks"):
        collect(root, keep_snapshots=lambda: [child.id])
    with ChunkStore.open(root) as store:
        store.origins.set(child.memory, ORIGIN)
    collect(root, keep_snapshots=lambda: [child.id])
    with ChunkStore.open(root) as store:
        lazy = SnapshotRef(record=child.id, created_at=1, origin=ORIGIN)
        store.snapshots.set("child", lazy)
    collect(root)
    with ChunkStore.open(root) as store:
        assert store.origins.get(child.memory) == ORIGIN
        assert store.has(child.memory)


def test_a_record_that_is_none_stops_a_collection(root: Path, image: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        store.snapshots.set("odd", SnapshotRef(record=image.id, created_at=1))
    with pytest.raises(StoreError, match="snapshot odd"):
        collect(root)
    assert [error for error in check(root).errors if error.startswith("snapshot odd")]


def test_verify_names_what_is_corrupt(root: Path, parent: SnapshotRecord) -> None:
    bad, gone = ChunkId.of(block_bytes(105)), ChunkId.of(block_bytes(3))
    damage(root, bad)
    drop(root, gone)
    with ChunkStore.open(root) as store:
        found = snapshots.find(store, "parent")
        report = verify_snapshot(store, found, NoProgress())
        assert (report.corrupt, report.absent, report.sound, report.lazy) == ((str(bad),), 1, False, False)
        assert str(bad) in report.text("parent") and "1 missing" in report.text("parent")
        assert report.verified == report.chunks - 2
        # It was dropped, and can be put again.
        store.put(block_bytes(105))
        store.put(block_bytes(3))
        assert verify_snapshot(store, found, NoProgress()).sound


def test_verify_of_a_lazy_one_counts_what_is_absent(root: Path, parent: SnapshotRecord) -> None:
    drop(root, parent.memory)
    with ChunkStore.open(root) as store:
        store.snapshots.set("parent", SnapshotRef(record=parent.id, created_at=1, origin=ORIGIN, chunks=100))
        report = verify_snapshot(store, snapshots.find(store, "parent"), NoProgress())
        assert (report.sound, report.lazy, report.chunks) == (True, True, 100)
        assert "not here yet" in report.text("parent")


def test_fsck_names_the_snapshot(root: Path, parent: SnapshotRecord) -> None:
    assert (check(root).errors, check(root).snapshots) == ([], 1)
    drop(root, ChunkId.of(block_bytes(105)))
    assert [error for error in check(root).errors if error.startswith("snapshot parent: 1 chunks are missing")]


@pytest.mark.parametrize("index_lost", [False, True])
def test_a_rebuild_brings_names_and_origins_back(root: Path, child: SnapshotRecord, index_lost: bool) -> None:
    with ChunkStore.open(root) as store:
        store.snapshots.set("lazy", SnapshotRef(record=child.id, created_at=1, origin=ORIGIN))
        before = store.snapshots.items()
        data = ImageRecord.parse(store.get(child.image)).data
    if index_lost:
        (root / INDEX_NAME).unlink()
    assert check(root, rebuild=True).errors == []
    with ChunkStore.open(root, readonly=True) as store:
        assert store.snapshots.items() == before
        assert {store.origins.get(one) for one in (*child.block_images, data)} == {ORIGIN}
    assert SnapshotTable.read_copy(root) == dict(before)
    assert check(root).notes == []


def test_a_rebuild_without_the_copy_says_so(root: Path, parent: SnapshotRecord) -> None:
    (root / INDEX_NAME).unlink()
    (root / SnapshotTable.COPY_NAME).write_text("{")
    report = check(root, rebuild=True)
    assert [error for error in report.errors if error.startswith("snapshots.json") and "names are lost" in error]
    with ChunkStore.open(root, readonly=True) as store:
        assert store.snapshots.items() == []
        assert [name for name, _ in store.refs.items()] == ["box:1"]
        assert snapshots.find(store, str(parent.id)).record == parent
    assert RefTable.read_copy(root).keys() == {"box:1"}


def test_lineage(root: Path, image: ImageRecord, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    with ChunkStore.open(root) as store:
        first_ns = child.created_ns
        middle = build_snapshot(store, image, [1], parent=child.id, created_ns=first_ns + 1, vm="middle")
        snapshots.publish(store, None, middle)
        last = build_snapshot(store, image, [2], parent=middle.id, created_ns=first_ns + 3, vm="last")
        snapshots.publish(store, "last", last)
        snapshots.publish(store, "also-last", last)
        sibling = build_snapshot(store, image, [3], parent=parent.id, created_ns=first_ns + 2, vm="sibling")
        snapshots.publish(store, "sibling", sibling)
        orphan = build_snapshot(store, image, [4], parent=ChunkId.of(b"gone"), created_ns=first_ns + 9, vm="orphan")
        snapshots.publish(store, "orphan", orphan)
        found = snapshots.lineage(store)
    assert [(one.names, one.depth, one.record is None) for one in found] == [
        ((), 0, True),
        (("orphan",), 1, False),
        (("parent",), 0, False),
        (("child",), 1, False),
        ((), 2, False),
        (("also-last", "last"), 3, False),
        (("sibling",), 1, False),
    ]
    assert found[0].id == ChunkId.of(b"gone")


def test_lineage_of_many_generations(root: Path, image: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        base = build_snapshot(store, image, [1])
        parent = base.id
        for generation in range(1500):
            record = SnapshotRecord.parse(base.pack())
            record = SnapshotRecord(
                **{name: getattr(record, name) for name in ("image", "memory", "disk", "disk_bytes", "state", "vm")},
                machine=record.machine,
                parent=parent,
                created_ns=base.created_ns + generation,
                dirty_bytes=0,
            )
            parent = store.put(record.pack())
        snapshots.publish(store, "last", record)
        found = snapshots.lineage(store)
    assert len(found) == 1501
    assert found[-1].names == ("last",)


def test_a_child_of_what_was_pulled_lazily_is_as_lazy(root: Path, image: ImageRecord) -> None:
    with ChunkStore.open(root) as store:
        parent = build_snapshot(store, image, MEMORY)
        store.put(parent.pack())
        for block_image in parent.block_images:
            store.origins.set(block_image, ORIGIN)
        store.snapshots.set("parent", SnapshotRef(record=parent.id, created_at=1, origin=ORIGIN))
        child = build_snapshot(store, image, LATER, parent=parent.id, created_ns=parent.created_ns + 1)
        snapshots.publish(store, "child", child)
        found = snapshots.find(store, "child")
        assert found.ref is not None and found.ref.origin == ORIGIN
        assert {store.origins.get(one) for one in child.block_images} == {ORIGIN}
        # Of a parent that is complete nothing needs a server, wherever it came from.
        store.snapshots.complete(parent.id)
        other = build_snapshot(store, image, [7], parent=parent.id, created_ns=parent.created_ns + 2)
        snapshots.publish(store, "other", other)
        assert snapshots.snapshot_origin(store, snapshots.find(store, "other")) == ""


def test_a_snapshot_on_a_lazy_image_is_lazy(root: Path) -> None:
    with ChunkStore.open(root) as store:
        image = build_image(store, range(4))
        name_image(store, "lazy:1", image, origin=ORIGIN)
        store.origins.set(image.data, ORIGIN)
        record = build_snapshot(store, image, MEMORY)
        snapshots.publish(store, "box", record)
        assert snapshots.snapshot_origin(store, snapshots.find(store, "box")) == ORIGIN
    drop(root, ChunkId.of(block_bytes(2)))
    collect(root)
    assert check(root).errors == []


def test_one_without_a_name_on_a_lazy_image_may_lack_of_it(root: Path) -> None:
    with ChunkStore.open(root) as store:
        image = build_image(store, range(4))
        store.origins.set(image.data, ORIGIN)
        record = build_snapshot(store, image, MEMORY)
        snapshots.publish(store, None, record)
        assert snapshots.snapshot_origin(store, snapshots.find(store, str(record.id))) == ORIGIN
    drop(root, ChunkId.of(block_bytes(2)))
    collect(root, keep_snapshots=lambda: [record.id])
    with ChunkStore.open(root) as store:
        assert store.has(record.memory)


def test_a_lost_record_is_named(root: Path, parent: SnapshotRecord, child: SnapshotRecord) -> None:
    damage(root, parent.id)
    drop(root, child.id)
    with ChunkStore.open(root) as store:
        for name, lost in (("parent", parent.id), ("child", child.id)):
            with pytest.raises(ChunkError, match=f"snapshot {name}") as caught:
                snapshots.find(store, name)
            assert str(lost) in caught.value.message
            assert f"snapshot pull {name}" in caught.value.hint
        assert snapshots.listing(store) == []
        assert {(one.names, one.record) for one in snapshots.lineage(store)} == {
            (("child",), None),
            (("parent",), None),
        }
        assert snapshots.remove(store, "parent") == "parent"


def test_memory_reads_back(root: Path, child: SnapshotRecord) -> None:
    with ChunkStore.open(root, readonly=True) as store:
        memory = BlockImage.open(store, child.memory)
        assert memory.read(0, memory.size_bytes) == disk_bytes(LATER)
