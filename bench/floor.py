"""The least that a stage costs: what the kernel takes for its parts when a C program asks, and what a fork adds.

A stage may take so much longer than the plain program; this says which part of that is the kernel's, out of reach.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_PARTS = ("vfork, exec, wait", "in new namespaces", "with two overlays, /proc, /sys, /dev")


def contenders(lower: Path, workspace: Path, scratch: Path) -> dict[str, Callable[[], float]]:
    """Each gives the seconds of one sample. Those in C are missing where there is no compiler."""
    found: dict[str, Callable[[], float]] = {}
    compiler = shutil.which("cc")
    if compiler is not None:
        program = scratch / "floor"
        subprocess.run([compiler, "-O2", "-o", str(program), str(_SOURCE)], check=True)
        for part, name in enumerate(_PARTS):
            found[name] = partial(_in_c, program, part, lower, workspace, scratch)
    found["a fork of this Python that ends"] = _fork
    return found


def _in_c(program: Path, part: int, lower: Path, workspace: Path, scratch: Path) -> float:
    with tempfile.TemporaryDirectory(dir=scratch, prefix="floor-") as directory:
        words = [str(program), str(part), str(lower), str(workspace), directory]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(done.stdout) / 1e3


def _fork() -> float:
    """What it copies, what both sides touch next, and its removal grow with the memory of this process."""
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - started
