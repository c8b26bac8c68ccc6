"""What is left of a VM that ended, or lost its daemon or its command; what a park is called; a parent's clock."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from imaged.config import Config
from tests.support.command import Host
from tests.support.cutoff import cut_off
from tests.support.node import kill_daemon
from tests.support.vm import IMAGE, MEMORY, qemus, sh, shown, start, state, vm_host, wait_until

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]
BOOTED = ("--cpus", "1")
"""An option, so that it comes from no snapshot."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm"), seeded=True) as host:
        yield host


@pytest.fixture(scope="module")
def base(made: Host) -> str:
    """A snapshot of this name, and no VM."""
    start(made, "first")
    sh(
        made,
        "first",
        "echo kept > /root/file; head -c 3M /dev/urandom > /dev/shm/noise; sha256sum /dev/shm/noise > /sum",
    )
    made.run("vm", "park", "first", "--as", "base")
    made.run("vm", "rm", "first")
    return "base"


def kill_qemu(made: Host, name: str) -> None:
    found = shown(made, name)
    assert found is not None
    os.kill(found["pid"], signal.SIGKILL)
    wait_until(lambda: state(made, name) == "ended")


def names(made: Host) -> list[str]:
    return [one["name"] for one in made.json("snapshot", "ls")]


def test_a_vm_called_as_its_snapshot_is_parked_beside_it_and_replaces_only_its_own_park(made: Host, base: str) -> None:
    assert [one["name"] for one in made.json("vm", "resume", base)] == ["base"]
    assert made.run("vm", "park", "base").stdout == b"base-1\n"
    assert names(made) == ["base", "base-1"]
    first = made.json("snapshot", "inspect", "base")["id"]
    own = made.json("snapshot", "inspect", "base-1")["id"]
    found = shown(made, "base")
    assert found is not None
    assert found["snapshot_name"] == "base-1"
    made.run("vm", "resume", "base")
    parked = made.json("vm", "park", "base")
    assert parked["snapshot_name"] == "base-1"
    assert parked["snapshot"] != own
    made.run("vm", "resume", "base")
    made.run("vm", "park", "base", "--as", "other")
    made.run("vm", "resume", "base")
    for taken in ("other", "base"):
        assert "already" in made.error("vm", "park", "base", "--as", taken)
    assert state(made, "base") == "running"
    made.run("vm", "park", "base")
    assert names(made) == ["base", "base-1", "other"]
    assert made.json("snapshot", "inspect", "base")["id"] == first
    assert made.json("vm", "rm", "base")["removed"] == [{"name": "base", "snapshot": "base-1", "kept": None}]
    assert names(made) == ["base", "other"]
    made.run("snapshot", "rm", "other")


def test_parks_at_once_do_not_take_each_others_names(made: Host, base: str) -> None:
    made.run("vm", "resume", base)
    children = [one["name"] for one in made.json("vm", "fork", "base", "-n", "2")]
    assert children == ["base-1", "base-2"]
    started = [made.start("vm", "park", name, "--json") for name in ("base", *children)]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert names(made) == ["base", "base-1", "base-2", "base-3"]
    for name in ("base", *children):
        made.run("vm", "resume", name)
        assert sh(made, name, "cat /proc/sys/kernel/hostname").decode().strip() == name
    removed = made.run("vm", "rm", "base", *children)
    assert removed.stdout.decode().split() == ["base", *children]
    said = removed.stderr.decode().splitlines()
    assert len(said) == 3
    assert "`pvisor vm resume base-3 --name base`" in said[0]
    assert "`pvisor vm resume base-1`" in said[1]
    # No VM hides a snapshot that somebody may want to resume.
    assert [one["name"] for one in made.json("vm", "fork", base)] == ["base-4"]
    made.run("vm", "rm", "base-4")
    made.run("snapshot", "rm", "base-1", "base-2", "base-3")


def test_a_vm_that_ended_says_how_to_go_on_from_what_was_parked(made: Host) -> None:
    start(made, "ends", *BOOTED)
    kill_qemu(made, "ends")
    for command in ("resume", "park"):
        told = made.error("vm", command, "ends")
        assert "has ended: signal 9" in told or "has ended: killed" in told
        assert "nothing of it was parked" in told
    assert made.run("vm", "rm", "ends").stderr == b""

    start(made, "ends", *BOOTED)
    sh(made, "ends", "echo early > /root/file")
    made.run("vm", "park", "ends")
    made.run("vm", "resume", "ends")
    sh(made, "ends", "echo late > /root/file")
    kill_qemu(made, "ends")
    for command in ("resume", "park"):
        told = made.error("vm", command, "ends")
        assert "has ended" in told
        assert "`pvisor vm resume ends --name NEW`" in told
    made.run("vm", "resume", "ends", "--name", "again")
    assert sh(made, "again", "cat /root/file") == b"early\n"
    removed = made.run("vm", "rm", "ends")
    assert b"`pvisor vm resume ends` goes on from it" in removed.stderr
    made.run("vm", "resume", "ends")
    assert sh(made, "ends", "cat /root/file") == b"early\n"
    assert made.json("vm", "rm", "ends", "again")["removed"] == [
        {"name": "ends", "snapshot": None, "kept": None},
        {"name": "again", "snapshot": None, "kept": None},
    ]
    made.run("snapshot", "rm", "ends")


def test_the_states_that_refuse_say_what_to_do(made: Host, base: str) -> None:
    made.run("vm", "resume", base, "--name", "states")
    assert "`pvisor vm fork states`" in made.error("vm", "resume", "states")
    made.run("vm", "park", "states")
    assert "`pvisor vm resume states` first" in made.error("vm", "park", "states")
    made.run("vm", "rm", "states")


