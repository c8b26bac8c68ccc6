"""The process of one job.

    python -m imaged.jobs.job_worker --store DIR [--name N] [--platform P] [--namespace NS] SOURCE
    python -m imaged.jobs.job_worker --store DIR --gc

Reports to its parent (`imaged.jobs.jobprocess`) in JSON lines on stdout: {"step", "done_bytes", "total_bytes"} a few
times a second, then one {"image": {"name", "id", "warnings"}}, {"report"} or {"error", "hint"}. Ends when its stdin
does: then the parent is gone.
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
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import tenant_view
from imaged.collection.collect import collect
from imaged.conversion.convert import convert
from imaged.errors import PvisorError
from imaged.ids import ChunkId
from imaged.loglines import LineFormatter
from imaged.names import ImageName, SourceName

_INTERVAL_S = 0.2
_WARNINGS = 1000


_writing = threading.Lock()


class _Reporter:
    """Progress as JSON lines, told by a thread of its own: also what was done just before work came to a halt."""

    def __init__(self) -> None:
        self._now: tuple[str, int, int | None] = ("", 0, None)
        self._told: tuple[str, int, int | None] = self._now
        threading.Thread(target=self._tell, daemon=True).start()

    def start(self, step: str, total_bytes: int | None) -> None:
        self._now = (step, 0, total_bytes)

    def advance(self, byte_count: int) -> None:
        step, done_bytes, total_bytes = self._now
        self._now = (step, done_bytes + byte_count, total_bytes)

    def _tell(self) -> None:
        while True:
            if self._now != self._told:
                self._told = step, done_bytes, total_bytes = self._now
                write_line({"step": step, "done_bytes": done_bytes, "total_bytes": total_bytes})
            time.sleep(_INTERVAL_S)


def write_line(document: dict[str, Any]) -> None:
    with _writing:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()


def _end_with_parent() -> None:
    """SIGTERM to ourselves at the end of stdin, which the parent keeps open as long as it lives."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def answer(work: Callable[[], dict[str, Any]]) -> int:
    """Do the work and tell the parent what it came to; the exit status. Ends when the parent does."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        write_line(work())
    except PvisorError as error:
        write_line({"error": error.message, "hint": error.hint})
        return 1
    return 0


def report_collection(
    store: Path, keep: Callable[[], Iterable[ChunkId]] = tuple, keep_snapshots: Callable[[], Iterable[ChunkId]] = tuple
) -> dict[str, Any]:
    """Collect, and the report for `answer`; `keep` and `keep_snapshots` as `imaged.collection.collect` takes them."""
    _Reporter().start("collecting", None)
    return {"report": asdict(collect(store, keep=keep, keep_snapshots=keep_snapshots))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="imaged.jobs.job_worker")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--gc", action="store_true")
    parser.add_argument("--name")
    parser.add_argument("--platform")
    parser.add_argument("--namespace")
    parser.add_argument("source", nargs="?")
    options = parser.parse_args()
    return answer(lambda: report_collection(options.store) if options.gc else _convert(options))


def _convert(options: argparse.Namespace) -> dict[str, Any]:
    source = SourceName.parse(options.source)
    name = ImageName.parse(options.name) if options.name else None
    with ChunkStore.open(options.store) as store:
        seen = tenant_view(store, options.namespace)
        converted = convert(seen, source, name=name, platform=options.platform, progress=_Reporter())
    warnings = [str(warning) for warning in converted.warnings[:_WARNINGS]]
    return {"image": {"name": str(converted.name), "id": str(converted.id), "warnings": warnings}}


if __name__ == "__main__":
    sys.exit(main())
