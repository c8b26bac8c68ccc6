"""What a park that fails says of its VM, without a VM."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from imaged.errors import StoreError
from vmm import parking, recovery
from vmm.errors import QemuError
from vmm.held import Held
from vmm.process import Ending
from vmm.qemu import Qemu
from vmm.record import State


class Stopped:
    """A QEMU that does not continue its guest, because it has ended or not."""

    def __init__(self, ending: Ending | None) -> None:
        self._ending = ending

    def cont(self) -> None:
        raise QemuError("no answer")

    def ending(self) -> Ending | None:
        return self._ending


def held(undone: list[str]) -> Held:
    undo = SimpleNamespace(name="web", run=Path("/nowhere"), record=None, undo=lambda: undone.append("web"))
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
