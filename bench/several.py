"""Eight cold starts at once on one host: of eight different images, and of one image.

Beside them what eight at once of something that fetches nothing take against one: what is left of a start when all of
it is here, podman's, and an interpreter's. On a host with fewer than eight cores those wait for a processor, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import Podman, Samples, show
from bench.contenders import PODMAN_WARM, WARM, Profiles, Worker, start
from bench.image import pvisor
from bench.proxy import LINKS, Counted, Proxy
from bench.workloads import MINBASE, Image, Workload
from scripts.debian import debian_variant

COUNT = 8
INTERPRETER = "python3 -c 'print()'"
WORKLOAD = Workload("reader", MINBASE, "sh -c '. /etc/os-release; cksum </srv/data; echo ready $PRETTY_NAME'", b"ready")


@dataclass(frozen=True, slots=True)
class Variant(Image):
    """Minbase with a layer of its own on top: a megabyte that no other image has, and that the workload reads."""

    number: int = 0

    def layout(self) -> Path:
        return debian_variant(self.name, self.number)


def images() -> tuple[Image, ...]:
    return tuple(Variant(f"minbase-{number}", number=number) for number in range(COUNT))


@dataclass(slots=True)
class Pair:
    """One start alone, and the slowest of eight at once."""

    alone: Samples = field(default_factory=Samples)
    together: Samples = field(default_factory=Samples)


@dataclass(slots=True)
class AtOnce:
    """Of one start on an empty host, of eight of different images, of eight of one image: the slowest of each round,
    and what the daemon fetched."""

    one: Samples = field(default_factory=Samples)
    different: Samples = field(default_factory=Samples)
    same: Samples = field(default_factory=Samples)
    one_chunks: Samples = field(default_factory=Samples)
    same_chunks: Samples = field(default_factory=Samples)
    different_bytes: Samples = field(default_factory=Samples)
    one_bytes: Samples = field(default_factory=Samples)
    same_bytes: Samples = field(default_factory=Samples)
    peers: dict[str, Pair] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "one_s": self.one.to_json(),
            "slowest_of_8_images_s": self.different.to_json(),
            "slowest_of_8_starts_of_one_image_s": self.same.to_json(),
            "chunks_of_one": self.one_chunks.to_json(),
            "chunks_of_8_of_one_image": self.same_chunks.to_json(),
            "bytes_of_one": self.one_bytes.to_json(),
            "bytes_of_8_images": self.different_bytes.to_json(),
            "bytes_of_8_of_one_image": self.same_bytes.to_json(),
            "peers": {
                name: {"one_s": pair.alone.to_json(), "slowest_of_8_s": pair.together.to_json()}
                for name, pair in self.peers.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Several:
    """A host, a server that has profiles of all the images, and no delay between them. podman's image is in
    `registry`."""

    scratch: Path
    proxy: Proxy
    server: str
    profiles: Profiles
    images: Sequence[Image]
    registry: str

    def measure(self, count: int) -> AtOnce:
        """`count` rounds, the three kinds in turn."""
        found = AtOnce(peers={name: Pair() for name in (WARM, PODMAN_WARM, INTERPRETER)})
        for image in self.images:
            self.profiles.use(image, WORKLOAD)
        self.proxy.use(LINKS[0])
        podman = Podman(self.scratch / "podman")
        reference = f"{self.registry}/{MINBASE.name}:latest"
        subprocess.run(podman.pull(reference), check=True, capture_output=True)
        beside = {
            PODMAN_WARM: podman.run(reference, "echo", "ready"),
            INTERPRETER: [sys.executable, "-c", "print('ready')"],
        }
        for number in range(count):
            image = self.images[number % len(self.images)]
            for name, argv in beside.items():
                found.peers[name].alone.add(_slowest(1, partial(_start_beside, argv)))
                found.peers[name].together.add(_slowest(COUNT, partial(_start_beside, argv)))
            ready_s, chunks, counted = self._start([image], found.peers[WARM].alone)
            found.one.add(ready_s)
            found.one_chunks.add(chunks)
            found.one_bytes.add(counted.wire_bytes)
            ready_s, _, counted = self._start(self.images, found.peers[WARM].together)
            found.different.add(ready_s)
            found.different_bytes.add(counted.wire_bytes)
            ready_s, chunks, counted = self._start([image] * COUNT)
            found.same.add(ready_s)
            found.same_chunks.add(chunks)
            found.same_bytes.add(counted.wire_bytes)
        return found

    def _start(self, images: Sequence[Image], warm: Samples | None = None) -> tuple[float, int, Counted]:
        """All at once on an empty host: seconds of the slowest, chunks fetched, and what passed.

        Then the same again, all of it being here: the slowest goes to `warm`.
        """
        with tempfile.TemporaryDirectory(dir=self.scratch) as state:
            worker = Worker(Path(state), self.server)
            with worker.daemon():
                self.proxy.use(LINKS[0])
                slowest_s = _slowest(len(images), lambda number: worker.run(images[number], WORKLOAD))
                counted = self.proxy.settled()
                if warm is not None:
                    warm.add(_slowest(len(images), lambda number: worker.run(images[number], WORKLOAD)))
                return slowest_s, _chunks_fetched(worker), counted


def _start_beside(argv: Sequence[str], _number: int) -> float:
    return start(argv, WORKLOAD)


def _slowest(count: int, begin: Callable[[int], float]) -> float:
    """Seconds of the slowest of so many at once."""
    with ThreadPoolExecutor(count) as pool:
        return max(pool.map(begin, range(count)))


def _chunks_fetched(worker: Worker) -> int:
    argv = [pvisor(), "node", "status", "--json"]
    done = subprocess.run(argv, env=worker.env, check=True, capture_output=True)
    return sum(image["fetched_chunks"] for image in json.loads(done.stdout)["images"].values())


def report(found: AtOnce) -> None:
    """One table."""
    rows = (
        ("one image", found.one, found.one_chunks, found.one_bytes),
        ("8 different images", found.different, None, found.different_bytes),
        ("one image, 8 times", found.same, found.same_chunks, found.same_bytes),
    )
    show(
        "cold starts at once on one host, the slowest of each round",
        ("", "n", "P50 ms", "P95 ms", "of one", "chunks fetched", "MB"),
        [
            (
                name,
                str(len(ready.values)),
                f"{ready.p50 * 1e3:.0f}",
                f"{ready.p95 * 1e3:.0f}",
                f"{ready.p50 / found.one.p50:.2f}x",
                "" if chunks is None else f"{chunks.p50:.0f}",
                f"{wire.p50 / 1e6:.2f}",
            )
            for name, ready, chunks, wire in rows
        ],
    )
    show(
        "the same where nothing is fetched",
        ("", "n", "P50 ms of one", "P50 ms of 8 at once", "of one"),
        [
            (
                name,
                str(len(pair.alone.values)),
                f"{pair.alone.p50 * 1e3:.0f}",
                f"{pair.together.p50 * 1e3:.0f}",
                f"{pair.together.p50 / pair.alone.p50:.2f}x",
            )
            for name, pair in found.peers.items()
        ],
    )
