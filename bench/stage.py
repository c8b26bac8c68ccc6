"""Stages beside podman (runc) and plain processes: a shell, a repair, an apply, and how many fit under one limit.

The image is Debian with Python and git, pulled and warm for all of them; samples are interleaved. "native" is the same
programs from an unpacked copy of the image by chroot, for the shell this host's own. "in process" is `stage.run` in a
program that runs already, as a harness for agents does; the others start a process each, as their users do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import stage
from bench import floor
from bench.capacity import TASK, Outcome, limited_cgroup, run_limited
from bench.common import Podman, Samples, show, time_first_byte, write
from bench.image import ServedImage, pvisor, pvisor_env, served_debian
from imaged.config import Config

SHELL = ("sh", "-c", "echo ready")
REPAIR = """
set -e
git status --short
grep -rn 'def mean' --include=*.py . | head -n 5
sed -i 's|return sum(values) / (len(values) + 1)|return sum(values) / len(values)|' package/module_7.py
python3 -m unittest {tests} 2>&1
git diff
"""
REPAIRS = {"one test": REPAIR.format(tests="-q test_module_7"), "all tests": REPAIR.format(tests="discover -q")}
"""The edited module's own test, some 40 ms of Python; and those of all 120 modules, as before a commit."""
EDIT = """
import os
for top, _, names in os.walk("/workspace"):
    for name in names:
        with open(os.path.join(top, name), "r+") as file:
            text = file.read()
            file.seek(0)
            file.write(text.replace("line 5", "line five"))
            file.truncate()
"""
MEMORY_BYTES, CPUS = 2 << 30, 2
PARTS = ["shell", "repair", "floor", "apply", "capacity"]


@dataclass(frozen=True, slots=True)
class Bench:
    """The image, ready in every contender: pVisor's name, podman's id, and an unpacked root."""

    scratch: Path
    image: str
    podman_image: str
    root: Path

    @property
    def env(self) -> dict[str, str]:
        return pvisor_env(self.scratch / "state")

    @property
    def config(self) -> Config:
        return Config(home=Path(self.env["PVISOR_HOME"]), run=Path(self.env["PVISOR_RUN"]), server=None)

    @property
    def podman(self) -> Podman:
        return Podman(self.scratch / "podman")

    def pvisor_run(self, *argv: str, options: Sequence[str] = ()) -> list[str]:
        return [pvisor(), "run", *options, self.image, "--", *argv]

    def podman_run(self, *argv: str, options: Sequence[str] = ()) -> list[str]:
        command = self.podman.run(self.podman_image, *argv)
        after = command.index("run") + 1
        return [*command[:after], *options, *command[after:]]


@contextmanager
def prepared(image: ServedImage) -> Iterator[Bench]:
    """The image converted, pulled and unpacked, and a node daemon that runs."""
    with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory:
        scratch = Path(directory)
        bench = Bench(scratch, image.name, image.reference, scratch / "root")
        try:
            output_of(bench.podman.pull(image.reference))
            bench.root.mkdir()
            for argv in (
                ["convert", f"docker://{image.reference}", "--name", image.name],
                ["image", "export", image.name, f"{bench.root}"],
                ["node", "start"],
            ):
                output_of([pvisor(), *argv], bench.env)
            yield bench
        finally:
            output_of([pvisor(), "node", "stop"], bench.env)
            bench.podman.forget()
            subprocess.run(["umount", str(scratch / "podman/root/overlay")], check=False, capture_output=True)


def in_process_first_byte(bench: Bench, argv: Sequence[str]) -> float:
    """Seconds from the call of `stage.run` to the first byte of output."""
    source, target = os.pipe2(os.O_CLOEXEC)
    arrived: list[float] = []

    def read() -> None:
        os.read(source, 4096)
        arrived.append(time.perf_counter())

    reader = threading.Thread(target=read)
    reader.start()
    started = time.perf_counter()
    result = stage.run(bench.image, argv, stdout=target, config=bench.config)
    os.close(target)
    reader.join()
    os.close(source)
    if result.exit_code:
        raise RuntimeError(f"{argv}: exit code {result.exit_code}")
    return arrived[0] - started


def shells(bench: Bench, count: int) -> dict[str, Samples]:
    """Seconds to the first output byte of a shell."""
    contenders: dict[str, Callable[[], float]] = {
        "native: fork + exec": lambda: time_first_byte(["/bin/sh", *SHELL[1:]]).ready_s,
        "stage, in process": lambda: in_process_first_byte(bench, SHELL),
        "pvisor run": lambda: time_first_byte(bench.pvisor_run(*SHELL), env=bench.env).ready_s,
        "podman run": lambda: time_first_byte(bench.podman_run(*SHELL)).ready_s,
    }
    return interleaved(contenders, count)


