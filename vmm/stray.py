"""QEMUs that are known by their command line alone: the files that say which they are may be gone.

`vmm.qemu` starts each with `-pidfile PVISOR_RUN/vms/NAME/qemu.live`, which no other program has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

LIVE_NAME = "qemu.live"
_PROCESSES = Path("/proc")
_OPTION = b"\0-pidfile\0"


def find(run_dir: Path) -> int | None:
    """The process id of the one that was started in this directory, if it lives."""
    for directory, pid in _running():
        if directory == run_dir:
            return pid
    return None


def running_in(root: Path) -> dict[str, int]:
    """The process ids of all that were started in directories of `root`, by the directory's name."""
    return {directory.name: pid for directory, pid in _running() if directory.parent == root}


def _running() -> Iterator[tuple[Path, int]]:
    """Of those that have ended and wait for their parent, the command line is empty."""
    for process in _PROCESSES.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:  # it is gone
            continue
        path = Path(os.fsdecode(line.partition(_OPTION)[2].partition(b"\0")[0]))
        if path.name == LIVE_NAME:
            yield path.parent, int(process.name)
