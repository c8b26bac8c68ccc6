"""What test_stage_guest asks of a guest: stages with limits where the one cgroup file system is of version 2.

Prints a JSON document. It runs as root in a guest, with this repository at / of a directory that is its root.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stage.kept import cgroups
from stage.kept.cgroups import Limits

CGROUPS = Path("/sys/fs/cgroup")
HUNGRY = "exec dd if=/dev/zero of=/dev/null bs=60M count=1 2> /dev/null"
FORKS = "for n in 1 2 3 4 5 6 7 8; do sleep 1000 & done"  # all at once, however slow the guest is; they end with it
FACTS = {
    **dict.fromkeys(("secret", "token", "workspace", "lower", "abstract"), "/nowhere"),
    **dict.fromkeys(("disk", "port", "shm_key", "handle_type"), 1),
    "victim": 999_999,
    "handle": "00",
}


def run(*words: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.support.stage_runner", "--lower", "/lower", "--stages", "/stages", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}


def made(limits: Limits) -> dict[str, dict[str, str]]:
    """The files of the cgroups that these limits make."""
    stage = Path("/stages/made")
    stage.mkdir(exist_ok=True)
    with cgroups.limited(stage, limits):
        (path,) = json.loads((stage / cgroups.RECORD).read_bytes())["directories"]
        names = ("memory.max", "memory.swap.max", "cpu.max", "pids.max")
        files = {name: (Path(path) / name).read_text().strip() for name in names if (Path(path) / name).exists()}
    assert not Path(path).exists()
    return {str(Path(path).parent): files}


def enter_a_limited_cgroup() -> None:
    """/outer/inner with this process, where /outer can have limited children, and inner is limited itself."""
    inner = CGROUPS / "outer/inner"
    inner.mkdir(parents=True)
    for directory in (CGROUPS, CGROUPS / "outer"):
        (directory / "cgroup.subtree_control").write_text("+memory +pids +cpu")
    (inner / "memory.max").write_text(str(200 << 20))
    (inner / "pids.max").write_text("100")
    (inner / "cgroup.procs").write_text("0")


def main() -> None:
    probe = [sys.executable, "-I", "/probes.py", json.dumps(FACTS)]
    said: dict[str, Any] = {
        "memory": run("--memory", str(32 << 20), "--", "sh", "-c", HUNGRY),
        "pids": [run("--pids", count, "--", "sh", "-c", FORKS)["stderr"] for count in ("8", "9")],
        "own": run("--pids", "9", "--", "cat", "/proc/self/cgroup")["stdout"],
        "at the root": made(Limits(memory_bytes=64 << 20, cpus=0.5, pids=7)),
        "left": [path.name for path in CGROUPS.glob("pvisor-*")],
        "probes outside": json.loads(subprocess.run(probe, capture_output=True, check=True).stdout),
        "probes inside": json.loads(run("--", *probe)["stdout"]),
    }
    enter_a_limited_cgroup()
    said["below"] = made(Limits(memory_bytes=64 << 20))
    said["not above"] = made(Limits(memory_bytes=900 << 20, cpus=1))
    said["beside"] = run("--pids", "9", "--", "sh", "-c", "echo ran; cat /proc/self/cgroup")
    print(json.dumps(said))


if __name__ == "__main__":
    main()
