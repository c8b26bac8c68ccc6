"""What init makes of a guest, in QEMU: mounts, network, disk, console, orphans, and every way in which a guest ends."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.agentguest import AgentGuest, running
from vmm import recovery
from vmm.agent import Agent
from vmm.disk import create_disk
from vmm.errors import AgentError, AgentKilledError
from vmm.guest.kernel import kernel_arguments
from vmm.machine import MIB, MachineSpec
from vmm.process import Ending
from vmm.qemu import Qemu

pytestmark = [pytest.mark.qemu, pytest.mark.slow, pytest.mark.root]
DISK_BYTES = 64 * MIB
HANG_S = 120.0


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> AgentGuest:
    return AgentGuest.make(tmp_path_factory.mktemp("guest"))


@pytest.fixture(scope="module")
def plain(parts: AgentGuest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a guest whose writes stay in its memory."""
    run = tmp_path_factory.mktemp("plain")
    with Qemu.start(parts.spec(run), run):
        try:
            wait_for_agent(run)
        except BaseException:
            recovery.end(run)
            raise
    try:
        yield run
    finally:
        recovery.end(run)


def full_spec(parts: AgentGuest, run: Path) -> MachineSpec:
    """With a disk and a network of its own."""
    disk = run / "disk.qcow2"
    create_disk(disk, DISK_BYTES)
    spec = parts.spec(run, network="user")
    arguments = kernel_arguments(accelerator=spec.accelerator, network="user", disk=True)
    return dataclasses.replace(spec, upper_path=disk, kernel_arguments=arguments)


def wait_for_agent(run: Path) -> None:
    with Agent.connect(run, timeout_s=HANG_S) as agent:
        agent.ping()


def sh(run: Path, script: str) -> str:
    """What a shell script in the guest prints."""
    output: list[bytes] = []
    with Agent.connect(run, timeout_s=HANG_S) as agent:
        ended = agent.execute(["/bin/sh", "-c", script], stdout=output.append, stderr=output.append, timeout_s=HANG_S)
    text = b"".join(output).decode()
    assert ended.code == 0, text
    return text


def eventually(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not done():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.1)


def ended(qemu: Qemu) -> tuple[Ending, str]:
    """How it ends, and its console until then, which must be read for the guest to go on."""
    shown: list[str] = []

    def is_over() -> bool:
        shown.append(qemu.console_tail())
        return qemu.ending() is not None

    eventually(is_over)
    shown.append(qemu.console_tail())
    return qemu.wait(HANG_S), "".join(shown)


def test_what_a_process_finds(plain: Path) -> None:
    mounts = [line.split()[:4] for line in sh(plain, "cat /proc/mounts").splitlines()]
    kinds = {path: (kind, options.split(",")[0]) for _, path, kind, options in mounts}
    assert kinds["/"] == ("overlay", "rw")
    expected = {"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/dev/pts": "devpts", "/dev/shm": "tmpfs"}
    assert {path: kinds[path][0] for path in expected} == expected
    assert kinds["/run"][0] == "tmpfs"
    assert sh(plain, "cat /etc/image-file") == "from the image\n"
    assert sh(plain, "echo x > /dev/shm/a; cat /dev/shm/a; echo y > /run/b; echo z > /tmp/c; cat /run/b /tmp/c") == (
        "x\ny\nz\n"
    )
    assert sh(
        plain, "echo through | cat /dev/stdin; echo out > /dev/stdout; exec 3< /etc/image-file; cat /dev/fd/3"
    ) == ("through\nout\nfrom the image\n")
    assert "localhost" in sh(plain, "cat /etc/hosts")
    assert sh(plain, "stat -c '%a %u' / /tmp /dev/null") == "755 0\n1777 0\n666 0\n"


def test_the_image_can_be_changed_and_has_a_loopback(plain: Path) -> None:
    assert sh(plain, "echo mine > /etc/image-file; rm -r /home; cat /etc/image-file; ls /").split()[0] == "mine"
    assert "home" not in sh(plain, "ls /").split()
    client = "until echo said | nc -w 20 127.0.0.1 700 2> /dev/null; do sleep 0.1; done"
    script = f"echo heard | nc -l -p 700 > /tmp/got & {client}; wait; cat /tmp/got"
    assert sorted(sh(plain, script).split()) == ["heard", "said"]


