"""Our agent beside qemu-ga, both in one guest: a command's round trip, output of 8 MB, and output of 32 MB.

    python -m bench.agent [-n 10] [--qemu-ga PATH]

qemu-ga comes from Debian's package qemu-guest-agent, which is downloaded and unpacked when no program is given. Its
client asks for the end of a command every 2 ms, for qemu-ga tells nothing by itself. Connections are made beforehand;
a new session of ours is timed apart. Samples are interleaved. Sizes are in MB of 10^6 bytes.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench.common import Samples, show, write
from tests.support.agentguest import AgentGuest, running
from vmm import machine, qemu
from vmm.agent import Agent
from vmm.guest import cpio
from vmm.guest.initramfs import libraries

WAIT_S = 300.0
MB = 1_000_000
LARGEST_MB = 32
_ASK_AGAIN_S = 0.002
_START = b"""#!/bin/busybox sh
for port in /sys/class/virtio-ports/*; do
    if [ "$(cat "$port/name")" = org.qemu.guest_agent.0 ]; then
        exec /usr/sbin/qemu-ga --method virtio-serial --path "/dev/${port##*/}" --statedir /tmp
    fi
done
sleep 0.2
"""
_INITTAB_LINE = b"::respawn:/pvisor/qemu-ga\n"


class Peer:
    """A client of qemu-ga."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(WAIT_S)
        self._socket.connect(str(path))
        self._stream = self._socket.makefile("rwb")

    def ask(self, command: str, **arguments: Any) -> Any:
        line = json.dumps({"execute": command, "arguments": arguments} if arguments else {"execute": command})
        self._stream.write(line.encode() + b"\n")
        self._stream.flush()
        answer = json.loads(self._stream.readline())
        if "return" not in answer:
            raise RuntimeError(f"qemu-ga: {command}: {answer}")
        return answer["return"]

    def run(self, *argv: str) -> tuple[bytes, bool]:
        """Output, and whether it was cut off."""
        path, *arguments = argv
        pid = self.ask("guest-exec", path=path, arg=arguments, **{"capture-output": True})["pid"]
        while True:
            status = self.ask("guest-exec-status", pid=pid)
            if status["exited"]:
                return base64.b64decode(status.get("out-data", "")), bool(status.get("out-truncated"))
            time.sleep(_ASK_AGAIN_S)


@contextmanager
def guest_with_both(directory: Path, program: Path) -> Iterator[tuple[Path, Path]]:
    """A guest that runs both; its directory, and the socket of qemu-ga."""
    made = AgentGuest.make(directory)
    both = directory / "both"
    # Of archives behind each other the kernel unpacks one over the other.
    both.write_bytes(made.initramfs.read_bytes() + cpio.archive(_files(program)))
    made = dataclasses.replace(made, initramfs=both)
    run_dir, peer = directory / "run", directory / "qemu-ga.sock"

    def arguments(*given: Any) -> list[str]:
        port = "virtserialport,bus=peer.0,chardev=peer,name=org.qemu.guest_agent.0"
        return [
            *machine.arguments(*given),
            *("-device", "virtio-serial-pci,id=peer,disable-legacy=on"),
            *("-chardev", f"socket,id=peer,path={peer},server=on,wait=off", "-device", port),
        ]

    with mock.patch.object(qemu, "arguments", arguments), running(made.spec(run_dir, memory_mib=512), run_dir):
        yield run_dir, peer


def _files(program: Path) -> Iterator[cpio.Entry]:
    from vmm.guest import initramfs

    for name in ("pvisor", "usr", "usr/sbin"):
        yield cpio.directory(name)
    yield cpio.file("usr/sbin/qemu-ga", program.read_bytes(), mode=0o755)
    for path in libraries([program]):
        for parent in reversed(path.parents[:-1]):
            yield cpio.directory(str(parent).lstrip("/"))
        yield cpio.file(str(path).lstrip("/"), path.read_bytes(), mode=0o755)
    yield cpio.file("pvisor/qemu-ga", _START, mode=0o755)
    yield cpio.file("etc/inittab", initramfs._INITTAB + _INITTAB_LINE)


