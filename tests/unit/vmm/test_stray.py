"""A QEMU whose files are gone is found by its command line, and no other process is taken for one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.config import Config
from tests.unit.vmm.test_vms import add
from vmm import process, recovery, stray
from vmm.errors import VmError, VmNotFoundError
from vmm.process import Process
from vmm.removal import Removed, remove
from vmm.survey import status, survey
from vmm.vms import Vms

LONG_S = 60.0


@pytest.fixture
def vms(tmp_path: Path) -> Vms:
    return Vms(Config(home=tmp_path / "home", run=tmp_path / "run"))


@pytest.fixture
def running(vms: Vms) -> Iterator[Process]:
    """What stands for the QEMU of the VM `one`."""
    add(vms, "one")
    run = vms.run("one")
    run.mkdir(parents=True)
    ready = vms.path("one") / "ready"
    os.mkfifo(ready)
    # No shell: what that starts has its command line, too, for a moment.
    program = 'import sys, time; open(sys.argv[1], "w").close(); time.sleep(60)'
    argv = [sys.executable, "-c", program, str(ready), "-pidfile", str(run / stray.LIVE_NAME)]
    started = Process.spawn(argv, run, inherit=())
    ready.read_bytes()
    yield started
    started.kill()
    started.close()


def test_it_is_found_and_gets_its_pid_file_again(vms: Vms, running: Process) -> None:
    run = vms.run("one")
    assert stray.running_in(run.parent) == {"one": running.pid}
    assert stray.find(run.parent) is None
    for text in (None, "", "no line of stat\n"):
        (run / "qemu.pid").unlink()
        if text is not None:
            (run / "qemu.pid").write_text(text)
        assert process.pid_of(run) == running.pid
        assert (run / "qemu.pid").read_text().startswith(f"{running.pid} ")


def test_its_directory_may_be_gone(vms: Vms, running: Process) -> None:
    shutil.rmtree(vms.run("one"))
    assert process.pid_of(vms.run("one")) == running.pid
    recovery.end(vms.run("one"))
    assert not process.alive(vms.run("one"))


@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_vm_that_is_known_by_its_qemu_alone(vms: Vms, running: Process, all_of_it: bool) -> None:
    if all_of_it:
        shutil.rmtree(vms.path("one"))
    else:
        (vms.path("one") / "vm.json").unlink()
    assert list(vms.found()) == [("one", None)]
    (found,) = survey(vms)
    assert (found.state, found.pid) == ("damaged", running.pid) == (status(vms, "one").state, running.pid)
    with pytest.raises(VmError, match=r"vm\.json is gone") as caught, vms.hold("one"):
        pass
    assert "vm rm one" in caught.value.hint
    assert remove(vms, "one") == Removed(name="one")
    assert running.ending() is not None
    assert not vms.path("one").exists()
    with pytest.raises(VmNotFoundError):
        remove(vms, "one")


def test_others_are_none(vms: Vms, running: Process) -> None:
    other = subprocess.Popen(["sh", "-c", "sleep 60; true", str(vms.run("two") / stray.LIVE_NAME), "-pidfile"])
    try:
        assert stray.running_in(vms.run("one").parent) == {"one": running.pid}
    finally:
        other.kill()
        other.wait(LONG_S)


@pytest.mark.parametrize("line", [b"sh\0-pidfile", b"sh\0-pidfile\0", b"-pidfile\0/x/qemu.live\0", b"", b"\0"])
def test_a_command_line_may_be_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    """A process writes over its own, too."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(line)
    monkeypatch.setattr(stray, "_PROCESSES", tmp_path)
    assert stray.running_in(Path("/x")) == {}
