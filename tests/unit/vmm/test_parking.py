"""What a park that fails says of its VM, without a VM."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from imaged.config import Config
from imaged.errors import StoreError, StoreFullError
from imaged.progress import NoProgress
from tests.unit.vmm.test_vms import add
from vmm import capture, parking, recovery
from vmm.captured import Captured
from vmm.errors import QemuError, VmSetupError, VmStateError
from vmm.held import Held
from vmm.process import Ending
from vmm.qemu import Qemu
from vmm.record import Park, State
from vmm.vms import Vms


class Stopped:
    """A QEMU that does not continue its guest, because it has ended or not."""

    def __init__(self, ending: Ending | None) -> None:
        self._ending = ending

    def cont(self) -> None:
        raise QemuError("no answer")

    def ending(self) -> Ending | None:
        return self._ending


def held(undone: list[str]) -> Held:
    record = SimpleNamespace(state=State.RUNNING)
    undo = SimpleNamespace(name="web", run=Path("/nowhere"), record=record, undo=lambda: undone.append("web"))
    return cast(Held, undo)


@pytest.mark.parametrize("ending", [None, Ending(signal=9, crashed=True)])
def test_a_guest_that_can_not_go_on(ending: Ending | None) -> None:
    undone: list[str] = []
    error = StoreError("no room", hint="make some")
    parking._go_on(held(undone), cast(Qemu, Stopped(ending)), error)
    if ending is None:
        assert error.hint.startswith("VM web could not be continued yet (no answer): `pvisor vm ls` tries again; ")
        assert undone == []
    else:
        assert error.hint == "VM web has ended: signal 9 (SIGKILL); make some"
        assert undone == ["web"]


def test_that_it_can_not_be_told_whether_it_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise StoreError("the index can not be read")

    monkeypatch.setattr(recovery, "published", broken)
    with pytest.raises(QemuError, match="lost") as raised:
        parking._published(cast(Any, None), held([]), QemuError("lost"))
    assert "stands still (the index can not be read)" in raised.value.hint
    assert "`pvisor vm ls`" in raised.value.hint


def test_an_interrupt_before_the_work_beside_has_begun_is_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), parking._meanwhile(lambda: None):
        pass


@pytest.mark.parametrize("state", list(State))
def test_what_an_interrupt_leaves_half_done_is_settled_at_once(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    settled: list[Held] = []
    monkeypatch.setattr(recovery, "settle", lambda _, held: settled.append(held))
    found = cast(Held, SimpleNamespace(record=SimpleNamespace(state=state)))
    with pytest.raises(KeyboardInterrupt), parking._left_in_order(cast(Any, None), found):
        raise KeyboardInterrupt
    assert settled == ([found] if state in (State.PARKING, State.FORKING) else [])
    with parking._left_in_order(cast(Any, None), found):
        pass
    assert len(settled) <= 1


def without_room(*_: Any) -> Any:
    raise StoreFullError("can not make a lease: No space left on device", hint="free space there")


@pytest.mark.parametrize("verb", ["park", "fork"])
def test_that_a_vm_runs_on_is_said_also_when_nothing_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(parking, "_store", without_room)
    vms = Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))
    add(vms, "web")
    with pytest.raises(StoreFullError) as raised:
        if verb == "park":
            parking.park(vms, "web")
        else:
            with parking.frozen(vms, "web"):
                pass
    assert raised.value.hint == "VM web runs on; free space there"
    assert vms.get("web").state == State.RUNNING


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (StoreError("full", hint="free some"), "VM web runs on; free some"),
        (StoreError("full"), "VM web runs on"),
        (StoreError("full", hint="VM web runs on; free some"), "VM web runs on; free some"),
        (StoreError("full", hint="VM web stands still (why)"), "VM web stands still (why)"),
        (VmStateError("it has ended"), ""),
        (QemuError("ended"), ""),
    ],
)
def test_what_is_said_of_a_vm_is_said_once(error: Any, hint: str) -> None:
    with pytest.raises(type(error)), parking._left_in_order(cast(Any, None), held([])):
        raise error
    assert error.hint == hint


def test_a_disk_that_is_gone_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "capture_memory", lambda *_, **__: Captured(id=cast(Any, None), dirty_bytes=0))
    record = SimpleNamespace(memory_bytes=1 << 20, disk_bytes=1 << 20)
    web = cast(Any, SimpleNamespace(name="web", record=record, disk=tmp_path / "disk.qcow2"))
    parent = cast(Any, SimpleNamespace(record=None, memory=None, memory_path=None, disk=lambda: None))
    nothing = cast(Any, SimpleNamespace(pid=0, get=None, frames=None, flush=None))
    with pytest.raises(VmSetupError, match=r"disk of VM 'web': .*disk.qcow2: No such file") as raised:
        capture.write_down(
            nothing, web, nothing, parent, cast(Any, None), cast(Any, None), Park(name="", created_ns=0), NoProgress()
        )
    assert "pvisor vm exec web" in raised.value.hint
