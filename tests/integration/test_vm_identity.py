"""Forks are other machines than their siblings, with the host's clock and a network of their own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.support.command import Host
from tests.support.vm import sh, start, vm_host

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]
FORKS = 8
CLOCK_ERROR_S = 1.0
"""What the issue allows between a guest's wall clock and the host's."""
LOOK = """
od -An -N32 -tx1 /dev/urandom | tr -d ' \\n'; echo
cat /proc/sys/kernel/random/uuid /proc/sys/kernel/hostname /etc/hostname /etc/machine-id /sys/class/net/eth0/address
cat /root/file
sha256sum /root/noise
"""
# A timer of 0.1 s that counts what it missed, on the clock that it then tells.
TICKING = r"""
my $timer = syscall(283, 1, 0);
my $often = pack("q4", 0, 100_000_000, 0, 100_000_000);
syscall(286, $timer, 0, $often, 0) == 0 or die;
open my $file, "+<&=", $timer or die;
my ($count, $longest) = (0, 0);
while (sysread $file, my $passed, 8) {
    $count += unpack "Q", $passed;
    open my $out, ">", "/run/ticks.new" or die;
    print $out $count;
    close $out;
    rename "/run/ticks.new", "/run/ticks";
}
"""
MONOTONIC = r"""my $time = "\0" x 16; syscall(228, 1, $time); printf "%d.%09d\n", unpack "qq", $time"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm")) as host:
        yield host


@pytest.fixture(scope="module")
def parent(made: Host) -> str:
    """With a network, and a file."""
    start(made, "seed", "--net", "user")
    sh(made, "seed", "echo parent > /root/file; head -c 2M /dev/urandom > /root/noise")
    return "seed"


@pytest.fixture(scope="module")
def children(made: Host, parent: str) -> list[str]:
    return [child["name"] for child in made.json("vm", "fork", parent, "-n", str(FORKS))]


class Seen(NamedTuple):
    """What a guest shows of itself."""

    random: bytes
    uuid: bytes
    hostname: bytes
    hostname_file: bytes
    machine_id: bytes
    mac: bytes
    file: bytes
    noise: bytes


def look(made: Host, name: str) -> Seen:
    return Seen(*sh(made, name, LOOK).splitlines())


@contextmanager
def greeter() -> Iterator[int]:
    """The port of a server on the host's loopback, which answers a line with that line."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"heard " + connection.makefile("rb").readline())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def greet(made: Host, name: str, port: int) -> bytes:
    script = f"exec 3<>/dev/tcp/10.0.2.2/{port}; echo {name} >&3; cat <&3"
    return made.run("vm", "exec", "--timeout", "60", name, "--", "bash", "-c", script).stdout


def test_each_fork_is_another_machine_with_the_same_files(made: Host, parent: str, children: list[str]) -> None:
    assert len(children) == FORKS
    seen = [look(made, name) for name in (parent, *children)]
    for field in ("random", "uuid", "machine_id", "mac"):
        values = {getattr(one, field) for one in seen}
        assert len(values) == FORKS + 1, (field, values)
    assert (
        [one.hostname.decode() for one in seen] == [one.hostname_file.decode() for one in seen] == [parent, *children]
    )
    assert {(one.file, one.noise) for one in seen} == {(b"parent", seen[0].noise)}
    assert all(int(one.mac[:2], 16) & 3 == 2 for one in seen)  # administered locally, of one machine
    for name in children:
        sh(made, name, f"echo {name} > /root/file; echo {name} > /root/own; rm /root/noise")
    for name in children:
        assert sh(made, name, "cat /root/file /root/own; ls /root").decode().split() == [name, name, "file", "own"]
    assert sh(made, parent, "cat /root/file; ls /root") == b"parent\nfile\nnoise\n"


def test_each_fork_has_the_hosts_time(made: Host, parent: str, children: list[str]) -> None:
    for name in (parent, *children):
        before = time.time()
        found = float(sh(made, name, "date +%s.%N"))
        after = time.time()
        assert before - CLOCK_ERROR_S <= found <= after + CLOCK_ERROR_S


def test_the_network_works_before_and_after_it_was_parked(made: Host, parent: str, children: list[str]) -> None:
    child = children[-1]
    with greeter() as port:
        assert greet(made, parent, port) == f"heard {parent}\n".encode()
        assert greet(made, child, port) == f"heard {child}\n".encode()
        made.run("vm", "park", child)
        made.run("vm", "resume", child)
        assert greet(made, child, port) == f"heard {child}\n".encode()


def test_time_stands_for_a_parked_vm_and_nothing_is_made_up_for(made: Host, children: list[str]) -> None:
    child = children[0]
    counting = "i=0; while :; do i=$((i+1)); echo $i > /run/count.new; mv /run/count.new /run/count; sleep 0.1; done"
    sh(made, child, f"({counting}) > /dev/null 2>&1 & perl -e '{TICKING}' > /dev/null 2>&1 &")
    sh(made, child, "until [ -s /run/count ] && [ -s /run/ticks ]; do sleep 0.1; done")

    def clocks() -> tuple[float, int, int, float]:
        """With the guest's time before and after the counts were read."""
        look = f"perl -e '{MONOTONIC}'; cat /run/count; cat /run/ticks; echo; perl -e '{MONOTONIC}'"
        first, count, ticks, last = sh(made, child, look).split()
        return float(first), int(count), int(ticks), float(last)

    began = time.monotonic()
    before = clocks()
    made.run("vm", "park", child)
    parked = time.monotonic()
    time.sleep(3)
    stood = time.monotonic() - parked
    made.run("vm", "resume", child)
    earliest = time.time()
    told = float(sh(made, child, "date +%s.%N"))
    assert earliest - CLOCK_ERROR_S <= told <= time.time() + CLOCK_ERROR_S
    after = clocks()
    went_on = after[3] - before[0]
    assert 0 < went_on <= (time.monotonic() - began - stood) * 1.05
    periods = went_on / 0.1 + 2
    assert 0 < after[1] - before[1] <= periods
    assert 0 < after[2] - before[2] <= periods
