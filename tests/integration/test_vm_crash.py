"""What is left of VMs when commands, QEMU, the node daemon or the disk fail: always a VM that runs, or one parked."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import linux, rundir
from imaged.config import Config
from tests.support.command import Host
from tests.support.cutoff import cut_off
from tests.support.node import kill_daemon
from tests.support.vm import qemus, sh, shown, start, state, vm_host, wait_until
from vmm.qemu import Qemu
from vmm.record import State, load

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]

# Where `vm park` is killed: what is replaced by the kill, and whether the VM is parked then.
MOMENTS = {
    "before the guest stops": ("vmm.qemu.Qemu.stop", False),
    "while the guest stands": ("vmm.qemu.Qemu.save_state", False),
    "before the memory is read": ("vmm.capture.capture_memory", False),
    "before the snapshot has its name": ("imaged.snapshots.publish_over", False),
    "when the snapshot has its name": ("vmm.recovery.finish_park", True),
    "while QEMU ends": ("vmm.process.Process.wait", True),
    "before its directory is removed": ("vmm.recovery.clear", True),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm")) as host:
        yield host


@pytest.fixture(scope="module")
def counting(made: Host) -> str:
    """A VM in which something goes on."""
    start(made, "counting")
    counts = "i=0; while :; do i=$((i+1)); echo $i > /run/count.new; mv /run/count.new /run/count; sleep 0.05; done"
    sh(made, "counting", f"({counts}) > /dev/null 2>&1 & until [ -s /run/count ]; do sleep 0.05; done")
    return "counting"


def killed_at(made: Host, moment: str, *argv: str) -> None:
    done = cut_off(made, moment, "kill", *argv)
    assert done.returncode == -9, done


def count(made: Host, name: str) -> int:
    return int(sh(made, name, "cat /run/count"))


def assert_goes_on(made: Host, name: str) -> None:
    first = count(made, name)
    wait_until(lambda: count(made, name) > first)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_park_that_is_killed_leaves_a_running_vm_or_a_parked_one(made: Host, counting: str, moment: str) -> None:
    target, parked = MOMENTS[moment]
    before = count(made, counting)
    killed_at(made, target, "vm", "park", counting)
    assert state(made, counting) == ("parked" if parked else "running")
    assert [one["name"] for one in made.json("snapshot", "ls")].count(counting) == (1 if parked else 0)
    if parked:
        assert qemus(made) == []
        assert not (made.root / "run" / "vms" / counting).exists()
        made.run("vm", "resume", counting)
    assert count(made, counting) >= before
    assert_goes_on(made, counting)
    if parked:  # so that the next one begins without a snapshot of this name
        made.run("snapshot", "rm", counting)
    made.assert_sound()


def test_a_park_that_is_killed_when_it_has_ended_qemu_is_parked(made: Host, counting: str) -> None:
    before = count(made, counting)
    killed_at(made, "vmm.recovery.finish_park", "vm", "park", counting)
    os.kill(qemus(made)[0], signal.SIGKILL)
    assert state(made, counting) == "parked"
    made.run("vm", "resume", counting)
    assert count(made, counting) >= before
    made.run("snapshot", "rm", counting)


@pytest.mark.parametrize("moment", ["vmm.qemu.Qemu.wait_loaded", "vmm.qemu.Qemu.cont", "vmm.identity.give"])
def test_a_resume_that_is_killed_leaves_it_parked(made: Host, counting: str, moment: str) -> None:
    made.run("vm", "park", counting)
    killed_at(made, moment, "vm", "resume", counting)
    assert state(made, counting) == "parked"
    assert qemus(made) == []
    made.run("vm", "resume", counting)
    assert_goes_on(made, counting)


def test_a_fork_that_is_killed_leaves_the_parent_only(made: Host, counting: str) -> None:
    killed_at(made, "vmm.capture.capture_memory", "vm", "fork", counting)
    assert_goes_on(made, counting)
    killed_at(made, "vmm.qemu.Qemu.cont", "vm", "fork", counting, "-n", "2")
    assert state(made, f"{counting}-1") == state(made, f"{counting}-2") == "gone"
    assert_goes_on(made, counting)
    assert len(qemus(made)) == 1


def test_a_vm_whose_daemon_was_killed_is_cut_off_and_others_start(made: Host, counting: str) -> None:
    made.run("vm", "park", counting)
    (child,) = [one["name"] for one in made.json("vm", "fork", counting)]
    kill_daemon(Config(home=made.root / "home", run=made.root / "run"))
    wait_until(lambda: state(made, child) in ("cut off", "ended"))
    found = shown(made, child)
    assert found is not None
    assert found["detail"]
    made.run("vm", "resume", counting)
    assert state(made, child) in ("cut off", "ended")
    assert_goes_on(made, counting)
    made.run("vm", "rm", child)
    assert len(qemus(made)) == 1


@pytest.fixture(scope="module")
def base(made: Host, counting: str) -> str:
    """The snapshot of a VM in which something goes on; no VM runs."""
    made.run("vm", "park", counting, "--as", "base")
    return "base"


@pytest.fixture
def victim(made: Host, base: str) -> Iterator[str]:
    made.run("vm", "resume", base, "--name", "victim")
    yield "victim"
    names = [one["name"] for one in made.json("vm", "ls")]
    made.run("vm", "rm", *(name for name in names if name.startswith("victim")))
    for one in made.json("snapshot", "ls"):
        if one["name"] != base:
            made.run("snapshot", "rm", one["name"])
    assert qemus(made) == []


def while_killing(made: Host, pid: int, moment: str, *argv: str) -> tuple[int, str]:
    """The command's exit status, and what it says."""
    done = cut_off(made, moment, pid, *argv)
    told = done.stderr.decode()
    assert "Traceback" not in told
    return done.returncode, told


