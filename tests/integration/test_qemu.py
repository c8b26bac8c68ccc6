"""Real guests under the real QEMU: boot, save, restore, again; forks; and how the end of a QEMU is told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.snapshot import Machine
from tests.support.bareguest import WAIT_S, BareGuest, Shell, restored, save, shell
from vmm import facts
from vmm.disk import create_disk
from vmm.errors import QemuError, QemuTimeoutError, SnapshotMismatchError, VmStateError
from vmm.machine import UPPER_FILE, MachineSpec
from vmm.process import Process, alive, last_ending
from vmm.qcow2 import create_overlay
from vmm.qemu import Qemu

pytestmark = [pytest.mark.qemu, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]
COUNT = "(i=0; while :; do i=$((i+1)); echo $i > /tmp/count.new; mv /tmp/count.new /tmp/count; usleep 20000; done)"
LIVES = """
before=$(cat /tmp/count); n=0; while [ $(cat /tmp/count) -le $before ] && [ $n -lt 120 ]; do n=$((n+1)); sleep 0.5; done
after=$(cat /tmp/count); echo count $before $after; test $after -gt $before
test "$(dd if=/dev/vda bs=1 skip={at} count=4 2>&1 | head -c 4)" = mmmm && echo metadata
test "$(dd if=/dev/vdb bs=1 skip={at} count=4 2>&1 | head -c 4)" = dddd && echo data
ping -c 1 -W 5 10.0.2.2 > /dev/null && echo net
test $(dd if=/dev/hwrng bs=8 count=1 2>/dev/null | wc -c) -gt 0 && echo random
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareGuest:
    return BareGuest.make(tmp_path_factory.mktemp("guest"))


@contextlib.contextmanager
def running(spec: MachineSpec, run_dir: Path, *, recorded: Machine | None = None) -> Iterator[Qemu]:
    with Qemu.start(spec, run_dir, recorded=recorded) as qemu:
        try:
            if spec.state_path is not None:
                qemu.wait_loaded()
                qemu.cont()
            yield qemu
        finally:
            if alive(run_dir):
                with Qemu.attach(run_dir) as again:
                    again.kill()


def answering(run_dir: Path) -> None:
    """Wait until a guest that boots has its shells."""
    with shell(run_dir) as first:
        assert first.run("echo up") == "up\n"


def lives(run_dir: Path, *, at: int) -> None:
    """The counter counts, the disks give bytes never read before, and the network and the random device answer."""
    with shell(run_dir) as guest:
        for line in LIVES.format(at=at).strip().splitlines():
            guest.run(line)


def count(guest: Shell) -> int:
    return int(guest.run("cat /tmp/count"))


@pytest.fixture(scope="module")
def parked(bare: BareGuest, tmp_path_factory: pytest.TempPathFactory) -> tuple[MachineSpec, Path]:
    """A guest with a counter and a qcow2 disk, saved after a second of life."""
    run = tmp_path_factory.mktemp("parent")
    disk = run / "upper"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(disk), "16M"], check=True, timeout=60)
    spec = dataclasses.replace(bare.boot(run), upper_path=disk)
    with running(spec, run) as qemu:
        with shell(run) as guest:
            guest.run("ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0")
            guest.run(f"{COUNT} < /dev/null > /dev/null 2>&1 &")  # a port has one user at a time
            guest.run("echo kept > /tmp/kept; exec 7</tmp/kept; rm /tmp/kept")
            guest.run("echo written | dd of=/dev/vdc conv=fsync 2>/dev/null; sleep 1")
        lives(run, at=4096)
        assert save(qemu, spec, run / "saved") > 0
    return spec, run / "saved"


def test_a_guest_lives_on_twice_in_a_row(parked: tuple[MachineSpec, Path], tmp_path: Path) -> None:
    """Generation 2 stands on generation 1's private pages over generation 0's memory."""
    spec, saved = parked
    least = 0
    for generation in (1, 2):
        run = tmp_path / f"run{generation}"
        spec = restored(spec, saved, run)
        before = spec.memory_path.stat().st_mtime_ns
        with running(spec, run) as qemu:
            lives(run, at=generation << 20)
            with shell(run) as guest:
                assert count(guest) > least
                least = count(guest)
                assert guest.run("dd if=/dev/vdc bs=1 count=7 2>/dev/null") == "written"
                if generation == 2:
                    assert guest.run("cat /tmp/made") == "by 1\n"
                guest.run(f"echo by {generation} > /tmp/made")
            saved = tmp_path / f"saved{generation}"
            own_bytes = save(qemu, spec, saved)
            assert own_bytes < spec.memory_bytes // 4
        assert spec.memory_path.stat().st_mtime_ns == before