def test_no_host_network_without_one(plain: Path) -> None:
    assert sh(plain, "ls /sys/class/net") == "lo\n"


def test_orphans_are_reaped(plain: Path) -> None:
    sh(plain, "for n in 1 2 3 4 5; do (sh -c 'sleep 0.2' & ) ; done")
    count = "cat /proc/[0-9]*/stat | grep -c ') Z ' || true"
    eventually(lambda: sh(plain, count) == "0\n")
    eventually(lambda: sh(plain, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 0.2' || true") == "0\n")


@pytest.mark.parametrize("number", ["KILL", "SEGV", "QUIT", "STOP", "ALRM", "CHLD"])
def test_signals_do_not_end_process_1(plain: Path, number: str) -> None:
    sh(plain, f"kill -{number} 1; sleep 0.3")
    assert sh(plain, "cat /proc/1/comm") == "busybox\n"


def test_an_agent_that_is_killed_comes_back(plain: Path) -> None:
    find = "for d in /proc/[0-9]*; do if grep -q '^perl' $d/comm; then echo ${d#/proc/}; fi; done 2> /dev/null"
    agent = sh(plain, find).split()[0]
    with Agent.connect(plain, timeout_s=HANG_S) as session, pytest.raises(AgentError):
        session.execute(["/bin/kill", "-9", agent], stdout=lambda _: None, stderr=lambda _: None, timeout_s=5)
        session.execute(["/bin/true"], stdout=lambda _: None, stderr=lambda _: None, timeout_s=5)
    wait_for_agent(plain)
    assert sh(plain, find).split()[0] != agent


def test_who_follows_a_command_learns_that_the_agent_was_killed(plain: Path) -> None:
    """Without a timeout, and with output that nobody has read yet; the command goes on."""
    find = "for d in /proc/[0-9]*; do if grep -q '^perl' $d/comm; then echo ${d#/proc/}; fi; done 2> /dev/null"
    agent = sh(plain, find).split()[0]
    said = bytearray()
    script = f"head -c 300000 /dev/zero; kill -9 {agent}; exec sleep 1234"
    with Agent.connect(plain, timeout_s=HANG_S) as session, pytest.raises(AgentKilledError):
        session.execute(["/bin/sh", "-c", script], stdout=said.extend, stderr=said.extend)
    assert len(said) <= 300_000
    assert not any(said)
    with Agent.connect(plain, timeout_s=HANG_S, control=True) as asking:
        (left,) = (one for one in asking.processes()[0] if one.argv == ("sleep", "1234"))
        assert not left.followed
        with pytest.raises(AgentKilledError), Agent.connect(plain, timeout_s=HANG_S) as session:
            session.execute(["/bin/sh", "-c", "kill -9 -1"], stdout=said.extend, stderr=said.extend)
        with pytest.raises(AgentKilledError):
            asking.identify(hostname="again")
    wait_for_agent(plain)


def console(run: Path, text: bytes, until: bytes) -> bytes:
    """What the serial line shows after this was typed."""
    shown = b""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(HANG_S)
        line.connect(str(run / "serial.sock"))
        line.sendall(text)
        while until not in shown:
            piece = line.recv(4096)
            assert piece, shown
            shown += piece
    return shown


def test_what_an_agent_held_goes_on_with_the_next_one(plain: Path) -> None:
    """The console's shell is not held."""
    find = "for d in /proc/[0-9]*; do if grep -q '^perl' $d/comm; then echo ${d#/proc/}; fi; done 2> /dev/null"
    counting = (
        "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.01; done"
    )
    agent = sh(plain, find).split()[0]
    sh(plain, f"({counting}) > /dev/null 2>&1 & until [ -s /tmp/n ]; do sleep 0.1; done")
    with Agent.connect(plain, timeout_s=HANG_S) as session:
        assert session.hold() == ()
        look = b"a=$(cat /tmp/n); sleep 0.5; b=$(cat /tmp/n); echo stood $((b-a))\n"
        console(plain, look, b"stood 0")
        console(plain, f"kill -9 {agent}; echo killed $((6*7))\n".encode(), b"killed 42")
    console(plain, b"exit\n", b"press Enter")
    first = int(sh(plain, "cat /tmp/n"))
    eventually(lambda: int(sh(plain, "cat /tmp/n")) > first)
    sh(plain, "touch /tmp/end")


def test_the_first_line_on_the_console_starts_a_shell_and_is_its_first_command(plain: Path) -> None:
    console(plain, b"cd /etc; echo first $((6*7))\n", b"first 42")
    console(plain, b"echo second $PWD $((6*7))\n", b"second /etc 42")
    console(plain, b"exit\n", b"press Enter")
    console(plain, b"cat /etc/hosts | wc -l; echo again $((1+1))\n", b"again 2")


def test_a_console_that_nobody_reads_holds_up_nothing(plain: Path) -> None:
    before = sum(path.stat().st_blocks for path in plain.iterdir())
    sh(plain, "timeout 3 sh -c 'yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa > /dev/ttyS0' || true")
    assert sh(plain, "echo alive") == "alive\n"
    assert sum(path.stat().st_blocks for path in plain.iterdir() if path.name != "memory") <= before


def test_a_panic_ends_the_vm(parts: AgentGuest, tmp_path: Path) -> None:
    with running(parts.spec(tmp_path), tmp_path) as qemu:
        wait_for_agent(tmp_path)
        # Not before this command's end is told.
        sh(tmp_path, "(sleep 5; echo c > /proc/sysrq-trigger) > /dev/null 2>&1 &")
        ending, console = ended(qemu)
        assert ending.exit_code == 0
        assert "Kernel panic" in console


@pytest.mark.parametrize("way", ["button", "agent"])
def test_power_off_leaves_the_disk_in_order(parts: AgentGuest, tmp_path: Path, way: str) -> None:
    with running(full_spec(parts, tmp_path), tmp_path) as qemu:
        wait_for_agent(tmp_path)
        addresses = sh(tmp_path, "ip address show dev eth0; ip route; cat /etc/resolv.conf")
        for text in ("10.0.2.15/24", "default via 10.0.2.2", "nameserver 10.0.2.3", "02:00:00:00:00:07"):
            assert text in addresses
        stubborn = "trap '' TERM; > /run/stubborn; while :; do sleep 1; done"
        polite = "trap 'echo ended > /root/polite; exit' TERM; > /run/polite; while :; do sleep 0.1; done"
        for name, script in {"stubborn": stubborn, "polite": polite}.items():
            started = f"until [ -e /run/{name} ]; do sleep 0.1; done"
            sh(tmp_path, f'setsid sh -c "{script}" > /dev/null 2>&1 & {started}')
        sh(tmp_path, "echo kept > /root/kept; dd if=/dev/urandom of=/root/big bs=1M count=4 2> /dev/null")
        if way == "agent":
            with Agent.connect(tmp_path, timeout_s=HANG_S) as agent:
                agent.shutdown()
        else:
            watched = "ls -l /proc/[0-9]*/fd 2> /dev/null | grep -q ' /dev/input/' && echo yes || true"
            eventually(lambda: sh(tmp_path, watched) == "yes\n")
            qemu._execute("system_powerdown")
        assert ended(qemu)[0].powered_off
    raw = tmp_path / "disk.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", tmp_path / "disk.qcow2", raw], check=True, timeout=60)
    checked = subprocess.run(["e2fsck", "-f", "-n", raw], capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for name in ("kept", "polite"):
        request = f"cat /files/root/{name}"
        argv = ["debugfs", "-R", request, str(raw)]
        shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
        assert shown == {"kept": "kept\n", "polite": "ended\n"}[name]


def test_what_fails_is_said_and_ends_the_vm(parts: AgentGuest, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copy(parts.metadata, broken)
    os.truncate(broken, 0)
    os.truncate(broken, parts.metadata.stat().st_size)
    spec = dataclasses.replace(parts.spec(tmp_path), metadata_path=broken)
    with running(spec, tmp_path) as qemu:
        ending, console = ended(qemu)
        assert ending.powered_off
        assert "pvisor: the image can not be mounted" in console


def test_a_kernel_argument_that_is_unknown_is_not_inits(parts: AgentGuest, tmp_path: Path) -> None:
    spec = parts.spec(tmp_path)
    spec = dataclasses.replace(spec, kernel_arguments=f"{spec.kernel_arguments} whatever power_off")
    with running(spec, tmp_path):
        assert sh(tmp_path, "echo up") == "up\n"