def daemon(made: Host) -> int:
    pid = rundir.daemon_pid(Config(home=made.root / "home", run=made.root / "run"))
    assert pid is not None
    return pid


@pytest.mark.parametrize(
    ("verb", "moment"), [("park", "vmm.qemu.Qemu.save_state"), ("fork", "vmm.capture.capture_memory")]
)
def test_a_qemu_that_dies_while_its_vm_is_written_down_has_ended(
    made: Host, victim: str, verb: str, moment: str
) -> None:
    code, told = while_killing(made, qemus(made)[0], moment, "vm", verb, victim)
    assert code == 1
    assert "has ended" in told
    found = shown(made, victim)
    assert found is not None
    assert (found["state"], "SIGKILL" in found["detail"]) == ("ended", True)
    assert [one["name"] for one in made.json("vm", "ls")] == ["counting", victim]
    assert victim not in [one["name"] for one in made.json("snapshot", "ls")]


@pytest.mark.parametrize("verb", ["park", "fork"])
def test_an_interrupt_while_it_is_written_down_lets_it_go_on_at_once(made: Host, victim: str, verb: str) -> None:
    """And not when the next command comes by: it would stand still until then. No command asks here."""
    moments = ["vmm.qemu.Qemu.save_state", "vmm.capture.capture_memory"]
    if verb == "fork":
        moments.append("vmm.recovery.undo_park")
    for moment in moments:
        done = cut_off(made, moment, "interrupt", "vm", verb, victim, late_s=0.001)
        assert done.returncode == 130, done
        assert done.stderr.strip() == b""
        assert load(made.root / "home" / "vms" / victim).state == State.RUNNING
        with Qemu.attach(made.root / "run" / "vms" / victim) as qemu:
            assert qemu.status() == "running"
        assert_goes_on(made, victim)


def test_a_qemu_that_dies_when_its_vm_is_written_down_is_parked(made: Host, victim: str) -> None:
    code, told = while_killing(made, qemus(made)[0], "vmm.recovery.finish_park", "vm", "park", victim)
    assert (code, told) == (0, "")
    assert state(made, victim) == "parked"
    made.run("vm", "resume", victim)
    assert_goes_on(made, victim)