def test_a_vm_is_never_called_by_an_id(made: Host, base: str) -> None:
    whole = made.json("snapshot", "inspect", base)["id"]
    expected = iter(["base", "base-1", "base-2"])
    for text in (whole[:12], whole, whole[:8]):
        (one,) = made.json("vm", "resume", text)
        assert one["name"] == next(expected)
    assert [one["name"] for one in made.json("vm", "fork", whole[:10])] == ["base-3"]
    children = [one["name"] for one in made.json("vm", "fork", "base-3")]
    unnamed = shown(made, *children)
    assert unnamed is not None and unnamed["snapshot_name"] is None
    assert [one["name"] for one in made.json("vm", "resume", unnamed["snapshot"])] == ["base-3-2"]
    image = unnamed["image"]
    assert "no snapshot" in made.error("vm", "resume", image[:12])
    left = [one["name"] for one in made.json("vm", "ls")]
    assert left == ["base", "base-1", "base-2", "base-3", "base-3-1", "base-3-2"]
    made.run("vm", "rm", *left)


def test_json_of_those_that_were_just_started(made: Host, base: str) -> None:
    started = [*made.json("vm", "resume", base, "--name", "known"), *made.json("vm", "fork", "known", "-n", "2")]
    assert sorted(one["pid"] for one in started) == sorted(qemus(made))
    assert all(one["private_bytes"] > 1 << 20 and one["state"] == "running" for one in started)
    made.run("vm", "rm", *(one["name"] for one in started))


def test_a_missing_working_directory_is_made(made: Host, base: str) -> None:
    made.run("vm", "run", "--name", "dirs", "--memory", MEMORY, IMAGE)
    assert sh(made, "dirs", 'pwd; stat -c "%a %u" .', "-w", "/new/dir", "-u", "nobody") == b"/new/dir\n755 0\n"
    made.error("vm", "exec", "-w", "/etc/passwd/x", "dirs", "--", "true", code=125)
    made.run("vm", "rm", "dirs")


def has_the_time_of_now(made: Host, name: str) -> bool:
    """Within a second; however long the answer takes, the guest looks between question and answer."""
    before = time.time()
    told = float(sh(made, name, "date +%s.%N"))
    return before - 1 < told < time.time() + 1


def test_a_parent_has_the_time_of_now_after_forks_and_failed_parks(made: Host, base: str) -> None:
    made.run("vm", "resume", base, "--name", "clock")
    before = sh(made, "clock", "cat /etc/machine-id /proc/sys/kernel/hostname")
    for _ in range(5):
        (child,) = [one["name"] for one in made.json("vm", "fork", "clock")]
        made.run("vm", "rm", child)
    assert has_the_time_of_now(made, "clock")
    for how, code in (("fail", 1), ("kill", -9)):
        done = cut_off(made, "imaged.snapshots.publish_over", how, "vm", "park", "clock", late_s=4)
        assert done.returncode == code, done
        assert state(made, "clock") == "running"
        assert has_the_time_of_now(made, "clock")
    assert sh(made, "clock", "cat /etc/machine-id /proc/sys/kernel/hostname") == before
    made.run("vm", "rm", "clock")


@pytest.mark.parametrize("other", [("vm", "resume"), ("vm", "fork"), ("vm", "run", "--memory", MEMORY)])
def test_the_vm_of_a_killed_run_is_removed_by_the_next_that_starts_one(
    made: Host, base: str, other: tuple[str, ...]
) -> None:
    running = made.start("vm", "run", "--name", "orphan", "--memory", MEMORY, IMAGE, "--", "sleep", "600")
    wait_until(lambda: state(made, "orphan") == "running")
    running.kill()
    running.wait()
    assert len(qemus(made)) == 1
    made.run(*other, IMAGE if other[1] == "run" else base)
    assert len(qemus(made)) == 1
    assert not (made.root / "home" / "vms" / "orphan").exists()
    assert not (made.root / "run" / "vms" / "orphan").exists()
    made.run("vm", "rm", *(one["name"] for one in made.json("vm", "ls")))


@pytest.mark.parametrize("others", [False, True], ids=["no daemon", "another daemon"])
@pytest.mark.parametrize("disk", [(), ("--disk", "256M")], ids=["memory", "disk"])
def test_a_vm_that_is_cut_off_is_saved_by_a_park(made: Host, disk: tuple[str, ...], others: bool) -> None:
    start(made, "cut", *disk)
    sh(made, "cut", "head -c 2M /dev/urandom > /noise; sha256sum /noise > /sum; echo 1 > /run/one; sync")
    made.run("vm", "park", "cut", "--as", "whole")
    made.run("vm", "resume", "cut")
    sh(made, "cut", "cat /noise > /dev/null; echo 2 > /run/two; echo 2 > /disk; sync")
    config = Config(home=made.root / "home", run=made.root / "run")
    for path in config.blocks.iterdir():  # else the guest may end before the park, at what it touches
        for _ in range(2):
            path.read_bytes()
    kill_daemon(config)
    wait_until(lambda: state(made, "cut") == "cut off")
    if others:
        made.run("node", "start")
        assert state(made, "cut") == "cut off"
    assert "`pvisor vm park cut`" in made.error("vm", "resume", "cut")
    assert made.json("vm", "park", "cut")["state"] == "parked"
    assert qemus(made) == []
    made.run("vm", "resume", "cut")
    assert sh(made, "cut", "cat /run/one /run/two /disk; cd /; sha256sum -c --quiet /sum") == b"1\n2\n2\n"
    made.assert_sound()
    made.run("vm", "rm", "cut")
    made.run("snapshot", "rm", "cut", "whole")
