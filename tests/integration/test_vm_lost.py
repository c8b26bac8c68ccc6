"""Files of a VM that are gone, QEMUs that stand still, guests that panic, commands that nobody follows: all of it is
told, and can be ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Host
from tests.support.vm import qemus, sh, shown, start, state, vm_host, wait_until
from vmm.qemu import Qemu

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm"), seeded=True) as host:
        start(host, "first")
        host.run("vm", "park", "first", "--as", "base")
        host.run("vm", "rm", "first")
        yield host


@pytest.fixture
def lost(made: Host) -> Iterator[str]:
    """A VM that runs; whatever becomes of it, it can be removed."""
    made.run("vm", "resume", "base", "--name", "lost")
    yield "lost"
    made.run("vm", "rm", "lost")
    assert qemus(made) == []
    assert made.json("vm", "ls") == []
    assert not list((made.root / "run" / "leases").glob("vm-*"))


def run_dir(made: Host, name: str) -> Path:
    return made.root / "run" / "vms" / name


def pid_of(made: Host, name: str) -> int:
    found = shown(made, name)
    assert found is not None and found["pid"] in qemus(made)
    return int(found["pid"])


def test_a_vm_without_its_pid_file_runs_and_without_its_directory_is_damaged(made: Host, lost: str) -> None:
    (run_dir(made, lost) / "qemu.pid").unlink()
    assert state(made, lost) == "running"
    (run_dir(made, lost) / "agent-0.sock").unlink()
    assert sh(made, lost, "echo here") == b"here\n"
    (run_dir(made, lost) / "machine.json").unlink()
    assert "machine.json" in made.error("vm", "park", lost)
    assert (state(made, lost), sh(made, lost, "echo here")) == ("running", b"here\n")
    shutil.rmtree(run_dir(made, lost))
    found = shown(made, lost)
    assert found is not None
    assert (found["state"], [found["pid"]]) == ("damaged", qemus(made))
    assert str(run_dir(made, lost)) in found["detail"]
    assert "`pvisor vm rm" in made.error("vm", "park", lost)


@pytest.mark.parametrize("what", ["vm.json", "damaged", "directory"])
def test_a_vm_without_its_record_is_listed_as_damaged(made: Host, lost: str, what: str) -> None:
    home = made.root / "home" / "vms" / lost
    if what == "directory":
        shutil.rmtree(home)
    elif what == "damaged":
        (home / "vm.json").write_bytes(b"{")
    else:
        (home / "vm.json").unlink()
    found = shown(made, lost)
    assert found is not None
    assert (found["state"], [found["pid"]]) == ("damaged", qemus(made))
    assert f"`pvisor vm rm {lost}`" in found["detail"]
    assert f"`pvisor vm rm {lost}`" in made.error("vm", "exec", lost, "--", "true", code=125)
    assert "does not say" in made.error("store", "gc")


def test_a_qemu_that_is_stopped_is_told_at_once(made: Host, lost: str) -> None:
    pid = pid_of(made, lost)
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    assert state(made, lost) == "stopped"
    for command in (("exec", lost, "--", "true"), ("ps", lost)):
        assert f"`kill -CONT {pid}`" in made.error("vm", *command, code=125 if command[0] == "exec" else 1)


def test_an_exec_that_has_not_begun_ends_by_a_signal(made: Host, lost: str) -> None:
    run = run_dir(made, lost)
    with Qemu.attach(run) as qemu:
        qemu.stop()
    assert state(made, lost) == "paused"
    waiting = made.start("vm", "exec", lost, "--", "true")

    lock = run / "agent-0.sock.lock"

    def connected() -> bool:
        """The kernel tells: whoever tried the lock would send the command to another port."""
        held = f" {waiting.pid} ", f":{lock.stat().st_ino} " if lock.exists() else "no such file"
        return any(all(word in line for word in held) for line in Path("/proc/locks").read_text().splitlines())

    wait_until(connected)
    waiting.terminate()
    assert waiting.wait(timeout=20) == 128 + signal.SIGTERM
    waiting.communicate()


def test_a_command_that_kills_everything_does_not_leave_its_exec_waiting(made: Host, lost: str) -> None:
    told = made.error("vm", "exec", lost, "--", "sh", "-c", "kill -9 -1", code=125)
    assert "the agent in VM 'lost' was killed while the command ran" in told
    assert f"`pvisor vm ps {lost}`" in told
    assert sh(made, lost, "echo here") == b"here\n"
    assert "pvisor: error: '': No such file" in made.error("vm", "exec", lost, "--", "", code=127)


def test_a_kernel_panic_is_told_with_what_the_kernel_said(made: Host, lost: str) -> None:
    told = made.error("vm", "exec", lost, "--", "sh", "-c", "echo c > /proc/sysrq-trigger", code=125)
    assert "has ended (the guest's kernel panicked: sysrq triggered crash)" in told
    assert "`pvisor vm resume base --name NEW`" in told
    found = shown(made, lost)
    assert found is not None
    assert (found["state"], found["detail"]) == ("ended", "the guest's kernel panicked: sysrq triggered crash")


def test_commands_that_nobody_follows_are_listed_and_ended(made: Host, lost: str) -> None:
    follower = made.start("vm", "exec", lost, "--", "sleep", "601")
    wait_until(lambda: [one["argv"] for one in made.json("vm", "ps", lost)] == [["sleep", "601"]])
    (found,) = made.json("vm", "ps", lost)
    assert found["followed"]
    follower.kill()
    follower.communicate()
    wait_until(lambda: not made.json("vm", "ps", lost)[0]["followed"])
    assert "has the process id 1" in made.error("vm", "kill", lost, "1")
    made.run("vm", "kill", lost, str(found["pid"]))
    wait_until(lambda: made.json("vm", "ps", lost) == [])
    assert made.run("vm", "ps", lost).stderr == b""
    sh(
        made,
        lost,
        """perl -e 'for (1..60) { fork or exec {"sleep"} "sleep", "603", ("0" x 300) x 3 }'
        until [ $(grep -slx sleep /proc/[0-9]*/comm | wc -l) -eq 60 ]; do sleep 0.1; done""",
    )
    assert b"not all of its processes are listed" in made.run("vm", "ps", lost).stderr
    sh(made, lost, "for p in /proc/[0-9]*; do ! grep -qsx sleep $p/comm || kill ${p#/proc/}; done")
    wait_until(lambda: made.json("vm", "ps", lost) == [])


def test_a_fork_of_a_vm_in_which_eight_commands_run_holds_them_still(made: Host, lost: str) -> None:
    followers = [made.start("vm", "exec", lost, "--", "sleep", "602") for _ in range(8)]
    wait_until(lambda: len(made.json("vm", "ps", lost)) == 8)
    forked = made.run("vm", "fork", lost)
    assert b"not held still" not in forked.stderr
    child = forked.stdout.decode().strip()
    assert len(made.json("vm", "ps", child)) == 8
    made.run("vm", "rm", child)
    for follower in followers:
        follower.kill()
        follower.communicate()


def test_what_can_not_be_is_refused_before_anything_is_made(made: Host) -> None:
    for count in ("1000000000", "1" + 40 * "0"):
        assert "of memory are free" in made.error("vm", "fork", "base", "-n", count, code=2)
    for timeout in ("nan", "inf", "1e10", "0"):
        assert "is no time" in made.error("vm", "exec", "--timeout", timeout, "nosuch", "--", "true", code=2)
    for memory in ("64M", "100000G"):
        assert "from 96M to" in made.error("vm", "run", "--memory", memory, "debian:12", code=2)
    for options in (("-w", "relative"), ("-e", "=value")):
        assert made.error("vm", "run", *options, "debian:12", "--", "true", code=125)
    for signal_name in ("0", "nosuch", "9" * 5000):
        assert "is no signal" in made.error("vm", "kill", "-s", signal_name, "nosuch", "7", code=2)
    assert "is not a VM name" in made.error("vm", "console", b"\xff".decode(errors="surrogateescape"), code=2)
    assert made.json("vm", "ls") == []
    assert list((made.root / "home" / "vms").iterdir()) == []


def test_a_removal_of_several_removes_what_it_can(made: Host) -> None:
    made.run("vm", "resume", "base", "--name", "one")
    done: subprocess.CompletedProcess[bytes] = made.run("vm", "rm", "nosuch", "one", "no name", code=1)
    assert done.stdout == b"one\n"
    assert b"2 VMs were not removed: nosuch: no VM 'nosuch'; no name: 'no name' is not a VM name" in done.stderr
    assert made.json("vm", "ls") == []