def test_a_running_guest_goes_on_after_it_was_forked(parked: tuple[MachineSpec, Path], tmp_path: Path) -> None:
    spec = restored(*parked, tmp_path / "parent")
    with running(spec, tmp_path / "parent") as parent:
        save(parent, spec, tmp_path / "saved")
        parent.cont()
        assert parent.status() == "running"
        lives(tmp_path / "parent", at=8192)
        runs = [tmp_path / "one", tmp_path / "two"]
        with contextlib.ExitStack() as stack:
            for run in runs:
                stack.enter_context(running(restored(spec, tmp_path / "saved", run), run))
            for run in [*runs, tmp_path / "parent"]:
                lives(run, at=12288)
                with shell(run, port=7) as guest:
                    guest.run(f"test ! -e /tmp/mine && echo {run.name} > /tmp/mine")
            for run in [*runs, tmp_path / "parent"]:
                with shell(run, port=3) as guest:
                    assert guest.run("cat /tmp/mine") == f"{run.name}\n"


def test_a_second_command_finds_it_and_has_the_same_facts(parked: tuple[MachineSpec, Path], tmp_path: Path) -> None:
    spec = restored(*parked, tmp_path)
    with running(spec, tmp_path) as qemu:
        found = qemu.facts()
        assert found.machine.startswith("pc-")
        assert (found.accelerator, found.network, found.memory_bytes) == (
            spec.accelerator,
            "user",
            spec.memory_bytes,
        )
        with Qemu.attach(tmp_path) as other:
            assert (other.pid, other.facts()) == (qemu.pid, found)
            with pytest.raises(QemuTimeoutError, match="greeting"):
                other.status(timeout_s=0.1)
        qemu.stop()
        qemu.close()
        with Qemu.attach(tmp_path) as other:
            assert other.status() == "paused"


@pytest.mark.parametrize("name", ["qemu", "machine", "firmware", "cpus"])
def test_another_machine_is_refused_with_both_values(
    parked: tuple[MachineSpec, Path], tmp_path: Path, name: str
) -> None:
    spec = restored(*parked, tmp_path)
    with running(spec, tmp_path) as qemu:
        recorded = qemu.facts()
    facts.check_host(recorded)
    other = Machine.from_json(recorded.to_json() | {name: 3 if name == "cpus" else "another"})
    with pytest.raises(SnapshotMismatchError) as caught:
        Qemu.start(spec, tmp_path, recorded=other)
    assert (caught.value.recorded, caught.value.found) == (str(getattr(other, name)), str(getattr(recorded, name)))
    assert not alive(tmp_path)


