"""What runs in a guest is held still from before it is written down until it has been told who it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.test_vm_guest import console
from tests.support.command import Host
from tests.support.cutoff import cut_off
from tests.support.vm import qemus, sh, start, state, vm_host, wait_until
from vmm.agent import Agent
from vmm.errors import AgentTimeoutError

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]
FORKS = 4
HANG_S = 100.0
# The host's name, and then a UUID, as fast as they can be had.
ASKING = r"""
sub text { open my $file, "<", $_[0] or die; chomp(my $line = <$file>); $line }
open my $out, ">>", "/dev/shm/uuids" or die;
for (1 .. 1_000_000) {
    last if -e "/dev/shm/end";
    my $name = text("/proc/sys/kernel/hostname");
    syswrite $out, text("/proc/sys/kernel/random/uuid") . " $name\n";
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm"), seeded=True) as host:
        yield host


@pytest.fixture
def asking(made: Host) -> Iterator[str]:
    """A VM whose only job asks for random numbers all the time."""
    name = start(made, "asking")
    ask(made, name)
    yield name
    made.run("vm", "rm", name)


def ask(made: Host, name: str) -> None:
    sh(made, name, "rm -f /dev/shm/uuids /dev/shm/end; cat > /ask.pl", "-i", stdin=ASKING.encode())
    sh(made, name, "perl /ask.pl > /dev/null 2>&1 & until [ -s /dev/shm/uuids ]; do sleep 0.1; done")


def asked(made: Host, name: str) -> int:
    return int(sh(made, name, "stat -c %s /dev/shm/uuids"))


def assert_goes_on(made: Host, name: str) -> None:
    before = asked(made, name)
    wait_until(lambda: asked(made, name) > before)


def answers(made: Host, name: str) -> list[list[str]]:
    """UUID and hostname of each time; it asks no more."""
    sh(made, name, "touch /dev/shm/end")
    return [line.split() for line in sh(made, name, "cat /dev/shm/uuids").decode().splitlines()]


def test_no_child_has_a_uuid_of_another_or_of_its_parent(made: Host, asking: str) -> None:
    children = [child["name"] for child in made.json("vm", "fork", asking, "-n", str(FORKS))]
    for name in (asking, *children):
        assert_goes_on(made, name)
    told = {name: answers(made, name) for name in (asking, *children)}
    common = 0
    while len({lines[common][0] for lines in told.values()}) == 1:
        common += 1
    assert common > 0
    after = [uuid for lines in told.values() for uuid, _ in lines[common:]]
    assert len(after) == len(set(after))
    for name in children:  # but for the name that was asked for before it stood still
        assert {hostname for _, hostname in told[name][common + 1 :]} == {name}
    made.run("vm", "rm", *children)


def test_a_vm_that_is_resumed_asks_when_it_is_told_who_it_is(made: Host, asking: str) -> None:
    made.run("vm", "park", asking)
    twins = ["twin-a", "twin-b"]
    for name in twins:
        made.run("vm", "resume", asking, "--name", name)
        assert_goes_on(made, name)
    first, second = ({uuid for uuid, hostname in answers(made, name) if hostname == name} for name in twins)
    assert first
    assert first.isdisjoint(second)
    made.run("vm", "rm", *twins)
    made.run("vm", "resume", asking)
    assert_goes_on(made, asking)


@pytest.mark.parametrize("where", ["vmm.qemu.Qemu.stop", "vmm.capture.capture_memory"])
def test_a_park_that_fails_lets_it_go_on(made: Host, asking: str, where: str) -> None:
    failed = cut_off(made, where, "fail", "vm", "park", asking)
    assert failed.returncode == 1, failed
    assert state(made, asking) == "running"
    assert_goes_on(made, asking)


def test_a_command_that_is_killed_before_the_guest_stops_leaves_nothing_held(made: Host, asking: str) -> None:
    """Nor does it take another command: what is asked here begins when it goes on."""
    assert cut_off(made, "vmm.qemu.Qemu.stop", "kill", "vm", "fork", asking).returncode == -9
    said = bytearray()
    with Agent.connect(made.root / "run" / "vms" / asking, timeout_s=HANG_S) as agent:
        look = "stat -c %s /dev/shm/uuids; sleep 0.5; stat -c %s /dev/shm/uuids"
        assert agent.execute(["sh", "-c", look], stdout=said.extend, stderr=said.extend, timeout_s=HANG_S).code == 0
    before, after = said.split()
    assert int(before) < int(after)
    assert state(made, asking) == "running"
    assert_goes_on(made, asking)


def test_a_guest_whose_agent_does_not_answer_is_parked_all_the_same(made: Host) -> None:
    name = start(made, "deaf")
    run = made.root / "run" / "vms" / name
    stop = b"for d in /proc/[0-9]*; do grep -qsx perl $d/comm && kill -STOP ${d#/proc/}; done; echo deaf $((6*7))\n"
    console(run, stop, b"deaf 42")  # an agent that stops its own kind might not tell the end of that
    with pytest.raises(AgentTimeoutError):
        Agent.connect(run, timeout_s=1.0)
    told = made.run("vm", "park", name).stderr.decode()
    assert "is not held still" in told
    assert state(made, name) == "parked"
    assert qemus(made) == []
    made.run("vm", "rm", name)