def unpacked(directory: Path) -> Path:
    for command in (["apt-get", "download", "qemu-guest-agent"], ["sh", "-c", "dpkg -x ./*.deb ."]):
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=300)
    return directory / "usr/sbin/qemu-ga"


def connected(run_dir: Path) -> Agent:
    return Agent.connect(run_dir, timeout_s=WAIT_S)


def ours(agent: Agent, *argv: str) -> bytes:
    output = bytearray()
    ended = agent.execute(argv, stdout=output.extend, stderr=output.extend)
    if ended.code != 0:
        raise RuntimeError(f"{argv}: {ended}, {bytes(output[:200])!r}")
    return bytes(output)


def resident_kib(agent: Agent) -> dict[str, int]:
    """Of both agents, from the guest's own root."""
    script = "for p in /proc/[0-9]*; do echo $(tr '\\0' ' ' < $p/cmdline) $(grep VmRSS $p/status); done"
    said = ours(agent, "busybox", "chroot", "/proc/1/root", "/bin/busybox", "sh", "-c", script).decode()
    lines = [line.split() for line in said.splitlines() if "VmRSS:" in line]
    return {
        name: next(int(words[-2]) for words in lines if program in words[0])
        for name, program in (("pVisor", "/usr/bin/perl"), ("qemu-ga", "/usr/sbin/qemu-ga"))
    }


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=10, help="samples of each")
    parser.add_argument("--qemu-ga", type=Path, help="the program; without, its package is downloaded")
    given = parser.parse_args()
    samples: dict[str, dict[str, Samples]] = {}

    def sample(what: str, who: str, value: float) -> None:
        samples.setdefault(what, {}).setdefault(who, Samples()).add(value)

    with tempfile.TemporaryDirectory(prefix="bench-agent-") as name:
        program = given.qemu_ga or unpacked(Path(name))
        with guest_with_both(Path(name, "guest"), program) as (run_dir, peer_path), connected(run_dir) as agent:
            peer = Peer(peer_path)
            peer.ask("guest-ping")
            eight = str(8 * MB)
            for number in range(given.n + 1):
                measured = {
                    ("true", "pVisor"): timed(lambda: ours(agent, "true")),
                    ("true", "qemu-ga"): timed(lambda: peer.run("/bin/busybox", "true")),
                    ("new session", "pVisor"): timed(lambda: connected(run_dir).close()),
                    ("8 MB", "pVisor"): timed(lambda: ours(agent, "head", "-c", eight, "/dev/zero")),
                    ("8 MB", "qemu-ga"): timed(lambda: peer.run("/bin/busybox", "head", "-c", eight, "/dev/zero")),
                }
                for (what, who), value in measured.items():
                    if number:  # the first of each fills caches
                        sample(what, who, value)
            asked = str(LARGEST_MB * MB)
            got = len(ours(agent, "head", "-c", asked, "/dev/zero"))
            peer_output, cut_off = peer.run("/bin/busybox", "head", "-c", asked, "/dev/zero")
            resident = resident_kib(agent)
    rows = [
        [what, who, str(len(found.values)), f"{found.p50:.1f}", f"{found.p95:.1f}"]
        for what, both in samples.items()
        for who, found in both.items()
    ]
    show("Round trips under TCG or KVM, ms", ["what", "agent", "n", "P50", "P95"], rows)
    print(f"\nof {LARGEST_MB} MB: pVisor {got} bytes, qemu-ga {len(peer_output)} bytes, said to be cut off: {cut_off}")
    print("resident KiB: " + ", ".join(f"{who} {kib}" for who, kib in resident.items()))
    write(
        "agent",
        {
            "round_trip_ms": {what: {who: s.to_json() for who, s in both.items()} for what, both in samples.items()},
            "largest_bytes": {
                "asked": LARGEST_MB * MB,
                "pVisor": got,
                "qemu-ga": len(peer_output),
                "qemu-ga said so": cut_off,
            },
            "resident_kib": resident,
        },
    )


if __name__ == "__main__":
    main()
