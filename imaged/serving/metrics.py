"""What a server tells Prometheus: requests, the store, jobs, leases, its processes. docs/operations.md lists the names.

With several worker processes each keeps its numbers in files that all of them read (prometheus_client's multiprocess
mode, chosen by PROMETHEUS_MULTIPROC_DIR when that is imported), so that whichever is asked answers for all. What is
about the store is read from the store by the one that is asked.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from imaged.chunkstore.store import ChunkStore
from imaged.collection.eviction import noted_bound, used_bytes
from imaged.serving.metricsfiles import MULTIPROCESS
from imaged.serving.traffic import BUCKETS_S, Kind, Traffic

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Sources:
    """What is read when somebody asks. Each may block, and none may be asked by two threads at once."""

    store: ChunkStore
    jobs: Callable[[], Mapping[str, int]]
    """State -> how many."""
    leases: Callable[[], int]
    cache: Callable[[], Mapping[str, int]]
    """Counters of a pull-through cache: hits, misses, fetched_chunks, fetched_bytes; empty without one."""


class Metrics:
    """The numbers of one process. `take` belongs to the thread of its event loop, `render` may run elsewhere."""

    def __init__(self, sources: Sources, traffic: Traffic, connections: Callable[[], int]) -> None:
        self._traffic, self._connections, self._sources = traffic, connections, sources
        self._own = own = CollectorRegistry()
        self._shared = MULTIPROCESS in os.environ
        kind = ("method", "route", "status")
        self._requests = Counter("pvisor_http_requests", "Requests that were answered.", kind, registry=own)
        self._received = Counter(
            "pvisor_http_received_bytes", "Heads and bodies of these requests.", kind, registry=own
        )
        self._sent = Counter("pvisor_http_sent_bytes", "Heads and bodies of their answers.", kind, registry=own)
        self._seconds = Histogram(
            "pvisor_http_request_seconds",
            "From a request's head to the last byte given to the kernel.",
            ("method", "route"),
            registry=own,
            buckets=BUCKETS_S,
        )
        self._open = Gauge("pvisor_http_connections", "Open connections.", registry=own, multiprocess_mode="livesum")
        self._resident = Gauge(
            "pvisor_process_resident_bytes",
            "Resident memory of the serving processes.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self._files = Gauge(
            "pvisor_process_open_files",
            "Open files of the serving processes.",
            registry=own,
            multiprocess_mode="livesum",
        )
        self._processes = Gauge("pvisor_processes", "Serving processes.", registry=own, multiprocess_mode="livesum")
        self._cpu = Counter("pvisor_process_cpu_seconds", "CPU time of the serving processes.", registry=own)
        self._cpu_s = 0.0
        self._cache: dict[str, Counter] = {
            name: Counter(f"pvisor_cache_{name}", text, registry=own) for name, text in _CACHE.items()
        }
        self._cache_seen: dict[str, int] = {}

    def take(self) -> None:
        """What happened since the last time. Also for the other processes, so it is called every second."""
        for kind, count in self._traffic.take().items():
            self._add(kind, count.requests, count.received_bytes, count.sent_bytes)
            self._observe(kind, count.durations, count.seconds)
        self._open.set(self._connections())
        self._processes.set(1)
        self._resident.set(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES)
        self._files.set(sum(1 for _ in Path("/proc/self/fd").iterdir()))
        cpu_s = time.process_time()
        self._cpu.inc(cpu_s - self._cpu_s)
        self._cpu_s = cpu_s
        for name, value in self._sources.cache().items():
            self._cache[name].inc(value - self._cache_seen.get(name, 0))
            self._cache_seen[name] = value

    def _add(self, kind: Kind, requests: int, received_bytes: int, sent_bytes: int) -> None:
        method, route, status = kind
        self._requests.labels(method, route, status).inc(requests)
        self._received.labels(method, route, status).inc(received_bytes)
        self._sent.labels(method, route, status).inc(sent_bytes)

    def _observe(self, kind: Kind, durations: list[int], seconds: float) -> None:
        """Many observations at once, which the class has no call for: one after another they would cost more than the
        answers."""
        histogram = self._seconds.labels(kind[0], kind[1])
        for bucket, count in zip(histogram._buckets, durations, strict=True):
            if count:
                bucket.inc(count)
        histogram._sum.inc(seconds)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        registry = CollectorRegistry()
        if self._shared:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(_StoreCollector(self._sources))
        text = b"" if self._shared else generate_latest(self._own)
        return text + generate_latest(registry)


_CACHE = {
    "hits": "Chunks that a pull-through cache had.",
    "misses": "Chunks that it had to fetch.",
    "fetched_chunks": "Chunks that came from servers before it.",
    "fetched_bytes": "Bytes that came from servers before it.",
}


class _StoreCollector(Collector):
    """What is true of the store, whichever process is asked."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        store = self._sources.store
        usage = store.df()
        yield _gauge("pvisor_store_chunks", "Chunks in the store.", usage.chunks)
        yield _gauge("pvisor_store_logical_bytes", "Their length, uncompressed.", usage.logical_bytes)
        yield _gauge("pvisor_store_stored_bytes", "Their length as frames.", usage.stored_bytes)
        yield _gauge("pvisor_store_dead_bytes", "Bytes of packs that a collection would free.", usage.dead_bytes)
        yield _gauge("pvisor_store_packs", "Pack files.", usage.packs)
        disk = os.statvfs(store.root)
        yield _gauge("pvisor_store_free_bytes", "Free on the file system of the store.", disk.f_bavail * disk.f_frsize)
        yield _gauge("pvisor_store_disk_bytes", "Size of the file system of the store.", disk.f_blocks * disk.f_frsize)
        bound = noted_bound(store.index)
        if bound is not None:
            yield _gauge("pvisor_cache_max_bytes", "The bound of the packs, --cache-max.", bound)
            yield _gauge("pvisor_cache_used_bytes", "What the packs take of it on disk.", used_bytes(store.root))
        yield _gauge("pvisor_images", "Names of images.", sum(1 for _ in store.refs.items()))
        yield _gauge("pvisor_snapshots", "Names of snapshots.", sum(1 for _ in store.snapshots.items()))
        jobs = GaugeMetricFamily("pvisor_jobs", "Jobs that are remembered, by state.", labels=["state"])
        for state, count in self._sources.jobs().items():
            jobs.add_metric([state], count)
        yield jobs
        yield _gauge("pvisor_leases", "Leases that are held.", self._sources.leases())
        build = GaugeMetricFamily("pvisor_build_info", "The version that answers.", labels=["version"])
        build.add_metric([_version()], 1)
        yield build


def forget_process(pid: int, directory: Path) -> None:
    """Of a process that has ended only what it counted is kept."""
    mark_process_dead(pid, str(directory))  # type: ignore[no-untyped-call]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _version() -> str:
    try:
        return version("pvisor")
    except PackageNotFoundError:
        return "unknown"
