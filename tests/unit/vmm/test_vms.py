"""The directories of VMs: names, locks, records, and what a crash leaves of them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import linux
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.ids import ChunkId
from tests.support.parked import add_snapshot
from vmm import recovery, removal, survey
from vmm.errors import VmBusyError, VmError, VmExistsError, VmFullError, VmNotFoundError, VmSetupError
from vmm.held import disk_faults
from vmm.kept import kept_images, kept_snapshots
from vmm.names import numbered
from vmm.process import Process
from vmm.record import Park, State, VmRecord, load
from vmm.vmlock import is_owned, release
from vmm.vms import Vms


def wanted(name: str, **changes: object) -> VmRecord:
    fields: dict[str, object] = {
        "name": name,
        "state": State.BOOTING,
        "image": "ab" * 32,
        "image_name": "debian:12",
        "image_config": {"Env": ["A=b"]},
        "memory_bytes": 1 << 28,
        "cpus": 1,
        "disk_bytes": 0,
        "network": "none",
        "created_ns": 5,
        **changes,
    }
    return VmRecord(**fields)  # type: ignore[arg-type]


@pytest.fixture
def vms(tmp_path: Path) -> Vms:
    return Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))


def add(vms: Vms, name: str, among: Iterator[str] | None = None, **changes: object) -> str:
    with vms.make(wanted(name, state=State.RUNNING, **changes), among=among) as held:
        held.save()
        return held.name


def test_a_record_is_what_was_saved(vms: Vms) -> None:
    add(vms, "one", park=Park(name="snap", created_ns=9), snapshot="cd" * 32)
    assert vms.get("one") == load(vms.path("one")) == VmRecord.parse(vms.get("one").to_bytes())
    assert vms.get("one").park == Park(name="snap", created_ns=9)


def test_names_are_taken_once_and_numbered_ones_are_the_next_free(vms: Vms) -> None:
    add(vms, "one")
    with pytest.raises(VmExistsError, match="'one'"), vms.make(wanted("one")):
        pass
    assert [add(vms, "one", numbered("one")) for _ in range(3)] == ["one-1", "one-2", "one-3"]
    with vms.hold("one-2") as held:
        vms.remove(held)
    assert add(vms, "one", numbered("one")) == "one-2"
    long = "x" * 63
    assert add(vms, long, numbered(long)) == "x" * 61 + "-1"


def test_one_that_was_not_saved_is_no_vm_and_its_name_is_free(vms: Vms) -> None:
    with pytest.raises(RuntimeError), vms.make(wanted("one")):
        raise RuntimeError
    assert not vms.path("one").exists()
    vms.path("two").mkdir(parents=True)  # a crash came before the record
    assert vms.list() == []
    with pytest.raises(VmNotFoundError):
        vms.get("two")
    assert add(vms, "two") == "two"


def test_numbers_go_on_after_one_that_is_known(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tried = Path.mkdir, []
    monkeypatch.setattr(Path, "mkdir", lambda path, *a, **k: tried.append(path.name) or made(path, *a, **k))
    among = numbered("one")
    assert [add(vms, "one", among) for _ in range(4)] == ["one-1", "one-2", "one-3", "one-4"]
    assert [one for one in tried if one.startswith("one-")] == ["one-1", "one-2", "one-3", "one-4"]


def test_what_is_left_of_a_removal_is_listed_until_its_files_are_gone(
    vms: Vms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the file system orders them: the record goes after the disk."""
    add(vms, "one")
    for name in ("disk.qcow2", "memory", "zz"):
        (vms.path("one") / name).write_bytes(b"large")
    unlink = Path.unlink
    gone: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda path, **how: gone.append(path.name) or unlink(path, **how))
    with vms.hold("one") as held:
        vms.remove(held)
    assert gone[-2:] == ["vm.json", "lock"]
    assert sorted(gone[:-2]) == ["disk.qcow2", "memory", "zz"]


def test_files_of_one_that_a_crash_half_removed_are_not_in_the_way(vms: Vms) -> None:
    vms.path("one").mkdir(parents=True)
    for name in ("disk.qcow2", "memory", "owner", "lock"):
        (vms.path("one") / name).write_bytes(b"")
    with vms.make(wanted("one")) as held:
        assert [path.name for path in held.path.iterdir()] == ["lock"]


