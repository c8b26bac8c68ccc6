"""One guest size and payload: saved once by plain QEMU and by pVisor, then brought back and saved again in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import Samples, time_first_byte
from bench.vmguest import ANSWER, CHANGED, IMAGE, PAYLOADS, Bench, answer, do, own_bytes, require_nothing_held
from bench.vmpeers import TAG, create_qcow2, started
from bench.vmphases import PARK, RESUME, Phases
from vmm import api

PLAIN_BOOT, COMMAND_BOOT, API_BOOT = "plain QEMU", "pvisor vm run", "vmm.start"
INCOMING, LOADVM, COMMAND_RESUME, API_RESUME = (
    "-incoming exec:zstd",
    "-loadvm",
    "pvisor vm resume, vm exec",
    "vmm.resume",
)
MIGRATE, SAVEVM, COMMAND_PARK, API_PARK = "migrate exec:zstd", "savevm", "pvisor vm park", "Vm.park"
Rows = dict[str, Samples]


def add(rows: Rows, name: str, value: float) -> None:
    rows.setdefault(name, Samples()).add(value)


@dataclass(slots=True)
class Boots:
    """Seconds from nothing to the first output of a guest of this size, by contender."""

    bench: Bench
    memory_bytes: int
    seconds: Rows = field(default_factory=dict)

    def round(self, *, counted: bool) -> None:
        for name, boot in {PLAIN_BOOT: self._plain, COMMAND_BOOT: self._command, API_BOOT: self._api}.items():
            seconds = boot()
            if counted:
                add(self.seconds, name, seconds)

    def _plain(self) -> float:
        qcow2 = self.bench.scratch / "unused.qcow2"
        create_qcow2(qcow2)
        with started(self.bench.spec(self.memory_bytes), self.bench.scratch / "peer", qcow2) as peer:
            return peer.first_output()

    def _command(self) -> float:
        words = ("run", "--memory", f"{self.memory_bytes >> 20}M", IMAGE, "--", *ANSWER)
        return time_first_byte(self.bench.command(*words), env=self.bench.env).ready_s

    def _api(self) -> float:
        began = time.perf_counter()
        vm = api.start(IMAGE, name="cold", memory_bytes=self.memory_bytes, config=self.bench.config)
        answer(vm)
        seconds = time.perf_counter() - began
        vm.remove()
        return seconds


@dataclass(slots=True)
class Cell:
    """`first_s`, `first_bytes`: of the whole guest; `second_*`: after a small change of one that was brought back."""

    bench: Bench
    memory_bytes: int
    payload: str
    first_s: Rows = field(default_factory=dict)
    first_bytes: Rows = field(default_factory=dict)
    resume_s: Rows = field(default_factory=dict)
    second_s: Rows = field(default_factory=dict)
    second_bytes: Rows = field(default_factory=dict)
    resume: Phases = field(default_factory=Phases)
    park: Phases = field(default_factory=Phases)
    _snapshot: str = ""

    @property
    def label(self) -> str:
        return f"{self.memory_bytes >> 20} MiB, {self.payload}"

    def to_json(self) -> dict[str, Any]:
        names = ("first_s", "first_bytes", "resume_s", "second_s", "second_bytes")
        tables = {name: _json(getattr(self, name)) for name in names}
        phases = {"resume_ms": _json(self.resume.samples), "park_ms": _json(self.park.samples)}
        return {"memory_bytes": self.memory_bytes, "payload": self.payload, **tables, **phases}

    def save(self) -> None:
        """Both guests booted, filled and saved."""
        with self._plain() as peer:
            peer.execute(PAYLOADS[self.payload])
            add(self.first_s, MIGRATE, peer.migrate(self._zstd))
            add(self.first_bytes, MIGRATE, self._zstd.stat().st_size)
            peer.cont()
            empty = self._qcow2.stat().st_blocks * 512
            add(self.first_s, SAVEVM, peer.savevm())
            add(self.first_bytes, SAVEVM, self._qcow2.stat().st_blocks * 512 - empty)
        vm = api.start(IMAGE, name=self._base, memory_bytes=self.memory_bytes, config=self.bench.config)
        do(vm, PAYLOADS[self.payload])
        pid = vm.status().pid or 0
        began = time.perf_counter()
        self._snapshot = vm.park().snapshot
        add(self.first_s, API_PARK, time.perf_counter() - began)
        add(self.first_bytes, API_PARK, own_bytes(self.bench, self._snapshot))
        require_nothing_held(self.bench, self._base, pid)

    def round(self, *, counted: bool) -> None:
        """Each contender once; the first round fills caches and records what a resume touches, so it does not count."""
        contenders: tuple[Callable[[bool], None], ...] = (
            self._incoming,
            self._by_command,
            self._loadvm,
            self._in_process,
        )
        for contender in contenders:
            contender(counted)

    def _incoming(self, counted: bool) -> None:
        with self._plain("-incoming", f"exec:zstd -q -d -c {self._zstd}") as peer:
            seconds = peer.first_output()
            peer.execute(CHANGED)
            second = self._zstd.with_suffix(".second")
            migrated_s = peer.migrate(second)
            if counted:
                add(self.resume_s, INCOMING, seconds)
                add(self.second_s, MIGRATE, migrated_s)
                add(self.second_bytes, MIGRATE, second.stat().st_size)

    def _loadvm(self, counted: bool) -> None:
        with self._plain("-loadvm", TAG) as peer:
            seconds = peer.first_output()
            if counted:
                add(self.resume_s, LOADVM, seconds)

    def _by_command(self, counted: bool) -> None:
        began = time.perf_counter()
        self.bench.pvisor("vm", "resume", self._base, "--name", "again")
        resumed_s = time.perf_counter() - began
        said = time_first_byte(self.bench.command("exec", "again", "--", *ANSWER), env=self.bench.env)
        vm = api.get("again", config=self.bench.config)
        do(vm, CHANGED)
        began = time.perf_counter()
        self.bench.pvisor("vm", "park", "again")
        if counted:
            add(self.second_s, COMMAND_PARK, time.perf_counter() - began)
            add(self.resume_s, COMMAND_RESUME, resumed_s + said.ready_s)
        vm.remove()

    def _in_process(self, counted: bool) -> None:
        began = time.perf_counter()
        with self.resume.timing(RESUME, counted=counted):
            vm = api.resume(self._base, new_name="again", config=self.bench.config)
        answer(vm)
        seconds = time.perf_counter() - began
        do(vm, CHANGED)
        began = time.perf_counter()
        with self.park.timing(PARK, counted=counted):
            parked = vm.park()
        parked_s = time.perf_counter() - began
        if counted:
            add(self.resume_s, API_RESUME, seconds)
            add(self.second_s, API_PARK, parked_s)
            add(self.second_bytes, API_PARK, own_bytes(self.bench, parked.snapshot, self._snapshot))
        vm.remove()

    def _plain(self, *source: str) -> Any:
        if not source:
            create_qcow2(self._qcow2)
        return started(self.bench.spec(self.memory_bytes), self.bench.scratch / "peer", self._qcow2, *source)

    @property
    def _base(self) -> str:
        return f"base-{self.memory_bytes >> 20}-{list(PAYLOADS).index(self.payload)}"

    @property
    def _zstd(self) -> Path:
        return self.bench.scratch / f"{self._base}.zst"

    @property
    def _qcow2(self) -> Path:
        return self.bench.scratch / f"{self._base}.qcow2"


def _json(rows: Rows) -> dict[str, Any]:
    return {name: samples.to_json() for name, samples in rows.items()}
