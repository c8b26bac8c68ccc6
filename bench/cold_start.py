"""Cold starts beside podman, a whole download and casync, over three links, to the first output byte.

Every contender reaches its origin through one proxy (bench/proxy.py), which delays, paces and counts. Each sample
begins with a fresh state and, for pVisor, a fresh node daemon, started before the clock except in the row that says
otherwise. Contenders take turns within each round. Requests and bytes of a cold start are counted until nothing passes
any more, so all of a prefetch counts, also what comes after the process is up. Then: eight starts at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import several
from bench.common import Samples, show, write
from bench.contenders import (
    CACHED,
    CASYNC,
    DAEMON_INSIDE,
    DOWNLOAD,
    PODMAN,
    PODMAN_WARM,
    WARM,
    WITH_PROFILE,
    WITHOUT_PROFILE,
    Cached,
    Casync,
    Cold,
    Contender,
    PodmanPull,
    Profiles,
    Sample,
    WholeFile,
)
from bench.fileserver import run_file_server
from bench.image import pvisor, pvisor_env
from bench.plot import publish
from bench.proxy import LINKS, Link, run_proxy
from bench.workloads import MINBASE, SHELL, WORKLOADS, Image, Workload
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.serving.denser import densify
from scripts.debian import CACHE, TAG
from tests.support.ports import free_port
from tests.support.registry import run_registry

ROWS = (WARM, CACHED, WITH_PROFILE, DAEMON_INSIDE, WITHOUT_PROFILE, DOWNLOAD, PODMAN, PODMAN_WARM, CASYNC)
IMAGES = tuple(dict.fromkeys(workload.image for workload in WORKLOADS))
_REFUSED = "PUT /v1/profiles"
"""A start would leave its profile at the server, and the next one would be another contender."""

_AT_ONCE_ROUNDS = 5
_ALONE = "BENCH_COLD_START_PARENT"


@dataclass(slots=True)
class Cell:
    """All samples of one row, workload and link."""

    ready: Samples
    requests: Samples
    wire_bytes: Samples

    def to_json(self) -> dict[str, Any]:
        return {
            "ready_s": self.ready.to_json(),
            "requests": self.requests.to_json(),
            "wire_bytes": self.wire_bytes.to_json(),
        }


class Table:
    """Cells by workload, link and row, in that order."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str, str], Cell] = {}

    def add(self, link: Link, sample: Sample) -> None:
        key = (sample.workload, link.name, sample.row)
        cell = self.cells.setdefault(key, Cell(Samples(), Samples(), Samples()))
        cell.ready.add(sample.ready_s)
        cell.requests.add(sample.counted.requests)
        cell.wire_bytes.add(sample.counted.wire_bytes)

    def get(self, workload: str, link: str, row: str) -> Cell | None:
        return self.cells.get((workload, link, row))

    def rows(self, workload: str) -> Iterator[tuple[str, str, Cell]]:
        """(link, row, cell) in the order of a table."""
        for link in LINKS:
            for row in ROWS:
                cell = self.get(workload, link.name, row)
                if cell is not None:
                    yield link.name, row, cell


