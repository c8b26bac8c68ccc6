"""VMs beside plain QEMU on the same guest: cold boot, parked and resumed, parked again, and 16 forks at once.

    python -m bench.vm [-n 5] [--quick] [--memory MIB]... [--forks 16]

Plain QEMU saves with `migrate exec:zstd` and with savevm (bench/vmpeers.py); "first output" is for all of them the
answer of the guest's agent to a command that it executes. Contenders take turns within each round, the first round of
which does not count. "vmm" is the Python API in a program that runs already, as plain QEMU is driven from here too; the
commands are fresh processes, `pvisor vm resume` and then `pvisor vm exec`. The small change before the second park is a
file of 1 MiB of new noise in the guest's tmpfs. Stored bytes are what a snapshot has and its parent (the first: its
image) has not, maps and records too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import vmforks
from bench.common import Samples, show, write
from bench.vmcell import API_PARK, API_RESUME, INCOMING, MIGRATE, PLAIN_BOOT, Boots, Cell, Rows
from bench.vmforks import Forks
from bench.vmguest import PAYLOADS, prepared
from bench.vmphases import Phases
from vmm import facts

MIB = 1 << 20
MB = 1e6


@dataclass(frozen=True, slots=True)
class Aim:
    """Something that is to be at least, or at most, as much."""

    what: str
    where: str
    measured: float
    wanted: float
    unit: str
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted

    def row(self) -> list[str]:
        sign = "<=" if self.at_most else ">="
        measured, wanted = f"{self.measured:.1f} {self.unit}", f"{sign} {self.wanted:g} {self.unit}"
        return [self.what, self.where, measured, wanted, "ok" if self.met else "missed"]


def aims_of(boots: Boots, cell: Cell) -> list[Aim]:
    """What a resume and a second park are to be beside plain QEMU, by medians."""
    boot, resume = boots.seconds[PLAIN_BOOT].p50, cell.resume_s[API_RESUME].p50
    faster = cell.second_s[MIGRATE].p50 / cell.second_s[API_PARK].p50
    smaller = cell.second_bytes[MIGRATE].p50 / cell.second_bytes[API_PARK].p50
    return [
        Aim("resume / cold boot of plain QEMU, faster", cell.label, boot / resume, 5, "x"),
        Aim("resume / -incoming exec:zstd, faster", cell.label, cell.resume_s[INCOMING].p50 / resume, 3, "x"),
        Aim("second park / migrate exec:zstd, faster", cell.label, faster, 10, "x"),
        Aim("second park / file of migrate exec:zstd, smaller", cell.label, smaller, 20, "x"),
        Aim("QEMU's process start to cont, P50", cell.label, cell.resume.load_ms.p50, 150, "ms", at_most=True),
    ]


def aims_of_forks(forks: Forks) -> list[Aim]:
    where = f"{forks.memory_bytes // MIB} MiB, {forks.count} forks"
    private, stored = forks.private_bytes.p95 / MIB, forks.stored_bytes.p95 / MB
    return [
        Aim("guest memory of a fork's own, P95", where, private, 4, "MiB", at_most=True),
        Aim("stored bytes of a fork's own park, P95", where, stored, 2, "MB", at_most=True),
    ]


def table(title: str, rows: Rows, unit: float, base: str | None = None) -> None:
    """A row of each contender, also as a multiple of one of them."""
    reference = rows[base].p50 if base is not None else None

    def row(name: str, samples: Samples) -> list[str]:
        cells = [name, str(len(samples.values)), f"{samples.p50 / unit:.2f}", f"{samples.p95 / unit:.2f}"]
        return cells if reference is None else [*cells, f"{samples.p50 / reference:.2f}x"]

    header = ["", "n", "P50", "P95"] if base is None else ["", "n", "P50", "P95", f"/ {base}"]
    show(title, header, [row(name, samples) for name, samples in rows.items()])


def show_cell(cell: Cell) -> None:
    table(f"{cell.label}: resume to first output, s", cell.resume_s, 1, API_RESUME)
    table(f"{cell.label}: first park, s", cell.first_s, 1, API_PARK)
    table(f"{cell.label}: first park, MB", cell.first_bytes, MB, API_PARK)
    table(f"{cell.label}: second park, s", cell.second_s, 1, API_PARK)
    table(f"{cell.label}: second park, MB", cell.second_bytes, MB, API_PARK)


def show_phases(cells: Sequence[Cell]) -> None:
    """Where our time goes, of all payloads of one size together."""
    by_size = {cell.memory_bytes: [one for one in cells if one.memory_bytes == cell.memory_bytes] for cell in cells}
    kinds: dict[str, Callable[[Cell], Phases]] = {"resume": lambda cell: cell.resume, "park": lambda cell: cell.park}
    for memory_bytes, some in by_size.items():
        for what, phases_of in kinds.items():
            together: Rows = {}
            for cell in some:
                for label, samples in phases_of(cell).samples.items():
                    together.setdefault(label, Samples()).values.extend(samples.values)
            which = "vmm.resume" if what == "resume" else "second Vm.park"
            table(f"{memory_bytes // MIB} MiB: where the time of {which} goes, ms", together, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, help="rounds, each with one sample of every contender")
    parser.add_argument("--quick", action="store_true", help="one round, and guests of 256 MiB only")
    parser.add_argument("--memory", type=int, action="append", metavar="MIB", help="guests of this size")
    parser.add_argument("--payload", choices=list(PAYLOADS), action="append", help="only this one")
    parser.add_argument("--forks", type=int, default=16, help="how many at once; 0 for none")
    given = parser.parse_args()
    rounds = 1 if given.quick else given.n
    sizes = given.memory or ([256] if given.quick else [256, 1024])
    loads: list[float] = []
    cells: list[Cell] = []
    aims: list[Aim] = []
    results: dict[str, Any] = {"accelerator": facts.accelerator(), "cold_boot_s": {}, "cells": []}
    with prepared() as bench:
        for mebibytes in sizes:
            boots = Boots(bench, mebibytes * MIB)
            some = [Cell(bench, mebibytes * MIB, payload) for payload in given.payload or PAYLOADS]
            for cell in some:
                cell.save()
            for number in range(rounds + 1):
                boots.round(counted=number > 0)
                for cell in some:
                    cell.round(counted=number > 0)
                loads.append(os.getloadavg()[0])
            table(f"{mebibytes} MiB: cold boot to first output, s", boots.seconds, 1, PLAIN_BOOT)
            for cell in some:
                show_cell(cell)
                aims += aims_of(boots, cell)
                results["cells"].append(cell.to_json())
            show_phases(some)
            cells += some
            results["cold_boot_s"][mebibytes] = {name: one.to_json() for name, one in boots.seconds.items()}
        if given.forks:
            rounds_of_forks = max(1, rounds // 2)
            forks = vmforks.measure(bench, count=given.forks, memory_bytes=256 * MIB, rounds=rounds_of_forks)
            loads.append(os.getloadavg()[0])
            forks.show()
            aims += aims_of_forks(forks)
            results["forks"] = forks.to_json()
    show("Aims", ["", "guest", "measured", "wanted", ""], [aim.row() for aim in aims])
    print(f"\naccelerator {results['accelerator']}; load average {min(loads):.1f} to {max(loads):.1f}")
    print(f"after each of {len(cells)} first parks no process had the VM's memory, and none of its own was left")
    results |= {
        "load_average": loads,
        "aims": [
            {"what": aim.what, "where": aim.where, "measured": aim.measured, "wanted": aim.wanted, "met": aim.met}
            for aim in aims
        ],
    }
    write("vm", results)


if __name__ == "__main__":
    main()
