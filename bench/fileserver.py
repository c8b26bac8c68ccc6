"""The files of a directory over HTTP/1.1 with kept connections, for what peers download."""

from __future__ import annotations

import contextlib
import functools
import http.server
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@contextlib.contextmanager
def run_file_server(directory: Path) -> Iterator[str]:
    """In a process of its own; yields HOST:PORT."""
    argv = [sys.executable, "-m", "bench.fileserver", str(directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def main() -> None:
    handler = functools.partial(_Handler, directory=sys.argv[1])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        print(f"127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
