"""wrk as the load generator: the same requests, from the same program, to every server that is compared."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """
local file = assert(io.open(os.getenv("PVISOR_WRK_REQUESTS"), "rb"))
local requests = {}
while true do
  local length = file:read(8)
  if not length then break end
  requests[#requests + 1] = file:read(tonumber(length))
end
local number = 0
function setup(thread) thread:set("at", number); number = number + 1 end
function init() at = at * 7919 end
function request() at = at + 1; return requests[at % #requests + 1] end
function done(summary, latency)
  io.stderr:write(string.format(
    '{"requests":%d,"duration_us":%d,"bytes":%d,"p50_us":%d,"p95_us":%d,"p99_us":%d,"errors":%d}\\n',
    summary.requests, summary.duration, summary.bytes,
    latency:percentile(50), latency:percentile(95), latency:percentile(99),
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.status
      + summary.errors.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What wrk saw: answers a second, bytes a second, and latencies of single requests in seconds."""

    requests: int
    bytes: int
    wall_s: float
    p50_s: float
    p95_s: float
    p99_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.wall_s


class RequestFile:
    """Whole HTTP requests that wrk sends in turn, each connection at its own pace."""

    def __init__(self, directory: Path, name: str, requests: Sequence[bytes]) -> None:
        self._path, self._script = directory / f"{name}.requests", directory / "wrk.lua"
        self._path.write_bytes(b"".join(b"%08d" % len(request) + request for request in requests))
        self._script.write_text(_SCRIPT)

    def run(self, url: str, *, clients: int, seconds: int) -> Load:
        """RuntimeError when an answer is not 2xx, or a connection breaks."""
        threads = 1 if clients == 1 else 2
        argv = ["wrk", f"-t{threads}", f"-c{clients}", f"-d{seconds}s", "--timeout=30s", "-s", str(self._script), url]
        done = subprocess.run(
            argv, env={"PVISOR_WRK_REQUESTS": str(self._path)}, capture_output=True, text=True, check=True
        )
        found = json.loads(done.stderr.strip().splitlines()[-1])
        if found["errors"] or not found["requests"]:
            raise RuntimeError(f"{url}: {found['errors']} errors in {found['requests']} requests: {done.stdout[-800:]}")
        return Load(
            found["requests"],
            found["bytes"],
            found["duration_us"] / 1e6,
            found["p50_us"] / 1e6,
            found["p95_us"] / 1e6,
            found["p99_us"] / 1e6,
        )


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n{headers}\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(body)}"
    )
    return f"{head}\r\n\r\n".encode() + body
