"""One of several serving processes: `python -m imaged.serving.server_worker`, started by `imaged.serving.supervisor`.

Its options are a JSON line on stdin: {"listener": descriptor, "options": ServeOptions}. It says {"ready": true} on
stdout once it answers, or {"error", "hint"}, and ends when its stdin does: then the supervisor is gone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from imaged.errors import PvisorError
from imaged.serving import metricsfiles

log = logging.getLogger(__name__)


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _end_with_parent(orphaned: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _count_together(directory: Path) -> OSError | None:
    """Before prometheus_client is imported: it looks then whether it is to. The error for which it is not."""
    try:
        metricsfiles.reserve(directory)
    except OSError as error:
        del os.environ[metricsfiles.MULTIPROCESS]
        return error
    return None


def main() -> int:
    given = json.loads(sys.stdin.buffer.readline())
    metrics = Path(os.environ[metricsfiles.MULTIPROCESS])
    alone = _count_together(metrics)
    from imaged.serving.logformat import configure
    from imaged.serving.serveconfig import ServeOptions
    from imaged.serving.server import serve_on

    options = ServeOptions.parse(given["options"])
    configure(options)
    if alone is not None:
        log.error("metrics of this process are its own: no room in %s: %s", metrics, alone.strerror)
    orphaned = threading.Event()
    threading.Thread(target=_end_with_parent, args=(orphaned,), daemon=True).start()
    try:
        with socket.socket(fileno=given["listener"]) as listener:
            serve_on(listener, options, announce=lambda: _say({"ready": True}))
    except PvisorError as error:
        _say({"error": error.message, "hint": error.hint})
        return 1
    finally:
        if orphaned.is_set():  # nobody else is left to do it
            shutil.rmtree(metrics, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
