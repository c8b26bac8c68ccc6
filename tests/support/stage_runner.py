"""A caller of the stage package in its own process: `python -m tests.support.stage_runner OPTIONS -- CMD ARG...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from imaged.errors import PvisorError
from stage.boundary import launch
from stage.boundary.process import resolve
from stage.errors import SETUP_FAILED
from stage.kept.cgroups import Limits
from stage.kept.stages import Stages


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lower", type=Path, required=True)
    parser.add_argument("--stages", type=Path, required=True)
    parser.add_argument("--stage")
    parser.add_argument("--join")
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--net", choices=["none", "host"], default="none")
    parser.add_argument("-e", action="append", default=[])
    parser.add_argument("-u")
    parser.add_argument("-w")
    parser.add_argument("-i", action="store_true")
    parser.add_argument("-t", action="store_true")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--cpus", type=float)
    parser.add_argument("--pids", type=int)
    parser.add_argument("command", nargs="*")
    given = parser.parse_args()
    stages = Stages(given.stages)
    try:
        spec = resolve({}, args=given.command, env=given.e, user=given.u, workdir=given.w, tty=given.t)
        if given.join:
            running = stages.running(given.join)
            assert running is not None, f"stage {given.join} does not run"
            return launch.join(running, given.stages / given.join, spec, interactive=given.i, tty=given.t)
        if given.stage:
            held = stages.use(given.stage, image="image", workspace=given.workspace)
        else:
            held = stages.temporary(image="image", workspace=given.workspace)
        with held as stage:
            limits = Limits(memory_bytes=given.memory, cpus=given.cpus, pids=given.pids)
            return launch.run(given.lower, spec, stage, net=given.net, interactive=given.i, tty=given.t, limits=limits)
    except PvisorError as error:
        print(f"{error.message} ({error.hint})", file=sys.stderr)
        return int(getattr(error, "exit_code", SETUP_FAILED))


if __name__ == "__main__":
    sys.exit(main())
