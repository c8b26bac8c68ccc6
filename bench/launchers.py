"""How long until the first output byte of a prepared root: our launcher beside bubblewrap, crun and runc.

All start `echo` in the same busybox root, in new mount, pid, ipc, uts and network namespaces. Ours also makes the
overlay of a stage and removes it; the others have none, and bubblewrap neither limits nor a terminal of its own. A
launcher that is not installed, or refuses this host, is named. Samples are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import Samples, show, time_first_byte, write
from stage.boundary import launch, seccomp
from stage.boundary.process import ProcessSpec
from stage.boundary.streams import Streams
from stage.kept.cgroups import Limits
from stage.kept.stages import Stages
from tests.support.busybox import busybox_root

WORDS = ("echo", "ready")
ENV = {"PATH": "/bin"}


def in_process(lower: Path, stages: Path, limits: Limits) -> float:
    """Seconds from the call in this process to the first byte."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    seen: list[float] = []
    started = time.perf_counter()

    def watch() -> None:
        os.read(reader, 64)
        seen.append(time.perf_counter() - started)

    thread = threading.Thread(target=watch)
    thread.start()
    with Stages(stages).temporary(image="bench") as stage:
        streams = Streams(stdout=writer, stderr=2)
        launch.run(lower, ProcessSpec(argv=WORDS, env=ENV), stage, streams=streams, limits=limits)
    os.close(writer)
    thread.join()
    os.close(reader)
    return seen[0]


def bundle(directory: Path, lower: Path) -> Path:
    """What runc and crun start: their own default configuration, with this root and command."""
    directory.mkdir()
    subprocess.run(["runc", "spec", "--bundle", str(directory)], check=True)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["process"].update(terminal=False, args=list(WORDS), env=["PATH=/bin"])
    config["process"].pop("rlimits", None)  # raising them is not allowed everywhere
    config["root"] = {"path": str(lower), "readonly": False}
    path.write_text(json.dumps(config))
    return directory


def bubblewrap(lower: Path, filter_file: Path) -> list[str]:
    script = f'exec bwrap --unshare-all --bind {lower} / --proc /proc --dev /dev --seccomp 9 -- "$@" 9< {filter_file}'
    return ["sh", "-c", script, "sh", "/bin/echo", "ready"]


def launchers(scratch: Path, lower: Path) -> dict[str, Callable[[], float]]:
    (scratch / "filter").write_bytes(seccomp.program())
    limits = Limits(memory_bytes=256 << 20, cpus=1, pids=100)
    found: dict[str, Callable[[], float]] = {
        "fork + exec": lambda: time_first_byte([str(lower / "bin/busybox"), *WORDS]).ready_s,
        "stage": lambda: in_process(lower, scratch / "stages", Limits()),
        "stage, three limits": lambda: in_process(lower, scratch / "stages", limits),
    }
    if shutil.which("bwrap"):
        found["bubblewrap"] = lambda: time_first_byte(bubblewrap(lower, scratch / "filter")).ready_s
    if shutil.which("runc"):
        where = bundle(scratch / "bundle", lower)
        for name in filter(shutil.which, ("runc", "crun")):

            def start(name: str = name) -> float:
                command = [name, "run", "--bundle", str(where), f"bench-{os.getpid()}"]
                return time_first_byte(command, env={**os.environ, "XDG_RUNTIME_DIR": str(scratch)}).ready_s

            found[name] = start
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=30, help="samples of each launcher")
    count = parser.parse_args().n
    refusals: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-launchers-") as name:
        scratch = Path(name)
        starts = launchers(scratch, busybox_root(scratch / "lower"))
        for launcher in ("bwrap", "runc", "crun"):
            if shutil.which(launcher) is None:
                refusals[launcher] = "not installed"
        samples = {launcher: Samples() for launcher in starts}
        for number in range(count + 1):
            for launcher, start in starts.items():
                if launcher in refusals:
                    continue
                try:
                    value = start() * 1000
                except RuntimeError as error:
                    refusals[launcher] = str(error).rpartition("exit code ")[2].strip()
                    continue
                if number:  # the first of each fills caches
                    samples[launcher].add(value)
    measured = {launcher: found for launcher, found in samples.items() if found.values}
    rows = [[launcher, str(len(s.values)), f"{s.p50:.1f}", f"{s.p95:.1f}"] for launcher, s in measured.items()]
    show("First output byte of a prepared root, ms", ["launcher", "n", "P50", "P95"], rows)
    for launcher, reason in refusals.items():
        print(f"{launcher}: {reason}")
    results = {launcher: found.to_json() for launcher, found in measured.items()}
    write("launchers", {"first_output_ms": results, "refused": refusals})


if __name__ == "__main__":
    main()
