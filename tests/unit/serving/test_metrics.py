"""Numbers for Prometheus, and whether a server says that it is ready."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from imaged.chunkstore.store import ChunkStore
from imaged.collection.eviction import Evictor, used_bytes
from imaged.errors import StoreError
from imaged.serving.metrics import Metrics, Sources
from imaged.serving.server import application
from imaged.serving.traffic import BUCKETS_S, Traffic

DURATIONS_S = [0.0, 0.0004, 0.0005, 0.0006, 0.3, 59.9, 60.0, 61.0, 1000.0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


def samples(text: bytes, prefix: str) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_created")
    }


def test_durations_are_counted_as_prometheus_client_counts_them(store: ChunkStore) -> None:
    traffic, registry = Traffic(), CollectorRegistry()
    sources = Sources(store=store, jobs=lambda: {"queued": 2}, leases=lambda: 3, cache=lambda: {"hits": 7})
    metrics = Metrics(sources, traffic, lambda: 5)
    name = "pvisor_http_request_seconds"
    reference = Histogram(name, "x", ("method", "route"), registry=registry, buckets=BUCKETS_S)
    for seconds in DURATIONS_S:
        traffic.note("GET", "/v1/chunks/{id}", "/v1/chunks/00", 200, 100, 1000, seconds, "peer")
        reference.labels("GET", "/v1/chunks/{id}").observe(seconds)
    traffic.note("BREW", "other", "/", 405, 1, 1, 0.1, "peer")
    reference.labels("other", "other").observe(0.1)
    metrics.take()
    metrics.take()
    text = metrics.render()
    assert samples(text, name) == pytest.approx(samples(generate_latest(registry), name))
    found = samples(text, "pvisor_")
    kind = "[('method', 'GET'), ('route', '/v1/chunks/{id}'), ('status', '200')]"
    assert found[f"pvisor_http_requests_total{kind}"] == len(DURATIONS_S)
    assert found[f"pvisor_http_sent_bytes_total{kind}"] == 1000 * len(DURATIONS_S)
    assert found["pvisor_jobs[('state', 'queued')]"] == 2
    assert found["pvisor_leases[]"] == 3
    assert found["pvisor_cache_hits_total[]"] == 7
    assert found["pvisor_http_connections[]"] == 5


def test_the_bound_of_a_cache_is_shown_with_its_use(store: ChunkStore) -> None:
    metrics = Metrics(Sources(store, dict, lambda: 0, dict), Traffic(), lambda: 0)
    assert b"cache_max_bytes" not in metrics.render()
    store.put(os.urandom(300_000))
    store.flush()
    Evictor(store, 20 << 30).note()
    found = samples(metrics.render(), "pvisor_cache_")
    assert found["pvisor_cache_max_bytes[]"] == 20 << 30
    assert 300_000 <= found["pvisor_cache_used_bytes[]"] == used_bytes(store.root) < 600_000


def answers(store: ChunkStore, *paths: str) -> list[tuple[int, str]]:
    async def ask() -> list[tuple[int, str]]:
        async with application(store) as app, TestClient(TestServer(app)) as client:
            found = []
            for path in paths:
                answer = await client.get(path)
                found.append((answer.status, await answer.text()))
            return found

    return asyncio.run(ask())


def test_ready(store: ChunkStore) -> None:
    assert answers(store, "/readyz", "/readyz?for=reads") == [(200, "ok\n")] * 2
    assert answers(store, "/readyz?for=luck")[0][0] == 400


def test_a_full_disk_is_ready_for_reads_and_says_so(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(store.root)
    full = os.statvfs_result((*real[:4], 1, *real[5:]))
    monkeypatch.setattr("imaged.serving.operationsapi.os.statvfs", lambda path: full)
    (no, why), (yes, text) = answers(store, "/readyz", "/readyz?for=reads")
    assert (no, yes) == (503, 200)
    assert "0 MiB are free" in why
    assert "0 MiB are free" in text


def test_a_read_only_disk_is_not_ready_for_writes(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(store.root)
    locked = os.statvfs_result((*real[:8], os.ST_RDONLY, *real[9:]))
    monkeypatch.setattr("imaged.serving.operationsapi.os.statvfs", lambda path: locked)
    assert [status for status, _ in answers(store, "/readyz", "/readyz?for=reads")] == [503, 200]


def test_a_backend_that_is_away_is_not_ready(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(self: ChunkStore) -> None:
        raise StoreError("s3://bucket does not answer")

    monkeypatch.setattr(ChunkStore, "probe", probe)
    for status, text in answers(store, "/readyz", "/readyz?for=reads"):
        assert status == 503
        assert "s3://bucket" in text
