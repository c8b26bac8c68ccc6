"""A real chunk server in a process of its own, on a free loopback port."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from imaged.serving.serveconfig import ServeOptions

ROOT = Path(__file__).parents[2]
_MAIN = """
import sys
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.server import serve
announce = lambda url: print(url, flush=True)
serve(ServeOptions.parse(sys.argv[1]), announce=announce)
"""


@dataclass(frozen=True, slots=True)
class ChunkServer:
    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server and return its exit status."""
        self.process.send_signal(number)
        return self.process.wait(20)


@contextlib.contextmanager
def chunk_server(
    store: Path,
    *,
    port: int = 0,
    environ: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
    **options: Any,
) -> Iterator[ChunkServer]:
    """Serves `store` until the end of the block; ready when entered. `options` are further ones of ServeOptions."""
    wanted = ServeOptions(store=str(store), port=port, **options)
    command = [sys.executable, "-c", _MAIN, wanted.to_json()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, env={**os.environ, **(environ or {})}
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, f"the server ended with status {process.wait(10)}"
        yield ChunkServer(url, process)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ask(
    server: ChunkServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()
