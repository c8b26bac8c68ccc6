"""Plain QEMU over QMP as its users park and fork with it: `migrate` through zstd to a file, and savevm to a qcow2 file.

The machine, kernel, initramfs, disks and agent are those of pVisor's guests; RAM is anonymous memory, which may be of
huge pages. The guest is stopped while it is saved, at full speed (QEMU's own limit is 128 MiB/s), and zstd has its
usual level and all cores.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

from bench.vmguest import ANSWER, ANSWERED
from vmm import facts
from vmm.agent import Agent
from vmm.agentproto import PORT_COUNT
from vmm.machine import Descriptors, MachineSpec, arguments
from vmm.process import Process
from vmm.qmp import Monitor

WAIT_S = 600.0
TAG = "parked"
_NODE = "vmstate"
_FULL_SPEED = 1 << 40
_BACKLOG = 16
_POLL_S = 0.002
_QCOW2_BYTES = 8 << 30
"""Room for the state; the file grows as it is written."""


@dataclass(slots=True)
class PlainQemu:
    """One that runs. `started_at` is when its process was about to be made."""

    run_dir: Path
    process: Process
    monitor: Monitor
    started_at: float

    def wait_running(self) -> None:
        """Until what it was started from is loaded, and goes on: a guest that was stopped arrives stopped."""
        while (status := self._ask("query-status")["status"]) != "running":
            if status == "paused":
                self._ask("cont")
            else:
                self.monitor.event("MIGRATION", timeout_s=WAIT_S)

    def first_output(self) -> float:
        """Seconds from its start until the guest has executed a command."""
        self.wait_running()
        said = self.execute(ANSWER)
        if said != ANSWERED:
            raise RuntimeError(f"plain QEMU's guest said {said!r}")
        return time.perf_counter() - self.started_at

    def execute(self, argv: Sequence[str]) -> bytes:
        """What a command that must succeed writes."""
        output = bytearray()
        with Agent.connect(self.run_dir, timeout_s=WAIT_S) as agent:
            ended = agent.execute(argv, stdout=output.extend, stderr=output.extend)
        if ended.exit_code:
            raise RuntimeError(f"plain QEMU's guest: {argv}: {ended}: {bytes(output[-2000:])!r}")
        return bytes(output)

    def migrate(self, path: Path) -> float:
        """Seconds of stopping and of writing all of the guest through zstd into a file. It stays stopped."""
        path.unlink(missing_ok=True)
        self._ask("migrate-set-parameters", **{"max-bandwidth": _FULL_SPEED})
        started = time.perf_counter()
        self._ask("stop")
        part = path.with_name(f"{path.name}.part")
        self._ask("migrate", uri=f"exec:zstd -q -f -T0 -o {part} && mv {part} {path}")
        status = ""
        while status != "completed":
            status = self.monitor.event("MIGRATION", timeout_s=WAIT_S)["status"]
            if status in ("failed", "cancelled"):
                raise RuntimeError(f"migrate to {path}: {status}")
        while not path.exists():  # QEMU has sent all, and zstd goes on
            if time.perf_counter() - started > WAIT_S:
                raise RuntimeError(f"migrate to {path}: zstd does not end")
            time.sleep(_POLL_S)
        return time.perf_counter() - started

    def savevm(self) -> float:
        """Seconds of stopping and of writing all of the guest into its qcow2 file. It stays stopped."""
        started = time.perf_counter()
        self._ask("stop")
        job = {"job-id": "save", "tag": TAG, "vmstate": _NODE, "devices": [_NODE]}
        self._ask("snapshot-save", **job)
        while self.monitor.event("JOB_STATUS_CHANGE", timeout_s=WAIT_S)["status"] != "concluded":
            pass
        seconds = time.perf_counter() - started
        for found in self._ask("query-jobs"):
            if "error" in found:
                raise RuntimeError(f"savevm: {found['error']}")
        self._ask("job-dismiss", id="save")
        return seconds

    def cont(self) -> None:
        self._ask("cont")

    def _ask(self, command: str, **given: Any) -> Any:
        return self.monitor.execute(command, given, timeout_s=WAIT_S)


def create_qcow2(path: Path) -> int:
    """An empty file for `savevm`; the bytes it has."""
    path.unlink(missing_ok=True)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), str(_QCOW2_BYTES)], check=True)
    return path.stat().st_blocks * 512


@contextmanager
def started(spec: MachineSpec, run_dir: Path, qcow2: Path, *source: str) -> Iterator[PlainQemu]:
    """A boot, or with `source` (`-incoming URI`, `-loadvm TAG`) a saved guest; killed at the end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        listeners = []
        for name in ("qmp.sock", "serial.sock", *(f"agent-{port}.sock" for port in range(PORT_COUNT))):
            (run_dir / name).unlink(missing_ok=True)
            listeners.append(stack.enter_context(socket(AF_UNIX)))
            listeners[-1].bind(str(run_dir / name))
            listeners[-1].listen(_BACKLOG)
        monitor, serial, *agents = (listener.fileno() for listener in listeners)
        descriptors = Descriptors(monitor=monitor, serial=serial, agents=tuple(agents))
        argv = [*_plain(arguments(spec, facts.program(), descriptors), spec.memory_bytes), *_state(qcow2), *source]
        started_at = time.perf_counter()
        log = stack.enter_context(open(run_dir / "log", "wb"))
        passed = [monitor, serial, *agents]
        popen = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed)
        try:
            process = Process(run_dir, popen.pid, os.pidfd_open(popen.pid))
            stack.callback(process.close)
            connected = Monitor(run_dir / "qmp.sock", process, timeout_s=WAIT_S)
            stack.callback(connected.close)
            yield PlainQemu(run_dir, process, connected, started_at)
        finally:
            popen.kill()
            popen.wait()


def _plain(argv: list[str], memory_bytes: int) -> list[str]:
    """RAM that is no file, and leave to start zstd."""
    sandbox = argv.index("-sandbox")
    kept = argv[:sandbox] + argv[sandbox + 2 :]
    memory = f"memory-backend-ram,id=memory0,size={memory_bytes}"
    return [memory if word.startswith("memory-backend-file,") else word for word in kept]


def _state(qcow2: Path) -> list[str]:
    """Where savevm writes: a disk that the guest has not, so that all contenders have the same guest."""
    return ["-blockdev", f"driver=qcow2,node-name={_NODE},file.driver=file,file.filename={qcow2}"]
