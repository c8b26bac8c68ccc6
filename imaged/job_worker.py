"""The process of one conversion: `python -m imaged.job_worker --store DIR SOURCE [--name N] [--platform P]`.

Reports to its parent (`imaged.jobs`) in JSON lines on stdout: {"step", "done_bytes", "total_bytes"} a few times a
second, then one {"image": {"name", "id", "warnings"}} or {"error", "hint"}. Ends when its stdin does: then the parent
is gone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from imaged.convert import convert
from imaged.errors import PvisorError
from imaged.names import ImageName, SourceName
from imaged.store import ChunkStore

_INTERVAL_S = 0.2
_WARNINGS = 1000


class _Reporter:
    """Progress as JSON lines."""

    def __init__(self) -> None:
        self._step = ""
        self._done_bytes = 0
        self._total_bytes: int | None = None
        self._due = 0.0

    def start(self, step: str, total_bytes: int | None) -> None:
        self._step, self._done_bytes, self._total_bytes = step, 0, total_bytes
        self._report()

    def advance(self, byte_count: int) -> None:
        self._done_bytes += byte_count
        if time.monotonic() >= self._due:
            self._report()

    def _report(self) -> None:
        self._due = time.monotonic() + _INTERVAL_S
        write_line({"step": self._step, "done_bytes": self._done_bytes, "total_bytes": self._total_bytes})


def write_line(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """SIGTERM to ourselves at the end of stdin, which the parent keeps open as long as it lives."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(prog="imaged.job_worker")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--name")
    parser.add_argument("--platform")
    parser.add_argument("source")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        source = SourceName.parse(options.source)
        name = ImageName.parse(options.name) if options.name else None
        with ChunkStore.open(options.store) as store:
            converted = convert(store, source, name=name, platform=options.platform, progress=_Reporter())
        warnings = [str(warning) for warning in converted.warnings[:_WARNINGS]]
        write_line({"image": {"name": str(converted.name), "id": str(converted.id), "warnings": warnings}})
    except PvisorError as error:
        write_line({"error": error.message, "hint": error.hint})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
