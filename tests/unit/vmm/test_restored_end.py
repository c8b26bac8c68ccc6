"""What a resume says of a QEMU that ended when its guest began to run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse import node
from fuse.errors import NodeError
from imaged.config import Config
from tests.support.parked import opened_snapshot
from tests.unit.vmm.test_vms import add
from vmm import identity, recovery, restore
from vmm.errors import AgentError, QemuError
from vmm.process import Process, pid_of
from vmm.qemu import Qemu
from vmm.record import State
from vmm.vms import Vms

DEVICE = 7


class Loaded:
    """A QEMU that has loaded its device state."""

    def __init__(self, run: Path) -> None:
        self.process = Process.spawn(["/bin/sleep", "1000"], run, inherit=())

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def wait_loaded(self) -> None:
        pass

    def cont(self) -> None:
        pass


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Resumes a VM whose QEMU is killed just after its sockets went."""
    vms = Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))
    add(vms, "web")

    def give(run: Path, *_: Any, **__: Any) -> None:
        pid = pid_of(run)
        assert pid is not None
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        raise AgentError("the connection to the guest ended")

    monkeypatch.setattr(Qemu, "start", lambda _, run, **__: Loaded(run))
    monkeypatch.setattr(identity, "give", give)
    monkeypatch.setattr(restore, "require_device", lambda _: DEVICE)
    monkeypatch.setattr(node, "check_snapshot", lambda *_: None)
    snapshot = opened_snapshot(tmp_path)
    with vms.hold("web") as held:
        held.save(state=State.RESUMING)
        try:
            yield lambda: restore._start(vms, held, snapshot, -1, DEVICE, "none")
        finally:
            recovery.end(held.run)


def test_how_it_ended_is_told_where_daemon_and_snapshot_are_whole(resumed: Callable[[], None]) -> None:
    with pytest.raises(QemuError, match=r"signal 9 \(SIGKILL\)") as raised:
        resumed()
    assert raised.value.hint


def test_a_chunk_that_is_damaged_is_told_instead(resumed: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any) -> None:
        raise NodeError("snapshot web: chunk 7: damaged")

    monkeypatch.setattr(node, "check_snapshot", damaged)
    with pytest.raises(NodeError, match="chunk 7"):
        resumed()


def test_a_daemon_that_is_gone_is_told_also_when_another_has_come(
    resumed: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "require_device", lambda _: DEVICE + 1)
    with pytest.raises(NodeError, match="the node daemon is gone"):
        resumed()
