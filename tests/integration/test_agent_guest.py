"""The agent in a real guest: what needs a machine of its own, and what a VM that is parked and restored asks of it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.agentguest import AgentGuest, running
from tests.support.bareguest import restored, save
from vmm.agent import Agent, Ended
from vmm.agentproto import PAYLOAD_MAX
from vmm.errors import AgentError, AgentTimeoutError
from vmm.qemu import Qemu

pytestmark = [pytest.mark.qemu, pytest.mark.root, pytest.mark.slow]
WAIT_S = 200.0
NEW_YEAR_NS = 1_704_067_200 * 10**9


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> AgentGuest:
    return AgentGuest.make(tmp_path_factory.mktemp("guest"))


@pytest.fixture(scope="module")
def run_dir(made: AgentGuest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a guest that runs for the tests that do not end it."""
    directory = tmp_path_factory.mktemp("run")
    with running(made.spec(directory, network="user"), directory):
        yield directory


@contextmanager
def session(directory: Path) -> Iterator[Callable[..., str]]:
    """Runs shell scripts, which are to succeed, and gives their output."""
    with Agent.connect(directory, timeout_s=WAIT_S) as agent:

        def run(script: str) -> str:
            output = bytearray()
            ended = agent.execute(["sh", "-c", script], stdout=output.extend, stderr=output.extend, timeout_s=WAIT_S)
            assert ended == Ended(code=0, signal=None), output
            return output.decode()

        yield run


def test_what_makes_a_guest_itself_is_set(run_dir: Path) -> None:
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        harmless = agent.identify(
            hostname="child-7", machine_id="0123456789abcdef" * 2, time_ns=NEW_YEAR_NS, mac="02:12:34:56:78:9a"
        )
        assert harmless == ()
        assert agent.identify(entropy=os.urandom(64)) == ()
    with session(run_dir) as sh:
        assert sh("hostname; cat /etc/hostname /etc/machine-id").split() == [
            "child-7",
            "child-7",
            "0123456789abcdef" * 2,
        ]
        assert 0 <= int(sh("date +%s")) - NEW_YEAR_NS // 10**9 < WAIT_S
        assert "02:12:34:56:78:9a" in sh("ip link show eth0")


def test_a_link_in_the_guests_root_leads_nowhere_else(run_dir: Path) -> None:
    """Nor does a pipe hold the agent up."""
    with session(run_dir) as sh:
        sh("mkdir -p /kept; echo keep > /kept/target; ln -sf /kept/target /etc/hostname; rm -f /etc/machine-id")
        sh("busybox mkfifo /etc/machine-id")
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        assert agent.identify(hostname="again", machine_id="f" * 32) == ()
    with session(run_dir) as sh:
        assert sh("cat /kept/target /etc/hostname /etc/machine-id").split() == ["keep", "again", "f" * 32]
        sh("rm -f /etc/hostname; mkdir /etc/hostname")
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        (harmless,) = agent.identify(hostname="again", machine_id="f" * 32)
    assert harmless.startswith("/etc/hostname: Is a directory")


def test_a_plain_file_is_written_to_and_one_of_two_names_is_replaced(run_dir: Path) -> None:
    with session(run_dir) as sh:
        sh("mkdir -p /kept; echo keep this > /kept/other; rm -rf /etc/hostname; ln /kept/other /etc/hostname")
        sh("rm -rf /etc/machine-id; seq 100 > /etc/machine-id")
        inode = sh("ls -i /etc/machine-id")
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        assert agent.identify(hostname="child", machine_id="e" * 32) == ()
    with session(run_dir) as sh:
        assert sh("cat /kept/other /etc/hostname /etc/machine-id").split("\n")[:3] == ["keep this", "child", "e" * 32]
        assert sh("wc -c < /etc/machine-id") == "33\n"
        assert sh("ls -i /etc/machine-id") == inode


def test_output_and_input_of_several_megabytes_are_complete_on_ports_at_once(run_dir: Path) -> None:
    data = os.urandom(2_000_000)
    with Agent.connect(run_dir, timeout_s=WAIT_S) as one, Agent.connect(run_dir, timeout_s=WAIT_S) as other:
        got, listed = bytearray(), bytearray()
        assert one.execute(["cat"], stdin=data, stdout=got.extend, stderr=got.extend).code == 0
        assert other.execute(["seq", "300000"], stdout=listed.extend, stderr=got.extend).code == 0
    assert bytes(got) == data
    assert listed.count(b"\n") == 300_000


def test_a_timeout_reaches_processes_that_left_the_session(run_dir: Path) -> None:
    """They are in the job's cgroup all the same."""
    script = "busybox setsid sh -c 'busybox setsid sleep 4321 & wait' & sleep 4321"
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        ended = agent.execute(["sh", "-c", script], stdout=ignore, stderr=ignore, timeout_s=2)
        assert (ended.signal, ended.timed_out) == (15, True)
    with session(run_dir) as sh:
        assert "4321" not in sh("ps")


