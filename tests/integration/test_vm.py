"""VMs through the command, with a real QEMU and a Debian root: run, exec, park, resume, fork, rm."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Host
from tests.support.vm import IMAGE, MEMORY, end_vms, qemus, sh, shown, start, state, vm_host, wait_until

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm")) as host:
        yield host


@pytest.fixture(scope="module")
def worker(made: Host) -> str:
    """A VM that runs for the tests that only look."""
    return start(made, "worker")


def test_a_command_has_its_own_output_and_exit_code_and_its_vm_is_removed(made: Host) -> None:
    script = "echo out; echo err >&2; exit 3"
    done = made.run("vm", "run", "--memory", MEMORY, IMAGE, "--", "sh", "-c", script, code=3)
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    assert [one["name"] for one in made.json("vm", "ls") if one["name"].startswith("debian-")] == []


def test_ls_tells_what_a_vm_is(made: Host, worker: str) -> None:
    found = shown(made, worker)
    assert found is not None
    assert (found["state"], found["image_name"], found["snapshot"]) == ("running", IMAGE, None)
    assert found["memory_bytes"] == 256 << 20
    assert found["pid"] in qemus(made)
    assert worker in made.run("vm", "ls").stdout.decode()
    assert sh(made, worker, "ls /sys/class/net") == b"lo\n"


def test_exec_carries_bytes_arguments_and_the_end(made: Host, worker: str) -> None:
    data = os.urandom(3 << 20)
    assert sh(made, worker, "cat", "-i", stdin=data) == data
    assert sh(made, worker, 'echo "$COLOR $PWD $(id -u)"', "-e", "COLOR=red", "-w", "/tmp", "-u", "nobody") == (
        b"red /tmp 65534\n"
    )
    assert sh(made, worker, "kill -9 $$", code=137) == b""
    assert made.run("vm", "exec", worker, "--", "printf", "%s|", "a b", "", "c").stdout == b"a b||c|"


def test_failures_say_what_and_have_their_exit_codes(made: Host, worker: str) -> None:
    assert "no VM 'nobody'" in made.error("vm", "exec", "nobody", "--", "true", code=125)
    made.error("vm", "exec", worker, "--", "/no/such", code=127)
    made.error("vm", "exec", worker, "--", "/etc/passwd", code=126)
    # The kernel is asked to: until it does so by itself a guest on a busy host may take minutes.
    hungry = "push @all, 'x' x 1_000_000 for 1..80; open F, '>', '/proc/sysrq-trigger'; print F 'f'; close F; sleep 60"
    said = made.run("vm", "exec", worker, "--", "perl", "-e", hungry, code=137).stderr
    assert b"ended perl for lack of memory: it has 256 MiB" in said
    assert "0.5 s" in made.error("vm", "exec", "--timeout", "0.5", worker, "--", "sleep", "60", code=124)
    assert "already" in made.error("vm", "run", "--name", worker, IMAGE, code=125)
    assert "no image" in made.error("vm", "run", "nowhere:1", "--", "true", code=125)
    assert "running" in made.error("vm", "resume", worker)
    assert "no snapshot" in made.error("vm", "resume", "nobody")
    made.error("vm", "run", "--keep", IMAGE, code=2)
    assert "no VM" in made.error("vm", "rm", "nobody")


def test_what_runs_survives_park_and_resume_twice(made: Host) -> None:
    start(made, "life")
    opens = "echo $$ > /run/pid; exec 3>/root/open 4<>/root/gone; rm /root/gone"
    count = "echo $i >&3; echo $i >&4; echo $i > /run/count.new; mv /run/count.new /run/count"
    counts = f"i=0; while :; do i=$((i+1)); {count}; sleep 0.1; done"
    sh(made, "life", f"sh -c '{opens}; {counts}' > /dev/null 2>&1 &")
    gone = "/proc/$(cat /run/pid)/fd/4"
    sh(
        made,
        "life",
        "echo kept > /root/file; head -c 8M /dev/urandom > /dev/shm/noise; sha256sum /dev/shm/noise > /sum",
    )
    count = 0
    for _ in range(2):
        parked = made.json("vm", "park", "life")
        assert (parked["name"], parked["state"], parked["snapshot_name"]) == ("life", "parked", "life")
        found = shown(made, "life")
        assert found is not None
        assert (found["state"], found["pid"], found["private_bytes"]) == ("parked", None, 0)
        assert not (made.root / "run" / "vms" / "life").exists()
        assert [child["name"] for child in made.json("vm", "resume", "life")] == ["life"]
        assert sh(made, "life", "cat /root/file; cd /; sha256sum -c --quiet /sum") == b"kept\n"
        before, count = count, int(sh(made, "life", "cat /run/count"))
        assert count > before
        wait_until(lambda at=count: int(sh(made, "life", "cat /run/count")) > at)  # type: ignore[misc]
        said = sh(made, "life", f"tail -n 1 /root/open; head -n 1 {gone}; tail -n 1 {gone}; readlink {gone}").split()
        assert (int(said[0]) > count, said[1], int(said[2]) > count) == (True, b"1", True)
        assert said[3:] == [b"/root/gone", b"(deleted)"]
        sh(made, "life", "echo more >> /root/again")
    assert parked["dirty_bytes"] < 64 << 20
    assert sh(made, "life", "cat /root/again") == b"more\nmore\n"
    made.run("vm", "park", "life")
    removed = made.json("vm", "rm", "life")["removed"]
    assert removed == [{"name": "life", "snapshot": "life", "kept": None}]
    assert [one["name"] for one in made.json("snapshot", "ls")] == []


def test_forks_are_others_and_a_fork_of_a_parked_fork_has_what_it_wrote(made: Host, worker: str) -> None:
    sh(made, worker, "echo parent > /root/who")
    names = [child["name"] for child in made.json("vm", "fork", worker, "-n", "2")]
    assert names == ["worker-1", "worker-2"]
    seen = [
        sh(made, name, "cat /root/who /proc/sys/kernel/hostname /etc/machine-id; od -An -N16 -tx1 /dev/urandom").split(
            b"\n"
        )
        for name in (worker, *names)
    ]
    assert [lines[0] for lines in seen] == [b"parent"] * 3
    assert [lines[1].decode() for lines in seen] == [worker, *names]
    assert len({lines[2] for lines in seen}) == len({lines[3] for lines in seen}) == 3
    sh(made, "worker-1", "echo child > /root/who")
    assert sh(made, "worker-2", "cat /root/who") == sh(made, worker, "cat /root/who") == b"parent\n"
    behind = abs(float(sh(made, "worker-2", "date +%s.%N")) - time.time())
    assert behind < 60  # the clock was set; how well is measured elsewhere
    made.run("vm", "park", "worker-1", "--as", "middle")
    (grandchild,) = [child["name"] for child in made.json("vm", "fork", "middle")]
    assert sh(made, grandchild, "cat /root/who") == b"child\n"
    made.run("vm", "rm", "worker-1", "worker-2")
    assert [one["name"] for one in made.json("snapshot", "ls")] == ["middle"]
    assert made.json("vm", "resume", "middle", "--name", "again")[0]["name"] == "again"
    made.run("vm", "rm", grandchild, "again")
    made.run("snapshot", "rm", "middle")


def test_a_disk_survives_park_and_its_fork_writes_for_itself(made: Host) -> None:
    start(made, "disk", "--disk", "1G")
    sh(made, "disk", "head -c 4M /dev/urandom > /root/noise; sha256sum /root/noise > /sum; > /root/own; sync")
    assert b"/dev/vd" in sh(made, "disk", "cat /proc/mounts") or sh(made, "disk", "df / | tail -1")
    for written in (b"", b"x\n"):
        made.run("vm", "park", "disk")
        assert not (made.root / "home" / "vms" / "disk" / "disk.qcow2").exists()
        made.run("vm", "resume", "disk")
        assert sh(made, "disk", "cd /; sha256sum -c --quiet /sum; cat /root/own; echo x >> /root/own; sync") == written
    sh(made, "disk", "echo one > /root/own")
    (child,) = [one["name"] for one in made.json("vm", "fork", "disk")]
    sh(made, child, "cd /; sha256sum -c --quiet /sum; echo two > /root/own; sync")
    assert sh(made, "disk", "cat /root/own") == b"one\n"
    made.run("vm", "park", child)
    made.run("vm", "resume", child)
    assert sh(made, child, "cat /root/own") == b"two\n"
    made.run("vm", "rm", "disk", child)
    made.run("snapshot", "rm", "disk", child)


def test_a_snapshot_name_is_not_taken_from_another(made: Host) -> None:
    start(made, "first")
    made.run("vm", "park", "first", "--as", "second")
    made.run("vm", "resume", "first")
    assert "already" in made.error("vm", "park", "first", "--as", "second")
    assert state(made, "first") == "running"
    made.run("vm", "rm", "first")
    made.run("snapshot", "rm", "second")


def test_an_interrupt_while_booting_leaves_nothing(made: Host) -> None:
    booting = made.start("vm", "run", "--name", "half", "--memory", MEMORY, IMAGE)
    wait_until(lambda: (made.root / "run" / "vms" / "half" / "qemu.pid").exists())
    booting.send_signal(signal.SIGINT)
    assert booting.wait(60) == 130
    assert state(made, "half") == "gone"
    assert not (made.root / "run" / "vms" / "half").exists()
    assert not (made.root / "home" / "vms" / "half").exists()


def test_a_killed_command_leaves_a_state_that_ls_puts_in_order(made: Host) -> None:
    booting = made.start("vm", "run", "--name", "killed", "--memory", MEMORY, IMAGE)
    wait_until(lambda: (made.root / "run" / "vms" / "killed" / "qemu.live").exists())
    booting.send_signal(signal.SIGSTOP)  # else it may have booted before anybody looks
    assert state(made, "killed") == "booting"
    before = qemus(made)
    booting.kill()
    booting.wait()
    assert state(made, "killed") == "gone"
    assert len(qemus(made)) == len(before) - 1


def test_the_vm_of_a_killed_run_is_removed(made: Host) -> None:
    running = made.start("vm", "run", "--name", "orphan", "--memory", MEMORY, IMAGE, "--", "sleep", "600")
    wait_until(lambda: state(made, "orphan") == "running")
    running.kill()
    running.wait()
    assert state(made, "orphan") == "gone"


def test_an_ended_vm_says_how_and_is_removed(made: Host) -> None:
    start(made, "ends")
    found = shown(made, "ends")
    assert found is not None
    os.kill(found["pid"], signal.SIGKILL)
    wait_until(lambda: state(made, "ends") == "ended")
    found = shown(made, "ends")
    assert found is not None
    assert found["detail"]
    assert "ended" in made.error("vm", "park", "ends")
    made.error("vm", "exec", "ends", "--", "true", code=125)
    made.run("vm", "rm", "ends")


def test_the_node_daemon_is_not_stopped_under_a_vm(made: Host, worker: str) -> None:
    assert worker in made.error("node", "stop")
    assert worker in made.json("node", "status")["vms"]


def test_json_of_a_booted_vm(made: Host) -> None:
    document = json.loads(made.run("vm", "run", "--memory", MEMORY, IMAGE, "--json").stdout)
    assert document["name"].startswith("debian-")
    assert document["state"] == "running"
    made.run("vm", "rm", document["name"])


def test_the_home_and_run_directories_are_clean_at_the_end(made: Host, worker: str) -> None:
    made.run("vm", "rm", worker)
    assert made.json("vm", "ls") == []
    assert qemus(made) == []
    assert list(Path(made.root / "home" / "vms").iterdir()) == []
    end_vms(made)