def test_damaged_device_state_is_an_error_with_the_cause(parked: tuple[MachineSpec, Path], tmp_path: Path) -> None:
    spec = restored(*parked, tmp_path)
    assert spec.state_path is not None
    whole = spec.state_path.read_bytes()
    (tmp_path / "state").write_bytes(whole[: len(whole) // 2])
    with Qemu.start(dataclasses.replace(spec, state_path=tmp_path / "state"), tmp_path) as qemu:
        with pytest.raises(QemuError, match="could not load the device state") as caught:
            qemu.wait_loaded()
        assert not isinstance(caught.value, QemuTimeoutError)
        assert caught.value.log_line
    assert not alive(tmp_path)


def test_state_that_can_not_be_written_lets_the_guest_go_on(parked: tuple[MachineSpec, Path], tmp_path: Path) -> None:
    spec = restored(*parked, tmp_path)
    with running(spec, tmp_path) as qemu:
        qemu.stop()
        with pytest.raises(QemuError, match="xen-save-devices-state"):
            qemu.save_state(tmp_path / "none" / "state")
        with pytest.raises(QemuError, match="xen-save-devices-state"):
            qemu.save_state(Path("/dev/full"))
        qemu.cont()
        lives(tmp_path, at=20480)


def test_what_can_not_start_says_why(bare: BareGuest, tmp_path: Path) -> None:
    spec = dataclasses.replace(bare.boot(tmp_path), data_path=tmp_path / "none")
    with pytest.raises(QemuError, match=r"exit status 1; its log ends: .*none.*No such file") as caught:
        Qemu.start(spec, tmp_path)
    assert caught.value.ended == "exit status 1"
    assert not alive(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_the_end_of_qemu_ends_every_wait(
    parked: tuple[MachineSpec, Path], tmp_path: Path, number: signal.Signals
) -> None:
    spec = restored(*parked, tmp_path)
    with running(spec, tmp_path) as qemu:
        killer = threading.Timer(0.3, os.kill, (qemu.pid, number))
        monitor = qemu._connection(WAIT_S)
        killer.start()
        with pytest.raises(QemuError, match=f"signal {int(number)}") as caught:
            monitor.event("NEVER", timeout_s=WAIT_S)
        assert not isinstance(caught.value, QemuTimeoutError)
        killer.join()
        with pytest.raises(QemuError, match=f"signal {int(number)}"):
            qemu.status()
    with pytest.raises(VmStateError, match=f"signal {int(number)}"):
        Qemu.attach(tmp_path)


def test_a_guest_that_powers_off_is_told_from_one_that_crashed(
    parked: tuple[MachineSpec, Path], tmp_path: Path
) -> None:
    for name, command in (("off", "poweroff -f"), ("reboot", "reboot -f")):
        run = tmp_path / name
        spec = restored(*parked, run)
        with running(spec, run) as qemu:
            with shell(run) as guest, contextlib.suppress(Exception):
                guest.run(command)
            ending = qemu.wait(WAIT_S)
            assert ending.powered_off, ending
        left = last_ending(run)
        assert left is not None
        assert left.powered_off
        (run / "qemu.ended").unlink()  # as for a command that was not there when it ended
        left = last_ending(run)
        assert left is not None
        assert left.powered_off
    spec = restored(*parked, tmp_path / "crash")
    with running(spec, tmp_path / "crash") as qemu:
        qemu.kill()
    (tmp_path / "crash" / "qemu.ended").unlink()
    left = last_ending(tmp_path / "crash")
    assert left is not None
    assert left.crashed


@pytest.mark.parametrize("overlay", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_disk_that_can_not_be_written_out_is_told(tmp_path: Path, overlay: bool, fails: bool) -> None:
    """QEMU without a guest; what it wrote of the disk's metadata is still in its memory."""
    base, disk, size_bytes = tmp_path / "base, 1", tmp_path / "disk.qcow2", 64 << 20
    with open(base, "xb") as stream:
        stream.truncate(size_bytes)
    if overlay:
        create_overlay(disk, base, size_bytes)
    else:
        create_disk(disk, size_bytes)
    file = f"file.driver=file,file.filename={disk}"
    if fails:
        inject = "file.inject-error.0.event=flush_to_disk,file.inject-error.0.errno=28,file.inject-error.0.once=off"
        file = f"file.driver=blkdebug,file.image.driver=file,file.image.filename={disk},{inject}"
    node = f"driver=qcow2,node-name=upper,discard=unmap,file.node-name={UPPER_FILE},{file}"
    argv = [*(facts.program(), "-S", "-nodefaults", "-display", "none", "-machine", "q35", "-m", "64")]
    argv += ["-qmp", f"unix:{tmp_path}/qmp.sock,server=on,wait=off", "-blockdev", node]
    argv += ["-device", "virtio-blk-pci,drive=upper,share-rw=on"]
    Process.spawn(argv, tmp_path, inherit=()).close()
    deadline = time.monotonic() + WAIT_S
    with Qemu.attach(tmp_path) as qemu:
        try:
            while True:
                with contextlib.suppress(QemuError):  # it has no monitor yet
                    qemu.status()
                    break
                assert time.monotonic() < deadline
                time.sleep(0.01)
            qemu._execute("human-monitor-command", {"command-line": 'qemu-io upper "write -P 7 0 4k"'})
            qemu.stop()
            with pytest.raises(QemuError, match="No space left") if fails else contextlib.nullcontext():
                qemu.flush_disk()
            assert "running" not in qemu.status()
        finally:
            qemu.kill()


def test_the_console_of_a_boot_is_kept_until_it_is_let_go(bare: BareGuest, tmp_path: Path) -> None:
    spec = bare.boot(tmp_path, network="none")
    with running(spec, tmp_path) as qemu:
        answering(tmp_path)
        text, deadline = "", time.monotonic() + WAIT_S
        while "bare guest is up" not in text and time.monotonic() < deadline:
            text += qemu.console_tail()
            time.sleep(0.01)
        assert "bare guest is up" in text
        qemu.close()
        with socket.socket(socket.AF_UNIX) as console:
            console.connect(str(tmp_path / "serial.sock"))