@contextmanager
def counting(run_dir: Path, script: str = "", **options: Any) -> Iterator[Callable[[], int]]:
    """A job that says something all the time; gives how many bytes it has said. It ends with the test."""
    said = bytearray()
    loop = f"{script} while [ ! -e /tmp/stop ]; do echo x; usleep 1000; done"
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:

        def run() -> None:
            agent.execute(["sh", "-c", loop], stdout=said.extend, stderr=ignore, **options)

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: len(said) > 10)
        yield lambda: len(said)
        with session(run_dir) as sh:
            sh("touch /tmp/stop")
        thread.join(WAIT_S)
        assert not thread.is_alive()
        with session(run_dir) as sh:
            sh("rm /tmp/stop")


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def stands(count: Callable[[], int]) -> bool:
    """Whether it says nothing more once what was under way has come, before held jobs would go on by themselves."""
    heard = [count()]
    for _ in range(4):
        time.sleep(1)
        heard.append(count())
        if heard[-1] == heard[-2]:
            return True
    return False


STOPPED = "(while :; do :; done) & kill -STOP $!; trap 'kill -KILL $!' EXIT;"


@pytest.mark.parametrize("options", [{}, {"timeout_s": WAIT_S}, {"user": "agent"}])
@pytest.mark.parametrize("identity", [{"hostname": "held", "entropy": bytes(64)}, {}], ids=["identity", "clock"])
def test_held_jobs_stand_still_until_the_guest_is_told_who_it_is(
    run_dir: Path, identity: dict[str, Any], options: dict[str, Any]
) -> None:
    """With all that they have started, stopped by a signal or not."""
    with counting(run_dir, STOPPED, **options) as count, Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        assert agent.hold() == ()
        assert stands(count)
        assert agent.hold() == (), "a second time, and for as long again"
        held = count()
        assert agent.identify(time_ns=time.time_ns(), **identity) == ()
        wait_for(lambda: count() > held)


def test_a_job_that_is_started_while_all_are_held_begins_after_it(run_dir: Path) -> None:
    started = threading.Event()
    with Agent.connect(run_dir, timeout_s=WAIT_S) as holder, Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        assert holder.hold() == ()
        thread = threading.Thread(
            target=agent.execute, args=(["true"],), kwargs={"stdout": ignore, "stderr": ignore, "on_start": started.set}
        )
        thread.start()
        assert not started.wait(1.0)
        holder.identify(time_ns=time.time_ns())
        thread.join(WAIT_S)
    assert started.is_set()


def test_held_jobs_go_on_by_themselves(run_dir: Path) -> None:
    """When who held them is gone."""
    with counting(run_dir) as count:
        with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
            assert agent.hold() == ()
        assert stands(count)
        held = count()
        wait_for(lambda: count() > held)


def test_a_job_that_starts_processes_without_end_is_within_reach(run_dir: Path) -> None:
    with Agent.connect(run_dir, timeout_s=WAIT_S) as job, Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        ends: list[Ended] = []

        def bomb() -> None:
            script = "sleep 1000 & b() { b | b & }; b; wait"
            ends.append(job.execute(["sh", "-c", script], stdout=ignore, stderr=ignore, timeout_s=15))

        thread = threading.Thread(target=bomb)
        thread.start()
        seen = 0
        while thread.is_alive():
            seen = max(seen, len(agent.processes(timeout_s=WAIT_S)[0]))
        thread.join()
        assert seen > 10
        assert [ended.timed_out for ended in ends] == [True]
        wait_for(lambda: not agent.processes(timeout_s=WAIT_S)[0])
    with session(run_dir) as run:
        assert run("cut -d' ' -f18,41 /proc/self/stat") == "20 0\n"  # an ordinary process, as any job


def test_a_workload_that_ends_everything_does_not_end_the_agent(run_dir: Path) -> None:
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        ended = agent.execute(["sh", "-c", "kill -TERM -1; echo still here"], stdout=ignore, stderr=ignore)
        assert ended.code == 0
        agent.ping()


def test_a_client_that_is_gone_leaves_its_port_to_the_next(run_dir: Path) -> None:
    """In the middle of an output that fills the port, and of an input."""
    for _ in range(3):
        with pytest.raises(KeyError), Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
            agent.execute(["cat", "/proc/kallsyms"], stdin=bytes(PAYLOAD_MAX), stdout=fail, stderr=fail)
        with session(run_dir) as sh:
            assert sh("echo next") == "next\n"


def test_sessions_that_follow_at_once_are_all_heard(run_dir: Path) -> None:
    """The guest may learn of the last client's end when it has the next one's first bytes already."""
    for _ in range(100):
        with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
            agent.ping()


