"""The process of a collection that `pvisor serve` does on the store of its own host: `python -m cli.gcjob --store DIR`.

As `imaged.jobs.job_worker --gc`, and what stages and virtual machines of this host stand on is kept, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cli.garbage import Users
from imaged.config import Config
from imaged.jobs.job_worker import answer, report_collection


def main() -> int:
    parser = argparse.ArgumentParser(prog="cli.gcjob")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--gc", action="store_true")
    options = parser.parse_args()
    users = Users(Config.resolve())
    return answer(lambda: report_collection(options.store, users.images, users.snapshots))


if __name__ == "__main__":
    sys.exit(main())
