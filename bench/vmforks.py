"""Forks of an idle guest at once: until all of them answer, what each has of its own, and what parking it stores."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import Samples, show
from bench.vmguest import IMAGE, Bench, answer, own_bytes
from imaged.chunkstore.store import ChunkStore
from vmm import api, pagemap

_SETTLED_S = 3.0
_IDLE_S = 2.0


@dataclass(slots=True)
class Forks:
    """Of `count` children each round; bytes are of one child, but `host_bytes` (proportional set size of all their
    QEMUs) and `together_bytes` (what the store grew by when all were parked, one after the other) of all."""

    count: int
    memory_bytes: int
    parked_s: Samples = field(default_factory=Samples)
    running_s: Samples = field(default_factory=Samples)
    private_bytes: Samples = field(default_factory=Samples)
    anonymous_bytes: Samples = field(default_factory=Samples)
    stored_bytes: Samples = field(default_factory=Samples)
    park_s: Samples = field(default_factory=Samples)
    host_bytes: Samples = field(default_factory=Samples)
    together_bytes: Samples = field(default_factory=Samples)

    def to_json(self) -> dict[str, Any]:
        times = {name: getattr(self, name).to_json() for name in ("parked_s", "running_s", "park_s")}
        names = ("private_bytes", "anonymous_bytes", "stored_bytes", "host_bytes", "together_bytes")
        sizes = {name: getattr(self, name).to_json() for name in names}
        return {"count": self.count, "memory_bytes": self.memory_bytes, **times, **sizes}

    def show(self) -> None:
        def row(what: str, samples: Samples, unit: float) -> list[str]:
            return [what, str(len(samples.values)), f"{samples.p50 / unit:.2f}", f"{samples.p95 / unit:.2f}"]

        show(
            f"{self.count} forks of an idle guest of {self.memory_bytes >> 20} MiB",
            ["", "n", "P50", "P95"],
            [
                row("of a parked VM until all answered, s", self.parked_s, 1),
                row("of a running VM until all answered, s", self.running_s, 1),
                row(f"guest memory of its own, each after {_IDLE_S:.0f} s idle, MiB", self.private_bytes, 1 << 20),
                row("anonymous memory of its QEMU, each, MiB", self.anonymous_bytes, 1 << 20),
                row("host memory of all (PSS), MiB", self.host_bytes, 1 << 20),
                row("its own park, each, s", self.park_s, 1),
                row("its own park, each, stored MB", self.stored_bytes, 1e6),
                row("all parks together, stored MB", self.together_bytes, 1e6),
            ],
        )


def measure(bench: Bench, *, count: int, memory_bytes: int, rounds: int) -> Forks:
    """After a round that does not count: it records what a fork touches first."""
    found = Forks(count, memory_bytes)
    parent = api.start(IMAGE, name="idle", memory_bytes=memory_bytes, config=bench.config)
    answer(parent)
    time.sleep(_SETTLED_S)
    snapshot = parent.park().snapshot
    for number in range(rounds + 1):
        began = time.perf_counter()
        children = api.fork("idle", count, config=bench.config)
        answered(children)
        seconds = time.perf_counter() - began
        if number:
            found.parked_s.add(seconds)
            time.sleep(_IDLE_S)
            _weigh(bench, children, snapshot, found)
        remove(children)
    parent.resume()
    answer(parent)
    for number in range(rounds + 1):
        began = time.perf_counter()
        children = parent.fork(count)
        answered(children)
        if number:
            found.running_s.add(time.perf_counter() - began)
        remove(children)
    parent.remove()
    return found


def answered(children: Sequence[api.Vm]) -> None:
    """When each has executed a command; they are asked at once."""
    with ThreadPoolExecutor(len(children)) as pool:
        list(pool.map(answer, children))


def remove(children: Iterable[api.Vm]) -> None:
    for child in children:
        child.remove()


def _weigh(bench: Bench, children: Sequence[api.Vm], snapshot: str, found: Forks) -> None:
    """Memory of each and of all, then a park of each."""
    pids = {child.name: child.status().pid or 0 for child in children}
    memory = bench.memory_path(snapshot)
    for pid in pids.values():
        ranges = pagemap.private_ranges(pid, memory, found.memory_bytes)
        found.private_bytes.add(sum(one.length_bytes for one in ranges))
        found.anonymous_bytes.add(_rollup(pid)["Anonymous"])
    found.host_bytes.add(sum(_rollup(pid)["Pss"] for pid in pids.values()))
    before = _stored_bytes(bench)
    for child in children:
        began = time.perf_counter()
        parked = child.park()
        found.park_s.add(time.perf_counter() - began)
        found.stored_bytes.add(own_bytes(bench, parked.snapshot, snapshot))
    found.together_bytes.add(_stored_bytes(bench) - before)


def _rollup(pid: int) -> dict[str, int]:
    """Bytes of a process by kind, from /proc/PID/smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)}


def _stored_bytes(bench: Bench) -> int:
    with ChunkStore.open(bench.config.store, readonly=True) as store:
        return store.df().stored_bytes
