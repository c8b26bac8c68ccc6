"""Which network a VM gets that goes on from a snapshot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fuse import node
from imaged.config import Config
from tests.support.parked import opened_snapshot
from tests.unit.vmm.test_vms import add
from vmm import recovery, restore
from vmm.errors import QemuError, VmArgumentError
from vmm.qemu import Qemu
from vmm.record import State
from vmm.restore import _network
from vmm.vms import Vms


def opened(made_with: str, *, pulled: bool = False) -> Any:
    machine = SimpleNamespace(network=made_with)
    return SimpleNamespace(name="web", id="0" * 64, record=SimpleNamespace(machine=machine), pulled=pulled)


@pytest.mark.parametrize(
    ("made_with", "pulled", "asked", "given"),
    [
        ("none", False, None, "none"),
        ("none", True, "none", "none"),
        ("user", False, None, "user"),
        ("user", False, "none", "restricted"),
        ("user", False, "restricted", "restricted"),
        ("user", True, None, "restricted"),
        ("user", True, "none", "restricted"),
        ("user", True, "user", "user"),
        ("restricted", False, None, "restricted"),
        ("restricted", False, "user", "user"),
    ],
)
def test_a_pulled_snapshot_does_not_decide(made_with: str, *, pulled: bool, asked: str | None, given: str) -> None:
    assert _network(opened(made_with, pulled=pulled), asked) == given


def test_what_was_made_without_one_can_get_none() -> None:
    with pytest.raises(VmArgumentError):
        _network(opened("none"), "user")


def test_a_parked_vm_keeps_its_own_when_it_is_not_resumed_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose command was cut off: what that had asked for is no wish of the next."""

    def fails(*_: Any, **__: Any) -> Any:
        raise QemuError("no room")

    monkeypatch.setattr(Qemu, "start", fails)
    monkeypatch.setattr(restore, "require_device", lambda _: 7)
    monkeypatch.setattr(node, "check_snapshot", lambda *_: None)
    vms = Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))
    add(vms, "web", network="user")
    snapshot = opened_snapshot(tmp_path)
    with vms.hold("web") as held:
        held.save(state=State.RESUMING)
        with pytest.raises(QemuError):
            restore._start(vms, held, snapshot, -1, 7, "restricted")
        assert (vms.get("web").state, vms.get("web").network) == (State.RESUMING, "user")
        recovery.undo_resume(held)
    assert (vms.get("web").state, vms.get("web").network) == (State.PARKED, "user")
