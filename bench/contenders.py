"""Who starts cold, each from a fresh state, and what one start cost.

A sample starts every workload of an image. Peers that bring the whole image first do that once a sample, and each
workload's time is that plus its own run; it is the same pull whatever runs then.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from bench.common import Podman, measure, time_first_byte
from bench.image import pvisor, pvisor_env
from bench.proxy import Counted, Link, Proxy
from bench.workloads import Image, Workload
from imaged.catalog import find
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from imaged.profile import Profile

WITH_PROFILE = "pvisor, with profile"
WITHOUT_PROFILE = "pvisor, without profile"
DAEMON_INSIDE = "pvisor, with profile, daemon start inside"
CACHED = "pvisor, all chunks here"
WARM = "pvisor, warm"
PODMAN = "podman pull + run"
PODMAN_WARM = "podman, warm"
DOWNLOAD = "whole EROFS file in zstd"
CASYNC = "casync mount"


class Sample(NamedTuple):
    """One start of one workload, by the name of the row it belongs to."""

    row: str
    workload: str
    ready_s: float
    counted: Counted = Counted()


class Contender(Protocol):
    """Threads may not share it."""

    def sample(self, image: Image, workloads: Sequence[Workload], link: Link) -> Iterator[Sample]:
        """Each workload once, from a fresh state, over this link."""
        ...


def start(argv: Sequence[str], workload: Workload, *, env: dict[str, str] | None = None) -> float:
    """Seconds to the first output byte. RuntimeError when the output is not the workload's."""
    found = time_first_byte(argv, env=env)
    if workload.marker not in found.output:
        raise RuntimeError(f"{workload.name}: no {workload.marker!r} in {found.output[-500:]!r}")
    return found.ready_s