def test_one_whose_qemu_does_not_end_stays_to_be_removed_later(vms: Vms) -> None:
    with pytest.raises(RuntimeError), vms.make(wanted("one")) as held:
        held.save(state=State.RUNNING)
        held.make_run()
        process = Process.spawn(["/bin/sh", "-c", "sleep 60; true"], held.run, inherit=())
        raise RuntimeError
    assert vms.get("one").state == State.REMOVING
    with pytest.raises(VmNotFoundError), vms.hold("one"):
        pass
    assert process.ending() is not None
    process.close()
    assert not vms.path("one").exists()
    assert not vms.run("one").exists()


def test_files_that_can_not_be_removed_are_told_for_one_vm_alone(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        add(vms, name)
    with vms.hold("one") as held:
        held.save(state=State.RESUMING)
        held.make_run()

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    one, two = survey.survey(vms)
    assert (one.state, "Directory not empty" in one.detail, two.name) == ("resuming", True, "two")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Vms]:
    """On a file system that `fill` fills."""
    root = tmp_path / "small"
    root.mkdir()
    linux.mount("tmpfs", str(root), "tmpfs", 0, "size=16m")
    try:
        yield Vms(Config(home=root / "home", run=tmp_path / "run"))
    finally:
        linux.umount(root, linux.MNT_DETACH)


def fill(vms: Vms) -> None:
    with contextlib.suppress(OSError), open(vms.config.home / "filler", "wb", buffering=0) as stream:
        while stream.write(bytes(4096)):
            pass
    with vms.hold_as_it_is("one") as held, pytest.raises(VmFullError):
        held.save(cpus=2)


@pytest.mark.root
@pytest.mark.parametrize("parked", [False, True])
def test_a_vm_can_be_removed_from_a_full_disk(full: Vms, parked: bool) -> None:
    with ChunkStore.open(full.config.store) as store:
        snapshot = add_snapshot(store, "one", store.put(b"image"), memory=bytes(1 << 20))
    own = {"own_park": str(snapshot.id), "own_park_name": "one", "snapshot": str(snapshot.id)}
    add(full, "one", **own)
    if parked:
        with full.hold("one") as held:
            held.save(state=State.PARKED)
    (full.path("one") / "disk.qcow2").write_bytes(bytes(1 << 20))
    fill(full)
    removed = removal.remove(full, "one")
    assert (removed.snapshot, removed.kept) == (("one", None) if parked else (None, "one"))
    assert not full.path("one").exists()
    with ChunkStore.open(full.config.store, readonly=True) as store:
        assert (store.snapshots.get("one") is None) is parked


@pytest.mark.root
def test_a_resume_that_was_cut_off_on_a_full_disk_is_parked_still(full: Vms) -> None:
    add(full, "one")
    with full.hold("one") as held:
        held.save(state=State.RESUMING, snapshot="cd" * 32)
    fill(full)
    for _ in range(2):
        with full.hold("one") as held:
            assert held.record.state == State.PARKED
    (full.config.home / "filler").unlink()
    with full.hold("one"):
        assert full.get("one").state == State.PARKED


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, VmFullError), (errno.EIO, VmSetupError)])
def test_an_error_of_the_disk_says_what_to_do(number: int, kind: type[VmSetupError]) -> None:
    with pytest.raises(VmSetupError, match="disk of VM 'one': ") as raised, disk_faults("disk of VM 'one'"):
        raise OSError(number, os.strerror(number))
    assert type(raised.value) is kind
    assert raised.value.hint


def test_an_error_in_the_making_removes_it(vms: Vms) -> None:
    with pytest.raises(RuntimeError), vms.make(wanted("one")) as held:
        held.save()
        held.make_run()
        raise RuntimeError
    assert not vms.path("one").exists()
    assert not vms.run("one").exists()


