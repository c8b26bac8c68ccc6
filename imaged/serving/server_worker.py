"""One of several serving processes: `python -m imaged.serving.server_worker`, started by `imaged.serving.supervisor`.

Its options are a JSON line on stdin: {"listener": descriptor, "options": ServeOptions}. It says {"ready": true} on
stdout once it answers, or {"error", "hint"}, and ends when its stdin does: then the supervisor is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
from typing import Any

from imaged.errors import PvisorError
from imaged.serving.logformat import configure
from imaged.serving.metrics import MULTIPROCESS
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.server import serve_on


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _end_with_parent(orphaned: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    given = json.loads(sys.stdin.buffer.readline())
    options = ServeOptions.parse(given["options"])
    configure(options)
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
            shutil.rmtree(os.environ[MULTIPROCESS], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