def interleaved(contenders: dict[str, Callable[[], float]], count: int) -> dict[str, Samples]:
    """One sample of each in turn, after one that does not count."""
    samples = {name: Samples() for name in contenders}
    for number in range(count + 1):
        for name, sample in contenders.items():
            value = sample()
            if number:
                samples[name].add(value)
    return samples


def make_repository(directory: Path, root: Path) -> None:
    """120 modules, one of which is wrong, their tests, and a commit."""
    (directory / "package").mkdir(parents=True)
    for number in range(120):
        wrong = " + 1" if number == 7 else ""
        divisor = f"(len(values){wrong})" if wrong else "len(values)"
        lines = [f"def mean_{number}(values):", f"    return sum(values) / {divisor}", ""]
        lines += [f"def helper_{number}_{index}(value):\n    return value * {index}\n" for index in range(30)]
        (directory / f"package/module_{number}.py").write_text("\n".join(lines))
        (directory / f"test_module_{number}.py").write_text(
            f"import unittest\nfrom package.module_{number} import mean_{number}\n\n"
            f"class MeanTest(unittest.TestCase):\n    def test_mean(self):\n"
            f"        self.assertEqual(mean_{number}([1, 2, 3]), 2)\n"
        )
    (directory / "package/__init__.py").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    with fresh_copy(directory, root / "workspace") as space:
        for words in (["init", "-q", "."], ["add", "-A"], ["commit", "-q", "-m", "start"]):
            output_of(["chroot", str(root), "git", "-C", "/workspace", *identity, *words])
        shutil.rmtree(directory)
        subprocess.run(["cp", "-a", str(space), str(directory)], check=True)


def repairs(bench: Bench, repository: Path, script: str, count: int) -> dict[str, Samples]:
    """Seconds from start to exit of the repair, in a fresh copy of the repository."""
    plan = ("sh", "-c", script)

    def sample(run: Callable[[Path], bytes], at: Path) -> Callable[[], float]:
        def timed() -> float:
            with fresh_copy(repository, at) as space:
                started = time.perf_counter()
                output = run(space)
                seconds = time.perf_counter() - started
            if b"OK" not in output or b"+    return sum(values) / len(values)" not in output:
                raise RuntimeError(f"the repair failed: {output.decode(errors='replace')}")
            return seconds

        return timed

    def native(space: Path) -> bytes:
        del space  # it is in the root
        return output_of(["chroot", str(bench.root), "sh", "-c", f"cd /workspace; {script}"])

    def in_process(space: Path) -> bytes:
        return stage.run(bench.image, plan, workspace=space, capture_output=True, config=bench.config).stdout

    def command(space: Path) -> bytes:
        return output_of(bench.pvisor_run(*plan, options=["--workspace", str(space)]), bench.env)

    def podman(space: Path) -> bytes:
        return output_of(bench.podman_run(*plan, options=[f"--volume={space}:/workspace", "--workdir=/workspace"]))

    contenders = {
        "native": native,
        "stage, in process": in_process,
        "pvisor run": command,
        "podman run": podman,
    }
    places = {"native": bench.root / "workspace"}
    other = bench.scratch / "space"
    return interleaved({name: sample(run, places.get(name, other)) for name, run in contenders.items()}, count)


