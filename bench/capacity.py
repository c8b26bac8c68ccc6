"""How many tasks fit under one limit: starts them all, waits until each is ready or dead, lets them go at once.

Run by `bench.stage` as a process inside the cgroup under test. One line of JSON on stdout: started, ready, completed.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import IO

DATA_BYTES = 32 << 20
READY, DONE = b"ready\n", b"done\n"
# 32 MiB that are this task's alone before it is let go, then work on them and a commit in a repository of its own.
TASK = f"""
import hashlib, os, subprocess, sys
data = bytearray(os.urandom(1 << 20) * {DATA_BYTES >> 20})
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.read()
for start in range(0, len(data), 4096):
    data[start] = (data[start] + 1) % 256
digest = hashlib.sha256(data).hexdigest()
git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", "/tmp/task"]
os.makedirs("/tmp/task")
subprocess.run([*git, "init", "-q"], check=True)
for number in range(20):
    with open(f"/tmp/task/{{number}}", "w") as file:
        file.write(digest * 20)
subprocess.run([*git, "add", "-A"], check=True)
subprocess.run([*git, "commit", "-q", "-m", digest], check=True)
log = subprocess.run([*git, "log", "--format=%s"], check=True, capture_output=True, text=True).stdout
assert log.strip() == digest == hashlib.sha256(data).hexdigest()
print("done")
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one round. A task that did not come to its end is in `started` all the same."""

    started: int
    ready: int
    completed: int
    seconds: float


class Task:
    """One that runs as a process of its own, or in a thread of this one; `output` is what it says."""

    def __init__(self, command: Sequence[str], stdin: int) -> None:
        self._process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdout is not None
        self.output: IO[bytes] = self._process.stdout

    def exit_code(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class ThreadTask:
    """`stage.run` in this process."""

    def __init__(self, image: str, stdin: int) -> None:
        source, target = os.pipe2(os.O_CLOEXEC)
        self.output: IO[bytes] = os.fdopen(source, "rb", buffering=0)
        self._code = -1
        self._thread = Thread(target=self._run, args=(image, stdin, target), daemon=True)
        self._thread.start()

    def _run(self, image: str, stdin: int, stdout: int) -> None:
        import stage
        from imaged.errors import PvisorError

        try:
            argv = ["python3", "-c", TASK]
            self._code = stage.run(image, argv, stdin=stdin, stdout=stdout, timeout_s=300).exit_code
        except (PvisorError, OSError):  # a task that failed, as one that ended with another exit code
            self._code = -1
        finally:
            os.close(stdout)

    def exit_code(self, timeout_s: float) -> int:
        self._thread.join(timeout_s)
        return self._code


def run_tasks(count: int, command: Sequence[str], *, in_process: str = "", timeout_s: float = 300.0) -> Outcome:
    """Starts `count` of them: `command` each, or with `in_process` that image by `stage.run`."""
    gate, opener = os.pipe2(os.O_CLOEXEC)
    started_at = time.monotonic()
    tasks = [ThreadTask(in_process, gate) if in_process else Task(command, gate) for _ in range(count)]
    ready, deadline = 0, time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for task in tasks:
            selector.register(task.output, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(1.0):
                ready += os.read(key.fd, len(READY)) == READY
                selector.unregister(key.fileobj)
    os.close(opener)  # all of them read the end of it at once
    os.close(gate)
    said = [task.output.read() for task in tasks]
    codes = [task.exit_code(timeout_s) for task in tasks]
    completed = sum(code == 0 and text == DONE for code, text in zip(codes, said, strict=True))
    return Outcome(count, ready, completed, time.monotonic() - started_at)


@contextmanager
def limited_cgroup(name: str, *, memory_bytes: int, cpus: int) -> Iterator[Sequence[Path]]:
    """A cgroup with limits for all that runs in it or below, without swap; yields where its processes go.

    Version 2, or both hierarchies of version 1.
    """
    top = Path("/sys/fs/cgroup")
    if (top / "cgroup.controllers").exists():
        parents = [top / name]
        (top / "cgroup.subtree_control").write_text("+memory +cpu +pids")
        settings = {"memory.max": memory_bytes, "memory.swap.max": 0, "cpu.max": f"{cpus * 100_000} 100000"}
        leaf = "tasks"
    else:
        parents = [top / "memory" / name, top / "cpu" / name]
        settings = {
            "memory.limit_in_bytes": memory_bytes,
            "memory.memsw.limit_in_bytes": memory_bytes,
            "cpu.cfs_period_us": 100_000,
            "cpu.cfs_quota_us": cpus * 100_000,
        }
        leaf = "tasks-of-bench"
    try:
        for parent in parents:
            parent.mkdir()
            for file, value in settings.items():
                if (parent / file).exists():
                    (parent / file).write_text(str(value))
            if (parent / "cgroup.subtree_control").exists():
                (parent / "cgroup.subtree_control").write_text("+memory +cpu +pids")
            (parent / leaf).mkdir()
        yield [parent / leaf for parent in parents]
    finally:
        for parent in parents:
            for directory in sorted(parent.glob("**/"), reverse=True):
                directory.rmdir()


def run_limited(count: int, directories: Sequence[Path], argv: Sequence[str], env: dict[str, str]) -> Outcome:
    """A round in a process of its own inside the cgroup. When the kernel ends that one, no task has completed."""

    def enter() -> None:
        for directory in directories:
            (directory / "cgroup.procs").write_text("0")

    done = subprocess.run(argv, env=env, preexec_fn=enter, stdout=subprocess.PIPE, timeout=900, check=False)
    if done.returncode == -signal.SIGKILL:
        return Outcome(count, 0, 0, 0.0)
    if done.returncode:
        raise RuntimeError(f"{argv}: exit code {done.returncode}")
    return Outcome(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--in-process", default="", metavar="IMAGE")
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    print(json.dumps(asdict(run_tasks(given.count, given.command, in_process=given.in_process))))


if __name__ == "__main__":
    main()
