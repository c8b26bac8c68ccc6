"""How many VMs a host has room for, by its memory and process ids: asked before anything of them is made."""

from __future__ import annotations

from pathlib import Path

from vmm.errors import VmArgumentError

LEAST_BYTES = 24 << 20
"""What a QEMU and its guest take for themselves at the least: QEMU's own 18 MiB, the pages that a restore writes."""
_THREADS = 8
"""Of a QEMU, with one processor, and of what starts it."""
_MEMINFO = Path("/proc/meminfo")
_PID_MAX = Path("/proc/sys/kernel/pid_max")
_LOADAVG = Path("/proc/loadavg")


def check_count(count: object) -> int:
    """The number of VMs to be made at once. VmArgumentError when it is none, or more than can run here."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise VmArgumentError(f"count {count!r} is no number of VMs", hint="give 1 or more")
    free_bytes = _available_bytes()
    by_memory, by_pids = free_bytes // LEAST_BYTES, _free_pids() // _THREADS
    if count <= min(by_memory, by_pids):
        return count
    shown = str(count) if count < 1 << 64 else "so many"
    if by_memory <= by_pids:
        what = f"{free_bytes >> 20} MiB of memory are free, enough for {by_memory}"
    else:
        what = f"process ids are left for {by_pids}"
    raise VmArgumentError(f"this host can not run {shown} more VMs: {what}", hint="make fewer, or park others first")


def _available_bytes() -> int:
    """Memory, and swap."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree") if name in fields)


def _free_pids() -> int:
    threads = int(_LOADAVG.read_text().split()[3].partition("/")[2])
    return max(0, int(_PID_MAX.read_text()) - threads)