@contextmanager
def serve(store: Path, scratch: Path) -> Iterator[str]:
    """A chunk server of that store; HOST:PORT."""
    address = f"127.0.0.1:{free_port()}"
    argv = [pvisor(), "serve", "--listen", address, "--store", str(store)]
    with subprocess.Popen(argv, env=pvisor_env(scratch), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()  # announced: it accepts requests
            yield address
        finally:
            server.terminate()
            server.wait(timeout=20)


def convert(home: Path, images: Sequence[Image]) -> Path:
    """All images in one store; where that is."""
    env = pvisor_env(home)
    for image in images:
        argv = [pvisor(), "convert", f"oci:{image.layout()}:{TAG}", "--name", image.name]
        subprocess.run(argv, env=env, check=True, capture_output=True)
    return Config.resolve(environ=env).store


def files_for_peers(store_home: Path, directory: Path, *, casync: bool) -> None:
    """What peers download: each image as an EROFS file in zstd (made once, kept in .demo/), and minbase for casync."""
    env = pvisor_env(store_home)
    for image in IMAGES:
        packed = CACHE / f"{image.name}.erofs.zst"
        if not packed.exists():
            plain = directory / image.name
            subprocess.run([pvisor(), "image", "export", image.name, str(plain)], env=env, check=True)
            subprocess.run(["zstd", "-q", "-19", "-T0", str(plain), "-o", f"{packed}.part"], check=True)
            Path(f"{packed}.part").rename(packed)
            plain.unlink()
        (directory / packed.name).symlink_to(packed)
    if casync:
        kept, root = CACHE / "casync", directory / "root"
        if not kept.exists():
            subprocess.run([pvisor(), "image", "export", MINBASE.name, f"{root}/"], env=env, check=True)
            fresh = CACHE / "casync.part"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            argv = ["casync", "make", "--with=unix", f"--store={fresh / MINBASE.name}.castr"]
            subprocess.run([*argv, f"{fresh / MINBASE.name}.caidx", str(root)], check=True, capture_output=True)
            fresh.rename(kept)
            shutil.rmtree(root)
        for path in kept.iterdir():
            (directory / path.name).symlink_to(path)


@dataclass(frozen=True, slots=True)
class Turn:
    """A contender's place in a round: over which links, with which workloads, and in how many rounds at most."""

    contender: Contender
    links: Sequence[Link] = LINKS
    workloads: Sequence[Workload] = WORKLOADS
    rounds: int | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that runs while samples are taken."""

    turns: tuple[Turn, ...]
    several: several.Several


@contextmanager
def prepared(scratch: Path, *, casync_count: int) -> Iterator[Bench]:
    """Origins, proxy and contenders."""
    with ExitStack() as stack:
        more = several.images()
        convert(scratch / "plain", (*IMAGES, *more))
        shutil.copytree(scratch / "plain", scratch / "profiled", symlinks=True)
        served = scratch / "served"
        served.mkdir()
        files_for_peers(scratch / "plain", served, casync=casync_count > 0)
        plain, profiled = (Config.resolve(environ=pvisor_env(scratch / name)).store for name in ("plain", "profiled"))
        registry = stack.enter_context(run_registry())
        for image in IMAGES:
            registry.push(f"oci:{image.layout()}:{TAG}", f"{image.name}:latest")
        files = stack.enter_context(run_file_server(served))
        servers = [stack.enter_context(serve(store, scratch)) for store in (plain, profiled)]
        store = stack.enter_context(ChunkStore.open(profiled))
        pairs = [
            *((workload.image, workload) for workload in WORKLOADS),
            *((image, several.WORKLOAD) for image in more),
        ]
        profiles = Profiles.train(store, servers[1], pairs, scratch)
        # The server does this by itself, in the background.
        densify(store, profiles.chunks())
        proxy = stack.enter_context(run_proxy([registry.address, files, *servers], refuse=_REFUSED))
        at_registry, at_files, at_plain, at_profiled = proxy.addresses
        cached = Cached(scratch / "cached", proxy, at_profiled)
        proxy.use(LINKS[0])
        cached.prepare(IMAGES)
        podman = PodmanPull(scratch, proxy, at_registry)
        stack.callback(podman.close)
        turns = (
            Turn(Cold(scratch, proxy, at_profiled, profiles)),
            Turn(Cold(scratch, proxy, at_plain, None)),
            Turn(Cold(scratch, proxy, at_profiled, profiles, daemon_inside=True), workloads=(SHELL,)),
            Turn(cached, links=LINKS[:1]),
            Turn(WholeFile(scratch, proxy, at_files)),
            Turn(podman),
            # Half a minute a shell.
            Turn(Casync(scratch, proxy, at_files), links=LINKS[:1], workloads=(SHELL,), rounds=casync_count),
        )
        eight = several.Several(scratch, proxy, at_profiled, profiles, more, at_registry)
        yield Bench(turns, eight)


def measure(bench: Bench, count: int, links: Sequence[Link], workloads: Sequence[Workload]) -> Table:
    """Rounds over links, images and contenders, of which another one begins each time."""
    table = Table()
    started = time.monotonic()
    for number in range(count):
        for link in links:
            for image in IMAGES:
                for place in range(len(bench.turns)):
                    turn = bench.turns[(place + number) % len(bench.turns)]
                    wanted = [one for one in workloads if one.image == image and one in turn.workloads]
                    if wanted and link in turn.links and (turn.rounds is None or number < turn.rounds):
                        for sample in turn.contender.sample(image, wanted, link):
                            table.add(link, sample)
        print(f"round {number + 1} of {count}: {time.monotonic() - started:.0f} s", flush=True)
    return table


def report(table: Table, workloads: Sequence[Workload]) -> None:
    """A table per workload."""
    for workload in workloads:
        show(
            f"{workload.name}: {workload.command}",
            ("link", "contender", "n", "P50 ms", "P95 ms", "requests", "MB", "podman /", "download /"),
            [
                (
                    link,
                    row,
                    str(len(cell.ready.values)),
                    f"{cell.ready.p50 * 1e3:.0f}",
                    f"{cell.ready.p95 * 1e3:.0f}",
                    f"{cell.requests.p50:.0f}",
                    f"{cell.wire_bytes.p50 / 1e6:.3f}",
                    ratio(table.get(workload.name, link, PODMAN), cell),
                    ratio(table.get(workload.name, link, DOWNLOAD), cell),
                )
                for link, row, cell in table.rows(workload.name)
            ],
        )


def ratio(peer: Cell | None, cell: Cell) -> str:
    """How many times as long the peer takes."""
    return "" if peer is None else f"{peer.ready.p50 / cell.ready.p50:.1f}x"


def main() -> None:
    """In a mount namespace of its own: another one that somebody makes meanwhile would hold on to our mounts."""
    if os.environ.get(_ALONE) != str(os.getppid()):
        argv = [sys.executable, "-m", "bench.cold_start", *sys.argv[1:]]
        unshare = ["unshare", "--mount", "--propagation", "private", *argv]
        sys.exit(subprocess.run(unshare, env={**os.environ, _ALONE: str(os.getpid())}, check=False).returncode)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=10, help="samples of each contender")
    parser.add_argument("--casync", type=int, default=1, metavar="N", help="samples of casync; 0 leaves it out")
    parser.add_argument("--workload", action="append", choices=[workload.name for workload in WORKLOADS])
    parser.add_argument("--links", type=int, default=len(LINKS), metavar="N", help="only the first N")
    parser.add_argument("--docs", type=Path, help="put tables and plots there")
    options = parser.parse_args()
    workloads = [workload for workload in WORKLOADS if not options.workload or workload.name in options.workload]
    with (
        tempfile.TemporaryDirectory(prefix="pvisor-cold-", ignore_cleanup_errors=True) as directory,
        prepared(Path(directory), casync_count=options.casync) as bench,
    ):
        table = measure(bench, options.n, LINKS[: options.links], workloads)
        at_once = bench.several.measure(min(options.n, _AT_ONCE_ROUNDS))
    report(table, workloads)
    several.report(at_once)
    cells = [
        {"workload": workload, "link": link, "contender": row, **cell.to_json()}
        for (workload, link, row), cell in table.cells.items()
    ]
    written = write("cold_start", {"samples": cells, "at_once": at_once.to_json()})
    if options.docs is not None:
        publish(written, options.docs)


if __name__ == "__main__":
    main()