def output_of(argv: Sequence[str], env: dict[str, str] | None = None) -> bytes:
    """Of a process that must succeed."""
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv}: exit code {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout


@contextmanager
def fresh_copy(directory: Path, copy: Path) -> Iterator[Path]:
    """A copy, on the disk before it is used, so that no sample waits for another one's writes."""
    subprocess.run(["cp", "-a", str(directory), str(copy)], check=True)
    os.sync()
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def applies(bench: Bench, files: int, count: int) -> dict[str, Samples]:
    """Seconds of `pvisor stage apply` and `git apply` of the same change to that many files."""
    before, after = bench.scratch / f"a-{files}", bench.scratch / f"b-{files}"
    for directory, fifth in ((before, "line 5"), (after, "line five")):
        for number in range(files):
            path = directory / f"d{number // 100}/f{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"file {number}, line {line}" for line in range(30)]
            lines[5] = f"file {number}, {fifth}"
            path.write_text("\n".join(lines) + "\n")
    patch = bench.scratch / f"{files}.patch"
    done = subprocess.run(["diff", "-ru", before.name, after.name], cwd=bench.scratch, capture_output=True, check=False)
    patch.write_bytes(done.stdout)

    def ours() -> float:
        with fresh_copy(before, bench.scratch / "space") as space:
            kept = {"stage": "bench", "workspace": space, "config": bench.config}
            if stage.run(bench.image, ["python3", "-c", EDIT], **kept).exit_code:  # type: ignore[arg-type]
                raise RuntimeError("the edit failed")
            os.sync()
            seconds = timed([pvisor(), "stage", "apply", "bench"], env=bench.env)
            output_of([pvisor(), "stage", "drop", "bench"], bench.env)
            output_of(["diff", "-r", str(space), str(after)])
            return seconds

    def git() -> float:
        with fresh_copy(before, bench.scratch / "space") as space:
            seconds = timed(["git", "apply", str(patch)], cwd=space)
            output_of(["diff", "-r", str(space), str(after)])
            return seconds

    samples = interleaved({"pvisor stage apply": ours, "git apply": git}, count)
    for directory in (before, after):
        shutil.rmtree(directory)
    return samples


def timed(argv: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> float:
    """Seconds of a process that must succeed."""
    started = time.perf_counter()
    subprocess.run(argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return time.perf_counter() - started


def capacities(bench: Bench, counts: Sequence[int]) -> dict[str, list[Outcome]]:
    """Tasks of 32 MiB each at once under one limit; one round of each contender for each count."""
    task = ("python3", "-c", TASK)
    rounds: dict[str, list[Outcome]] = {"stage, in process": [], "pvisor run": [], "podman run": []}
    for count in counts:
        for name, outcomes in rounds.items():
            group = f"pvisor-bench-{os.getpid()}"
            with limited_cgroup(group, memory_bytes=MEMORY_BYTES, cpus=CPUS) as directories:
                command = {
                    "stage, in process": ["--in-process", bench.image],
                    "pvisor run": bench.pvisor_run(*task, options=["-i"]),
                    "podman run": bench.podman_run(*task, options=["--interactive", f"--cgroup-parent=/{group}"]),
                }[name]
                words = [*command] if name == "stage, in process" else ["--", *command]
                driver = [sys.executable, "-m", "bench.capacity", str(count), *words]
                outcomes.append(run_limited(count, directories, driver, bench.env))
    return rounds


def milliseconds(title: str, rows: dict[str, Samples], base: str) -> None:
    """A table in milliseconds, each row also as a multiple of one of them."""
    show(
        title,
        ["", "n", "P50 ms", "P95 ms", f"/ {base}"],
        [
            [
                name,
                str(len(samples.values)),
                f"{samples.p50 * 1e3:.1f}",
                f"{samples.p95 * 1e3:.1f}",
                f"{samples.p50 / rows[base].p50:.2f}x",
            ]
            for name, samples in rows.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20, help="samples of the shell; the others take a part of it")
    parser.add_argument("--only", choices=PARTS, action="append")
    given = parser.parse_args()
    wanted = given.only or PARTS
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = stack.enter_context(prepared(stack.enter_context(served_debian("python-git", ["git", "python3"]))))
        if "shell" in wanted:
            rows = shells(bench, given.n)
            milliseconds("first output byte of a shell", rows, "podman run")
            results["shell"] = {name: samples.to_json() for name, samples in rows.items()}
        if "repair" in wanted or "floor" in wanted:
            repository = bench.scratch / "repository"
            make_repository(repository, bench.root)
        if "floor" in wanted:
            rows = interleaved(floor.contenders(bench.root, repository, bench.scratch), given.n)
            milliseconds("the least that a stage costs, to the exit", rows, next(iter(rows)))
            results["floor"] = {name: samples.to_json() for name, samples in rows.items()}
        if "repair" in wanted:
            for tests, script in REPAIRS.items():
                rows = repairs(bench, repository, script, given.n)
                milliseconds(f"git status, grep, edit, {tests}, git diff, to the exit", rows, "native")
                results[f"repair, {tests}"] = {name: samples.to_json() for name, samples in rows.items()}
        if "apply" in wanted:
            for files in (10, 1000, 10_000):
                rows = applies(bench, files, max(3, given.n // 5))
                milliseconds(f"a change of {files} files", rows, "git apply")
                results[f"apply {files}"] = {name: samples.to_json() for name, samples in rows.items()}
        if "capacity" in wanted:
            rounds = capacities(bench, (16, 32, 64))
            show(
                f"tasks of 32 MiB at once under {MEMORY_BYTES >> 30} GiB and {CPUS} CPUs: completed / started, seconds",
                ["", "16", "32", "64"],
                [
                    [name, *(f"{one.completed}/{one.started} {one.seconds:.1f}" for one in outcomes)]
                    for name, outcomes in rounds.items()
                ],
            )
            results["capacity"] = {name: [asdict(one) for one in outcomes] for name, outcomes in rounds.items()}
    write("stage", results)


if __name__ == "__main__":
    main()