def test_a_held_vm_is_busy(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmm.vms._WAIT_S", 0.05)
    add(vms, "one")
    with vms.hold("one"):
        assert vms.try_hold("one") is None
        with pytest.raises(VmBusyError, match="'one'"), vms.hold("one"):
            pass
    with vms.hold("one") as held:
        assert held.record.state == State.RUNNING


def test_a_damaged_record_is_told_and_can_be_removed(vms: Vms) -> None:
    add(vms, "one")
    (vms.path("one") / "vm.json").write_text("{}")
    assert list(vms.found()) == [("one", None)]
    with pytest.raises(VmError, match="damaged"):
        vms.get("one")
    with pytest.raises(VmError, match="does not say"):
        kept_images(vms.config)
    vms.remove_damaged("one")
    assert not vms.path("one").exists()


def test_what_vms_stand_on_is_kept(vms: Vms) -> None:
    add(vms, "one", snapshot="cd" * 32)
    add(vms, "two", image="")
    assert kept_images(vms.config) == {ChunkId.parse("ab" * 32)}
    assert kept_snapshots(vms.config) == {ChunkId.parse("cd" * 32)}


def test_begin_can_be_undone(vms: Vms) -> None:
    add(vms, "one")
    with vms.hold("one") as held:
        before = held.record
        held.begin(state=State.PARKING, park=Park(name="one", created_ns=1))
        assert vms.get("one").state == State.PARKING
        held.undo()
        assert held.record == vms.get("one") == before


@pytest.mark.parametrize("raw", [b"", b"{", None])
def test_an_intent_that_was_not_durable_when_the_host_went_down_is_undone(vms: Vms, raw: bytes | None) -> None:
    add(vms, "one")
    with vms.hold("one") as held:
        held.begin(state=State.PARKING, park=Park(name="one", created_ns=1))
        held.sync()
    before = vms.path("one") / ".vm.json.next"
    before.unlink() if raw is None else before.write_bytes(raw)
    with vms.hold("one") as held:
        assert (held.record.state, held.record.park) == (State.RUNNING, None)


@pytest.mark.parametrize("state", [State.BOOTING, State.REMOVING])
def test_what_was_half_made_or_half_removed_goes(vms: Vms, state: State) -> None:
    add(vms, "one")
    with vms.hold("one") as held:
        held.save(state=state)
    with pytest.raises(VmNotFoundError), vms.hold("one"):
        pass
    assert not vms.path("one").exists()


def test_a_resume_that_was_cut_off_is_parked_still(vms: Vms) -> None:
    add(vms, "one")
    with vms.hold("one") as held:
        held.save(state=State.RESUMING, snapshot="cd" * 32)
        held.make_run()
    with vms.hold("one") as held:
        assert held.record.state == State.PARKED
    assert not vms.run("one").exists()


@pytest.mark.parametrize("state", [State.PARKING, State.FORKING])
def test_a_park_that_was_cut_off_before_its_snapshot_is_undone(vms: Vms, state: State) -> None:
    add(vms, "one")
    with vms.hold("one") as held:
        held.begin(state=state, park=Park(name="one", created_ns=1))
    with vms.hold("one") as held:
        assert (held.record.state, held.record.park) == (State.RUNNING, None)


def test_a_temporary_vm_goes_when_its_command_is_gone(vms: Vms) -> None:
    with vms.make(wanted("one", state=State.RUNNING, temporary=True)) as held:
        held.save()
    assert is_owned(vms.path("one"))
    assert recovery.is_settled(vms, vms.get("one"))
    release(held.owner_fd)
    assert not recovery.is_settled(vms, vms.get("one"))
    with pytest.raises(VmNotFoundError), vms.hold("one"):
        pass
    assert vms.list() == []


def test_a_vm_that_was_parked_while_it_was_looked_at_has_not_ended(vms: Vms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who removes what has ended would take away what was just parked."""
    add(vms, "one")
    add(vms, "two")
    attach = Process.attach

    def parked_meanwhile(run: Path) -> Process:
        for name, change in (("one", {"state": State.PARKED, "snapshot": "cd" * 32}), ("two", None)):
            if run == vms.run(name) and vms.exists(name):
                with vms.hold_as_it_is(name) as held:
                    held.save(**change) if change else vms.remove(held)
        return attach(run)

    monkeypatch.setattr(Process, "attach", parked_meanwhile)
    assert [(one.name, one.state) for one in survey.survey(vms)] == [("one", "parked")]
