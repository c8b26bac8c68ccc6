"""Records that can not be read: a vm.json, a snapshot's, a name's. They are told, removed, and hold up nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.ids import ChunkId
from tests.support.parked import Parked, add_snapshot, damage, lose
from tests.unit.vmm.test_vms import add, wanted
from vmm import recovery, removal, restore
from vmm.errors import VmError, VmExistsError
from vmm.kept import kept_images, kept_snapshots
from vmm.naming import Naming
from vmm.record import Park, State
from vmm.survey import refusal, survey
from vmm.vmlock import release
from vmm.vms import Vms

UNREADABLE = {
    "empty": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "no object": b"[]",
    "too deep": b"[" * 200_000,
    "of another version": b'{"version": 99}',
    "fields short": b'{"version": 1, "name": "one", "state": "running"}',
    "a state that is none": b'{"version": 1, "name": "one", "state": 7}',
}
IMAGE = ChunkId.parse("ab" * 32)


def spoil(store: ChunkStore, name: str) -> None:
    """The name's row, not the record."""
    with store.index.write("spoil") as txn:
        store.index.put(txn, "snapshots", name.encode(), b"{")


def replace_record(store: ChunkStore, snapshot: ChunkId) -> None:
    """The name stands for a chunk that is no record."""
    for name, ref in store.snapshots.items():
        if ref.record == snapshot:
            store.snapshots.set(name, SnapshotRef(record=store.put(b"not a record"), created_at=1))


LOST: dict[str, Callable[[ChunkStore, ChunkId], None]] = {
    "lost": lose,
    "damaged": damage,
    "something else": replace_record,
}


@pytest.fixture
def vms(tmp_path: Path) -> Vms:
    return Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))


@pytest.fixture
def store(vms: Vms) -> Iterator[ChunkStore]:
    with ChunkStore.open(vms.config.store) as opened:
        yield opened


@pytest.fixture
def snapshot(store: ChunkStore) -> Parked:
    """Of the VM `web`, under that name."""
    return add_snapshot(store, "web", IMAGE, memory=bytes(1 << 20), seed=7)


@pytest.mark.parametrize("raw", UNREADABLE.values(), ids=UNREADABLE)
def test_a_vm_that_does_not_say_what_it_is(vms: Vms, raw: bytes) -> None:
    with vms.make(wanted("one", state=State.RUNNING, temporary=True)) as held:
        held.save()
    release(held.owner_fd)
    add(vms, "two")
    (vms.path("one") / "vm.json").write_bytes(raw)
    assert list(vms.found()) == [("one", None), ("two", vms.get("two"))]
    assert [(status.name, status.state) for status in survey(vms)] == [("one", "damaged"), ("two", "ended")]
    recovery.sweep(vms)  # it may have been a VM that its command was to remove: nobody knows
    with pytest.raises(VmError, match="'one' is damaged") as caught, vms.hold("one"):
        pass
    assert "`pvisor vm rm one`" in caught.value.hint
    with pytest.raises(VmExistsError), vms.make(wanted("one")):
        pass
    for kept in (kept_images, kept_snapshots):
        with pytest.raises(VmError, match="'one' does not say"):
            kept(vms.config)
    assert removal.remove(vms, "one") == removal.Removed(name="one")
    assert kept_images(vms.config) == {IMAGE}
    assert [path.name for path in vms.root.iterdir()] == ["two"]


@pytest.mark.parametrize("make", LOST.values(), ids=LOST)
def test_a_park_whose_snapshot_can_not_be_read_is_none(
    vms: Vms, store: ChunkStore, snapshot: Parked, make: Callable[[ChunkStore, ChunkId], None]
) -> None:
    add(vms, "web")
    park = Park(name="web", created_ns=snapshot.record.created_ns, own=True)
    with vms.hold_as_it_is("web") as held:
        held.begin(state=State.PARKING, park=park)
        assert recovery.find_published(vms.config, held.record) == str(snapshot.id)
    make(store, snapshot.id)
    with vms.hold("web") as held:
        assert (held.record.state, held.record.own_park) == (State.RUNNING, "")


