"""What every benchmark shares: samples, tables, JSON with machine and commit, and the peers' services."""

from __future__ import annotations

import json
import math
import os
import platform
import selectors
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(slots=True)
class Samples:
    """Measurements of one thing, in one unit."""

    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)

    def percentile(self, percent: float) -> float:
        """Nearest rank."""
        ordered = sorted(self.values)
        return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]

    @property
    def p50(self) -> float:
        return self.percentile(50)

    @property
    def p95(self) -> float:
        return self.percentile(95)

    def to_json(self) -> dict[str, Any]:
        return {"n": len(self.values), "p50": self.p50, "p95": self.p95, "values": self.values}


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on stdout, the first column to the left and the others to the right."""
    body = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *body]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [list(header), *body]:
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def write(name: str, document: dict[str, Any]) -> Path:
    """bench/results/NAME.json, with what it was measured on."""
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = {
        "cpu": cpus[0].partition(":")[2].strip() if cpus else "",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "at": int(time.time()),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **document}, indent=1) + "\n")
    print(f"written: {path.name}")
    return path


@dataclass(frozen=True, slots=True)
class FirstByte:
    """A process from its start: seconds to its first output byte and to its exit, and its output."""

    ready_s: float
    total_s: float
    output: bytes


def time_first_byte(argv: Sequence[str], *, env: dict[str, str] | None = None, timeout_s: float = 120.0) -> FirstByte:
    """Run a fresh process to its end. RuntimeError when it fails or says nothing."""
    started = time.perf_counter()
    with subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        assert p.stdout is not None and p.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(p.stdout, selectors.EVENT_READ)
            selector.select(timeout_s)
        first = os.read(p.stdout.fileno(), 65536)
        ready_s = time.perf_counter() - started
        rest, errors = p.communicate(timeout=timeout_s)
    if p.returncode or not first:
        raise RuntimeError(f"{argv}: exit code {p.returncode}: {errors.decode(errors='replace')[-2000:]}")
    return FirstByte(ready_s, time.perf_counter() - started, first + rest)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process and its children took: wall seconds, CPU seconds, peak resident bytes of the largest."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def measure(argv: Sequence[str], *, env: dict[str, str] | None = None) -> Cost:
    """Run a process to its end. RuntimeError with its last words when it fails."""
    started = time.perf_counter()
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as p:
        assert p.stderr is not None
        errors = p.stderr.read()
        _, status, usage = os.wait4(p.pid, 0)
        p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode:
        raise RuntimeError(f"{argv}: exit code {p.returncode}: {errors.decode(errors='replace')[-2000:]}")
    return Cost(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


@dataclass(frozen=True, slots=True)
class Podman:
    """podman with its own storage under `root`, as it runs on hosts with cgroup v1 too."""

    root: Path

    @property
    def command(self) -> list[str]:
        return [
            "podman",
            "--cgroup-manager=cgroupfs",
            "--runtime=runc",
            f"--root={self.root / 'root'}",
            f"--runroot={self.root / 'run'}",
        ]

    def pull(self, image: str) -> list[str]:
        return [*self.command, "pull", "--quiet", "--tls-verify=false", image]

    def run(self, image: str, *argv: str, rootfs: bool = False) -> list[str]:
        """Without a network, as `pvisor run`, and with small limits: raising them is not allowed everywhere.

        With `rootfs`, `image` is a root directory.
        """
        options = ["--rm", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096"]
        options.append("--rootfs" if rootfs else "--tls-verify=false")
        return [*self.command, "run", *options, image, *argv]

    def forget(self) -> None:
        """Remove every image."""
        subprocess.run([*self.command, "rmi", "--all", "--force"], check=True, capture_output=True)
