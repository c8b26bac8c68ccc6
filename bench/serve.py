"""Chunks and batches of chunks from `pvisor serve`, beside nginx that sends the same bytes from files, in one run.

One file a chunk, and one file a batch, for nginx; both servers get the same paths or the same number of requests from
wrk with kept connections, at 1, 16 and 128 clients, in turn. All bytes are in the page cache. CPU seconds are those of
the server's processes, from /proc: per gigabyte they depend little on what else the machine does, throughput does.

Two things besides the servers decide what a batch costs, so it is measured three ways.
As written: the kernel caches a file in pieces about as large as it was written in, and passes on piece after piece. A
pack is written a frame at a time, nginx's files here in one write each, so its pieces are the larger ones.
Read again: all files have left the page cache and come back from the disk, as after a restart, in the pieces of its
read-ahead.
By ranges: a batch whose chunks lie scattered is, for nginx, one file in which they do not, which somebody would have to
have written for just this batch. Here nginx gets the same 64 ranges of the same pack in one request (RFC 9110, 14.2).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import Samples, show, write
from bench.image import pvisor, pvisor_env
from bench.wrk import RequestFile, get, post
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from tests.support.ports import free_port

CLIENTS = (1, 16, 128)
CHUNKS, CHUNK_BYTES, BATCH = 4096, 65536, 64
_TICKS = os.sysconf("SC_CLK_TCK")
_NGINX = """
daemon off; worker_processes {workers}; pid {root}/pid; error_log {root}/error.log crit;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_requests 1000000000; keepalive_timeout 300s;
  open_file_cache max=20000 inactive=300s; open_file_cache_valid 300s; default_type application/vnd.pvisor.frame;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  server {{ listen 127.0.0.1:{port} backlog=1024; root {root}/files; }}
}}
"""


def fill(store: Path) -> list[ChunkId]:
    """Chunks of 64 KiB of which half is noise: they compress to half, as files do. In the order of their packs."""
    source = random.Random(1)
    with ChunkStore.open(store) as opened:
        chunks = [opened.put(source.randbytes(CHUNK_BYTES // 2) + bytes(CHUNK_BYTES // 2)) for _ in range(CHUNKS)]
        opened.flush()
        place = {chunk: opened.index.find(chunk) for chunk in chunks}
    return sorted(chunks, key=lambda chunk: place[chunk] or ())


def batches(chunks: list[ChunkId], order: str) -> list[list[ChunkId]]:
    """All chunks in batches: as they lie in the packs, as a fill reads them; or each batch at random."""
    if order == "scattered":
        chunks = random.Random(2).sample(chunks, len(chunks))
    return [chunks[start : start + BATCH] for start in range(0, len(chunks), BATCH)]


def by_ranges(store: Path, root: Path, chunks: list[list[ChunkId]]) -> list[bytes]:
    """Requests to nginx for these batches, from where they lie in the pack."""
    (pack,) = (store / "packs").glob("*.pack")
    os.link(pack, root / "files/pack")
    requests = []
    with ChunkStore.open(store, readonly=True) as opened:
        for batch in chunks:
            places = [place for place in opened.index.find_many(batch) if place is not None]
            ranges = ",".join(f"{place.offset}-{place.offset + place.stored_bytes - 1}" for place in places)
            requests.append(get("/pack", f"Range: bytes={ranges}\r\n"))
    return requests


def read_again(*directories: Path) -> None:
    """Every file leaves the page cache, and is read from the disk."""
    for path in (path for directory in directories for path in directory.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass


def write_files(store: Path, root: Path, chunks: list[ChunkId]) -> None:
    """The same bytes for nginx."""
    (root / "files/v1/chunks").mkdir(parents=True)
    with ChunkStore.open(store, readonly=True) as opened:
        for chunk, frame in zip(chunks, opened.frames(chunks), strict=True):
            (root / f"files/v1/chunks/{chunk}").write_bytes(frame.pack())
        for order in ("in order", "scattered"):
            directory = root / "files" / order.replace(" ", "-")
            directory.mkdir()
            for number, batch in enumerate(batches(chunks, order)):
                (directory / str(number)).write_bytes(b"".join(frame.pack() for frame in opened.frames(batch)))


@dataclass(frozen=True, slots=True)
class Server:
    """One that is compared: where it is, and its processes."""

    url: str
    pid: int

    def pids(self) -> list[int]:
        found, wanted = [], [self.pid]
        while wanted:
            pid = wanted.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                wanted += map(int, (task / "children").read_text().split())
        return found

    def cpu_s(self) -> float:
        """User and system time of all its processes, and of children that are gone."""
        ticks = 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        return ticks / _TICKS

    def resident_bytes(self) -> int:
        """Of all its processes, what they share counted once (their proportional set size)."""
        total = 0
        for pid in self.pids():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        return total


@contextlib.contextmanager
def nginx(root: Path, workers: int) -> Iterator[Server]:
    port = free_port()
    config = root / f"nginx-{workers}.conf"
    config.write_text(_NGINX.format(root=root, port=port, workers=workers))
    with subprocess.Popen(["nginx", "-p", str(root), "-c", str(config)], stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(1.0)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def served(store: Path, scratch: Path, workers: int) -> Iterator[Server]:
    argv = [pvisor(), "serve", "--listen", "127.0.0.1:0", "--store", str(store), f"--workers={workers}"]
    with subprocess.Popen(argv, env=pvisor_env(scratch), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(process.stdout.readline().split()[-1], process.pid)
        finally:
            process.terminate()
            process.wait(20)


@dataclass(slots=True)
class Measured:
    """One contender with one kind of request and one number of clients."""

    bytes_per_s: Samples = field(default_factory=Samples)
    requests_per_s: Samples = field(default_factory=Samples)
    cpu_s_per_gb: Samples = field(default_factory=Samples)
    p50_s: Samples = field(default_factory=Samples)
    p95_s: Samples = field(default_factory=Samples)
    p99_s: Samples = field(default_factory=Samples)
    resident_bytes: Samples = field(default_factory=Samples)

    def add(self, server: Server, requests: RequestFile, clients: int, seconds: int) -> None:
        before = server.cpu_s()
        load = requests.run(server.url, clients=clients, seconds=seconds)
        self.cpu_s_per_gb.add((server.cpu_s() - before) / (load.bytes / 1e9))
        self.bytes_per_s.add(load.bytes_per_s)
        self.requests_per_s.add(load.requests_per_s)
        self.p50_s.add(load.p50_s)
        self.p95_s.add(load.p95_s)
        self.p99_s.add(load.p99_s)
        self.resident_bytes.add(server.resident_bytes())

    def row(self, name: str, peer: Measured) -> list[str]:
        return [
            name,
            f"{self.requests_per_s.p50:.0f}",
            f"{self.bytes_per_s.p50 / 1e6:.0f}",
            f"{self.p50_s.p50 * 1e3:.2f}",
            f"{self.p95_s.p50 * 1e3:.2f}",
            f"{self.p99_s.p50 * 1e3:.2f}",
            f"{self.p99_s.p50 / peer.p99_s.p50:.1f}x",
            f"{self.cpu_s_per_gb.p50:.2f}",
            f"{peer.cpu_s_per_gb.p50 / self.cpu_s_per_gb.p50:.2f}x",
            f"{self.resident_bytes.percentile(100) / 1e6:.0f}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).to_json() for name in self.__slots__}


HEADER = ["contender", "req/s", "MB/s", "P50 ms", "P95 ms", "P99 ms", "of nginx", "CPU s/GB", "per core", "MB"]


def compare(scratch: Path, count: int, seconds: int, workers: int) -> dict[str, Any]:
    store, root = scratch / "store", scratch / "nginx"
    root.mkdir()
    chunks = fill(store)
    write_files(store, root, chunks)
    order = random.Random(3).sample(chunks, len(chunks))
    single = RequestFile(scratch, "single", [get(f"/v1/chunks/{chunk}") for chunk in order])
    posts, gets = {}, {}
    for name in ("in order", "scattered"):
        bodies = [b"".join(batch) for batch in batches(chunks, name)]
        posts[name] = RequestFile(scratch, f"{name} pvisor", [post("/v1/chunks/batch", body) for body in bodies])
        paths = [f"/{name.replace(' ', '-')}/{number}" for number in range(len(bodies))]
        gets[name] = RequestFile(scratch, f"{name} nginx", [get(path) for path in paths])
    ranges = RequestFile(scratch, "ranges", by_ranges(store, root, batches(chunks, "scattered")))
    strict = {f"batches of {BATCH}, {name}": {"pvisor": posts[name], "nginx": gets[name]} for name in posts}
    others = {
        f"batches of {BATCH}, scattered, by ranges": {"pvisor": posts["scattered"], "nginx": ranges},
        "single chunks": {"pvisor": single, "nginx": single},
    }
    document: dict[str, Any] = {}
    with nginx(root, workers) as peer, served(store, scratch, workers) as ours:
        servers = {"pvisor": ours, "nginx": peer}
        for kind, requests in strict.items():
            document |= measure(f"{kind}, as written", servers, requests, count, seconds, workers)
        read_again(store / "packs", root / "files")
        for kind, requests in (strict | others).items():
            document |= measure(kind, servers, requests, count, seconds, workers)
    return document


def measure(
    kind: str, servers: dict[str, Server], requests: dict[str, RequestFile], count: int, seconds: int, workers: int
) -> dict[str, Any]:
    """One kind of request, from few and from many clients."""
    document: dict[str, Any] = {}
    for clients in CLIENTS:
        found = {name: Measured() for name in servers}
        for _ in range(count):
            for name, server in servers.items():
                found[name].add(server, requests[name], clients, seconds)
        title = f"{kind}, {clients} clients, {workers} workers, n = {count} runs of {seconds} s"
        show(title, HEADER, [measured.row(name, found["nginx"]) for name, measured in found.items()])
        document[f"{kind}, {clients} clients"] = {name: each.to_json() for name, each in found.items()}
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    document = {}
    for workers in options.workers:
        with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory:
            Path(directory).chmod(0o755)  # nginx reads as a user of its own
            document[f"{workers} workers"] = compare(Path(directory), options.n, options.seconds, workers)
    write("serve", {"chunks": CHUNKS, "batch": BATCH, **document})


if __name__ == "__main__":
    main()