@pytest.mark.parametrize("make", LOST.values(), ids=LOST)
def test_a_vm_parked_as_what_can_not_be_read_is_still_listed_and_removed(
    vms: Vms, store: ChunkStore, snapshot: Parked, make: Callable[[ChunkStore, ChunkId], None]
) -> None:
    own = {"snapshot": str(snapshot.id), "own_park": str(snapshot.id), "own_park_name": "web", "snapshot_name": "web"}
    with vms.make(wanted("web", state=State.PARKED, **own)) as held:
        held.save()
    make(store, snapshot.id)
    assert [status.state for status in survey(vms)] == ["parked"]
    assert "resume web" in refusal(vms, vms.get("web"), State.RUNNING).hint
    assert restore._source(vms, "web", None) == (str(snapshot.id), None)
    removed = removal.remove(vms, "web")
    assert removed.snapshot == (None if make is replace_record else "web")
    assert (store.snapshots.get("web") is None) == (removed.snapshot is not None)


def test_a_name_whose_row_is_damaged_is_not_taken(vms: Vms, store: ChunkStore, snapshot: Parked) -> None:
    spoil(store, "web")
    with vms.make(wanted("web", state=State.RUNNING)) as held:
        held.save()
        assert Naming(vms, store, held, None).choose() == "web-1"
        with pytest.raises(VmExistsError, match="'web'"):
            Naming(vms, store, held, "web").choose()
        held.begin(state=State.PARKING, park=Park(name="web", created_ns=7))
    with vms.hold("web") as held:
        assert held.record.state == State.RUNNING
        held.save(state=State.PARKED, snapshot=str(snapshot.id), own_park=str(snapshot.id), own_park_name="web")
    assert removal.remove(vms, "web") == removal.Removed(name="web")


def test_a_vm_replaces_its_own_park_under_the_name_that_it_has(vms: Vms, store: ChunkStore, snapshot: Parked) -> None:
    add(vms, "web-1")
    own = add_snapshot(store, "web-2", IMAGE, memory=bytes(1 << 20), seed=9)
    with vms.make(wanted("web", state=State.RUNNING)) as held:
        held.save()
        naming = Naming(vms, store, held, None)
        assert naming.choose() == "web-3"  # web-1 is what the VM of that name will take
        held.save(own_park=str(own.id), own_park_name="web-2")
        assert (naming.choose(), naming.replaceable("web-2"), naming.replaceable("web")) == ("web-2", own.id, None)
        store.snapshots.delete("web")
        assert naming.choose() == "web-2"
        store.snapshots.delete("web-2")
        assert naming.choose() == "web"
        assert [Naming(vms, store, held, given).is_own for given in (None, "web", "other")] == [True, True, False]


def test_only_vms_whose_command_is_gone_are_swept_away(vms: Vms) -> None:
    with vms.make(wanted("left", state=State.RUNNING, temporary=True)) as left:
        left.save()
    with vms.make(wanted("busy", state=State.RUNNING, temporary=True)) as busy:
        busy.save()
    with vms.make(wanted("owned", state=State.RUNNING, temporary=True)) as owned:
        owned.save()
    with vms.make(wanted("parked", state=State.PARKED, temporary=True)) as parked:
        parked.save(temporary=False)
    add(vms, "stays")
    for held in (left, busy, parked):
        release(held.owner_fd)
    with vms.hold_as_it_is("busy"):
        recovery.sweep(vms)
    assert sorted(path.name for path in vms.root.iterdir()) == ["busy", "owned", "parked", "stays"]
    recovery.sweep(vms)
    assert sorted(path.name for path in vms.root.iterdir()) == ["owned", "parked", "stays"]
    release(owned.owner_fd)