@dataclass(frozen=True, slots=True)
class Worker:
    """A host of pVisor's with nothing on it, or what is in `state`."""

    state: Path
    server: str

    @property
    def env(self) -> dict[str, str]:
        return pvisor_env(self.state) | {"PVISOR_SERVER": f"http://{self.server}"}

    def call(self, *arguments: str) -> None:
        done = subprocess.run([pvisor(), *arguments], env=self.env, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pvisor {' '.join(arguments)}: exit code {done.returncode}: {done.stderr}")

    def run(self, image: Image, workload: Workload) -> float:
        return start([pvisor(), "run", image.name, "--", *workload.argv], workload, env=self.env)

    @contextmanager
    def daemon(self) -> Iterator[None]:
        """The node daemon, begun when the block is entered."""
        self.call("node", "start")
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """End the daemon. The kernel takes a moment to let go of a stage's mounts after its process."""
        deadline = time.monotonic() + 10
        while True:
            try:
                self.call("node", "stop")
                return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Profiles:
    """The startup profiles that real starts of each workload left at a server, put there and taken away at will."""

    store: ChunkStore
    kept: dict[tuple[str, str], bytes]

    @classmethod
    def train(cls, store: ChunkStore, server: str, pairs: Sequence[tuple[Image, Workload]], scratch: Path) -> Profiles:
        """Start each workload once on a host of its own and keep what its daemon sends."""
        found = cls(store, {})
        for image, workload in pairs:
            data = found.data(image)
            store.profiles.delete(data)
            with tempfile.TemporaryDirectory(dir=scratch) as state:
                worker = Worker(Path(state), server)
                with worker.daemon():
                    worker.run(image, workload)
                    raw = found.wait(data)
            found.kept[image.name, workload.name] = raw
        return found

    def wait(self, data: ChunkId, timeout_s: float = 30.0) -> bytes:
        """The profile that a daemon sends once its process has been quiet."""
        deadline = time.monotonic() + timeout_s
        while (raw := self.store.profiles.raw(data)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no profile after {timeout_s} s")
            time.sleep(0.1)
        return raw

    def data(self, image: Image) -> ChunkId:
        return find(self.store, image.name).record.data

    def chunks(self) -> list[ChunkId]:
        """What all of them name."""
        return list(dict.fromkeys(chunk for raw in self.kept.values() for chunk in Profile.parse(raw).chunks))

    def use(self, image: Image, workload: Workload) -> None:
        """Until the next call the server has this workload's profile for this image."""
        data = self.data(image)
        self.store.profiles.delete(data)
        self.store.profiles.offer(data, Profile.parse(self.kept[image.name, workload.name]))


@dataclass(frozen=True, slots=True)
class Cold:
    """`pvisor run` on an empty host. With profiles also a second run in the same daemon, which is warm."""

    scratch: Path
    proxy: Proxy
    server: str
    profiles: Profiles | None
    daemon_inside: bool = False

    def sample(self, image: Image, workloads: Sequence[Workload], link: Link) -> Iterator[Sample]:
        for workload in workloads:
            if self.profiles is not None:
                self.profiles.use(image, workload)
            with tempfile.TemporaryDirectory(dir=self.scratch) as state:
                worker = Worker(Path(state), self.server)
                if self.daemon_inside:
                    self.proxy.use(link)
                    ready_s = worker.run(image, workload)
                    yield Sample(DAEMON_INSIDE, workload.name, ready_s, self.proxy.settled())
                    worker.stop()
                    continue
                with worker.daemon():
                    self.proxy.use(link)
                    ready_s = worker.run(image, workload)
                    row = WITHOUT_PROFILE if self.profiles is None else WITH_PROFILE
                    yield Sample(row, workload.name, ready_s, self.proxy.settled())
                    if self.profiles is not None:
                        yield Sample(WARM, workload.name, worker.run(image, workload))


@dataclass(frozen=True, slots=True)
class Cached:
    """`pvisor run` of an image that was pulled whole; the daemon is fresh, and so is the page cache of its files."""

    state: Path
    proxy: Proxy
    server: str

    def prepare(self, images: Sequence[Image]) -> None:
        worker = Worker(self.state, self.server)
        with worker.daemon():
            for image in images:
                worker.call("pull", image.name)

    def sample(self, image: Image, workloads: Sequence[Workload], link: Link) -> Iterator[Sample]:
        worker = Worker(self.state, self.server)
        for workload in workloads:
            with worker.daemon():
                self.proxy.use(link)
                ready_s = worker.run(image, workload)
                yield Sample(CACHED, workload.name, ready_s, self.proxy.settled())


@dataclass(frozen=True, slots=True)
class PodmanPull:
    """`podman pull` and `podman run` with an empty storage, then a second run."""

    scratch: Path
    proxy: Proxy
    registry: str

    def sample(self, image: Image, workloads: Sequence[Workload], link: Link) -> Iterator[Sample]:
        podman = Podman(self.scratch / "podman")
        podman.forget()
        self.proxy.use(link)
        reference = f"{self.registry}/{image.name}:latest"
        pull_s = measure(podman.pull(reference)).wall_s
        counted = self.proxy.counted()
        for workload in workloads:
            argv = podman.run(reference, *workload.argv)
            yield Sample(PODMAN, workload.name, pull_s + start(argv, workload), counted)
            yield Sample(PODMAN_WARM, workload.name, start(argv, workload))

    def close(self) -> None:
        podman = Podman(self.scratch / "podman")
        podman.forget()
        subprocess.run(["umount", str(podman.root / "root/overlay")], check=False, capture_output=True)


@dataclass(frozen=True, slots=True)
class WholeFile:
    """The image's EROFS file, compressed whole, downloaded and decompressed in a pipe, mounted, and entered."""

    scratch: Path
    proxy: Proxy
    files: str

    def sample(self, image: Image, workloads: Sequence[Workload], link: Link) -> Iterator[Sample]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
            file, root = Path(directory) / "image.erofs", Path(directory) / "root"
            root.mkdir()
            self.proxy.use(link)
            fetch = f"curl -sf http://{self.files}/{image.name}.erofs.zst | zstd -dqc > {file}"
            fetched_s = measure(["sh", "-c", f"{fetch}; mount -t erofs -o ro,loop {file} {root}"]).wall_s
            counted = self.proxy.counted()
            try:
                for workload in workloads:
                    ready_s = fetched_s + start(["chroot", str(root), *workload.argv], workload)
                    yield Sample(DOWNLOAD, workload.name, ready_s, counted)
            finally:
                subprocess.run(["umount", str(root)], check=True)


@dataclass(frozen=True, slots=True)
class Casync:
    """`casync mount` of the image's tree. (A file system image, which its `mkdev` would take, needs nbd.)"""

    scratch: Path
    proxy: Proxy
    files: str

    def sample(self, image: Image, workloads: Sequence[Workload], link: Link) -> Iterator[Sample]:
        for workload in workloads:
            with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
                self.proxy.use(link)
                base = f"http://{self.files}/{image.name}"
                argv = ["casync", "mount", f"--store={base}.castr", f"{base}.caidx", directory]
                started = time.monotonic()
                with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as mount:
                    try:
                        while not Path(directory).is_mount():
                            if mount.poll() is not None or time.monotonic() - started > 30:
                                raise RuntimeError(f"casync mount: status {mount.poll()}")
                            time.sleep(0.01)
                        mounted_s = time.monotonic() - started
                        ready_s = mounted_s + start(["chroot", directory, *workload.argv], workload)
                        yield Sample(CASYNC, workload.name, ready_s, self.proxy.counted())
                    finally:
                        subprocess.run(["umount", "-l", directory], check=False, capture_output=True)
                        mount.kill()


def clear(directory: Path) -> None:
    """Remove what samples left."""
    shutil.rmtree(directory, ignore_errors=True)