def test_a_job_goes_on_through_park_and_resume(made: AgentGuest, tmp_path: Path) -> None:
    """Its client learns of the end of the VM; after it, and again, other clients use the same ports."""
    first = tmp_path / "first"
    spec = made.spec(first)
    count = "i=0; while :; do i=$((i+1)); echo $i > /tmp/new; mv /tmp/new /tmp/count; echo $i; sleep 0.02; done"
    with running(spec, first) as qemu:
        agent = Agent.connect(first, timeout_s=WAIT_S)

        def park_at_ten(data: bytes) -> None:
            if b"10\n" in data:
                save(qemu, spec, tmp_path / "saved")
                qemu.kill()

        with agent, pytest.raises(AgentError, match="connection to the guest ended"):
            agent.execute(["sh", "-c", count], stdout=park_at_ten, stderr=ignore)
    counts, randoms = [], []
    for name in ("second", "third"):
        directory = tmp_path / name
        again = restored(spec, tmp_path / "saved", directory)
        with running(again, directory):
            wanted = time.time_ns()
            with Agent.connect(directory, timeout_s=WAIT_S) as agent:
                agent.identify(hostname=name, time_ns=time.time_ns(), entropy=os.urandom(64))
            with session(directory) as sh:
                randoms.append(sh("head -c 16 /dev/urandom | sha256sum"))
                before = int(sh("cat /tmp/count"))
                sh(f"until [ $(cat /tmp/count) -gt {before} ]; do sleep 0.1; done")
                counts.append((before, int(sh("cat /tmp/count"))))
                assert sh("hostname") == f"{name}\n"
                assert 0 <= int(sh("date +%s")) - wanted // 10**9 < WAIT_S
    assert all(10 <= before < after for before, after in counts)
    assert randoms[0] != randoms[1]


MORE = """
lines() { wc -l < /tmp/uuids; }
least=$(($(lines) + 20))
until [ $(lines) -ge $least ]; do sleep 0.1; done
cat /tmp/uuids
"""


def test_twins_whom_nobody_tells_who_they_are_have_random_numbers_of_their_own(
    made: AgentGuest, tmp_path: Path
) -> None:
    """Once they go on by themselves, for what was held when they were saved."""
    spec = made.spec(tmp_path / "first")
    asking = "while :; do cat /proc/sys/kernel/random/uuid >> /tmp/uuids; done"
    with running(spec, tmp_path / "first") as qemu:
        with session(tmp_path / "first") as sh:
            sh(f"({asking}) > /dev/null 2>&1 & until [ -s /tmp/uuids ]; do sleep 0.1; done")
        with Agent.connect(tmp_path / "first", timeout_s=WAIT_S) as agent:
            assert agent.hold() == ()
        save(qemu, spec, tmp_path / "saved")
        qemu.kill()
    told = []
    for name in ("second", "third"):
        again = restored(spec, tmp_path / "saved", tmp_path / name)
        with running(again, tmp_path / name), session(tmp_path / name) as sh:
            told.append(sh(MORE).split())
    assert told[0][0] == told[1][0]
    differ = next(at for at, (one, other) in enumerate(zip(*told, strict=False)) if one != other)
    assert set(told[0][differ:]).isdisjoint(told[1][differ:])
    assert min(len(lines) for lines in told) - differ > 10


def test_a_paused_guest_does_not_answer_and_does_afterwards(made: AgentGuest, tmp_path: Path) -> None:
    with running(made.spec(tmp_path / "run"), tmp_path / "run") as qemu:
        Agent.connect(tmp_path / "run", timeout_s=WAIT_S).close()
        qemu.stop()
        with pytest.raises(AgentTimeoutError, match="did not answer"):
            Agent.connect(tmp_path / "run", timeout_s=1.0)
        qemu.cont()
        with session(tmp_path / "run") as sh:
            assert sh("echo hello") == "hello\n"
        shut_down(qemu, tmp_path / "run")


def shut_down(qemu: Qemu, directory: Path) -> None:
    with Agent.connect(directory, timeout_s=WAIT_S) as agent:
        agent.shutdown()
    assert str(qemu.wait(WAIT_S)) == "exit status 0"


def test_a_hundred_megabytes_are_complete(run_dir: Path) -> None:
    digest = hashlib.sha256()
    with Agent.connect(run_dir, timeout_s=WAIT_S) as agent:
        argv = ["dd", "if=/dev/zero", "bs=1000000", "count=100"]
        assert agent.execute(argv, stdout=digest.update, stderr=ignore).code == 0
    assert digest.hexdigest() == hashlib.sha256(bytes(100_000_000)).hexdigest()


def ignore(data: bytes) -> None:
    del data


def fail(data: bytes) -> None:
    raise KeyError(len(data))
