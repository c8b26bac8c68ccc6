"""The process of a collection that `pvisor serve` does on the store of its own host: `python -m cli.gcjob --store DIR`.

As `imaged.jobs.job_worker --gc`, and what stages and virtual machines of this host stand on is kept, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from imaged.config import Config
from imaged.errors import PvisorError
from imaged.ids import ChunkId
from imaged.jobs.job_worker import answer, report_collection
from stage.kept.stages import Stages
from vmm.kept import kept_images, kept_snapshots


def main() -> int:
    parser = argparse.ArgumentParser(prog="cli.gcjob")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--gc", action="store_true")
    options = parser.parse_args()
    config = Config.resolve()
    return answer(
        lambda: report_collection(options.store, lambda: _images(config), lambda: set(kept_snapshots(config)))
    )


def _images(config: Config) -> set[ChunkId]:
    """PvisorError when a stage does not say which image it stands on."""
    stages = Stages(config.stages)
    damaged = stages.damaged()
    if damaged:
        hint = f"`pvisor stage drop {damaged[0]}`, or restore its stage.json"
        raise PvisorError(f"stage {damaged[0]!r} does not say which image it stands on", hint=hint)
    return {ChunkId.parse(stage.image) for stage in stages.list()} | kept_images(config)


if __name__ == "__main__":
    sys.exit(main())