def test_a_vm_whose_park_was_killed_when_it_was_done_can_be_forked_at_once(made: Host, victim: str) -> None:
    killed_at(made, "vmm.recovery.finish_park", "vm", "park", victim)
    made.run("vm", "fork", victim)
    assert (state(made, victim), state(made, f"{victim}-1")) == ("parked", "running")
    assert_goes_on(made, f"{victim}-1")


def test_a_daemon_that_dies_while_a_vm_is_parked(made: Host, victim: str) -> None:
    """What is the VM's own is in its QEMU, the rest in the store."""
    before = count(made, victim)
    code, told = while_killing(made, daemon(made), "vmm.capture.capture_memory", "vm", "park", victim)
    assert (code, told) == (0, "")
    assert state(made, victim) == "parked"
    made.run("vm", "resume", victim)
    assert count(made, victim) >= before
    assert_goes_on(made, victim)


def test_a_daemon_that_dies_while_a_vm_is_forked(made: Host, victim: str) -> None:
    """The child stands on the next daemon, the parent on one that is gone."""
    code, told = while_killing(made, daemon(made), "vmm.capture.capture_memory", "vm", "fork", victim)
    assert code == 0, told
    assert state(made, victim) in ("cut off", "ended")
    assert state(made, f"{victim}-1") == "running"
    assert_goes_on(made, f"{victim}-1")


@pytest.mark.parametrize(
    "moment", ["vmm.facts.check_host", "vmm.qemu.Qemu.start", "vmm.qemu.Qemu.wait_loaded", "vmm.qemu.Qemu.cont"]
)
def test_a_daemon_that_dies_while_a_vm_is_resumed(made: Host, victim: str, moment: str) -> None:
    made.run("vm", "park", victim)
    code, told = while_killing(made, daemon(made), moment, "vm", "resume", victim)
    if code:
        assert told.startswith("pvisor: error: ")
        assert "node daemon" in told
        assert state(made, victim) == "parked"
        made.run("vm", "resume", victim)
        assert_goes_on(made, victim)
    else:
        assert state(made, victim) in ("cut off", "ended")


def test_a_park_without_room_leaves_the_vm_running(tmp_path: Path) -> None:
    """And nothing of itself; with PVISOR_RUN on a tmpfs of less than the guest's memory, as /run may be."""
    small = {tmp_path / "run": "size=16m", tmp_path / "home" / "store": "size=320m"}
    for path, size in small.items():
        path.mkdir(parents=True)
        linux.mount("tmpfs", str(path), "tmpfs", 0, size)
    try:
        with vm_host(tmp_path) as made:
            start(made, "tight")
            sh(made, "tight", "head -c 100M /dev/urandom > /dev/shm/noise; sha256sum /dev/shm/noise > /sum")
            free = made.root / "home" / "store" / "filler"
            subprocess.run(["sh", "-c", f"dd if=/dev/zero of={free} bs=1M 2> /dev/null || true"], check=True)
            with open(free, "r+b") as stream:
                stream.truncate(free.stat().st_size - (90 << 20))
            before = made.json("store", "df")
            told = made.error("vm", "park", "tight")
            assert "runs on" in told
            assert state(made, "tight") == "running"
            assert made.json("snapshot", "ls") == []
            assert made.json("store", "df") == before
            assert sh(made, "tight", "cd /; sha256sum -c --quiet /sum; echo still here") == b"still here\n"
            free.unlink()
            made.assert_sound()
            made.run("vm", "park", "tight")
            made.run("vm", "resume", "tight")
            assert sh(made, "tight", "cd /; sha256sum -c --quiet /sum; echo still here") == b"still here\n"
            made.run("vm", "rm", "tight")
    finally:
        for path in small:
            linux.umount(path, linux.MNT_DETACH)
