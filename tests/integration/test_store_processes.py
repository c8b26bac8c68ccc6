"""Several processes on one store, and kill -9 at any point of a writer or of a collection."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import pack_numbers
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import StoreBusyError
from imaged.ids import ChunkId
from imaged.reach import reachable
from tests.support.store_images import build_image, name_image, noise

REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def worker(role: str, root: Path, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    """A store_worker process; killed at the end of the block when it still runs."""
    command = [sys.executable, "-m", "tests.support.store_worker", role, str(root), *map(str, numbers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill_and_read(process: subprocess.Popen[str]) -> list[int]:
    process.kill()
    assert process.stdout is not None
    lines = process.stdout.read().split("\n")
    process.wait()
    return [int(line) for line in lines[:-1]]


def seed_chunk(seed: int) -> ChunkId:
    return ChunkId.of(noise(2000 + seed % 7 * 9000, seed))


def test_writers_at_once(tmp_path: Path) -> None:
    # Overlapping ranges: each chunk is wanted by two processes.
    with (
        worker("put", tmp_path, 0, 400) as a,
        worker("put", tmp_path, 200, 400) as b,
        worker("put", tmp_path, 400, 400),
    ):
        assert a.wait(60) == 0
        assert b.wait(60) == 0
        with ChunkStore.open(tmp_path) as store:
            for seed in range(600):
                assert store.get(ChunkId.of(noise(3000, seed))) == noise(3000, seed)
    report = check(tmp_path)
    assert report.errors == []
    assert report.packs <= 4


def test_another_process_sees_what_was_flushed(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store, worker("write", tmp_path, 0) as process:
        durable = int(first_line(process))
        for seed in range(durable):
            assert store.get(seed_chunk(seed))


def test_killed_writers_lose_only_what_they_had_not_flushed(tmp_path: Path) -> None:
    dice = random.Random(4)
    first = 0
    for _ in range(5):
        with worker("write", tmp_path, first) as process, worker("write", tmp_path, first + 20) as other:
            durable = int(first_line(process))
            time.sleep(dice.uniform(0, 0.25))
            other.kill()
            durable = max([durable, *kill_and_read(process)])
        report = check(tmp_path)
        assert report.errors == []
        with ChunkStore.open(tmp_path, readonly=True) as store:
            assert store.missing(seed_chunk(seed) for seed in range(durable)) == []
        first = durable
    # Each pair of writers took up the packs that the killed ones had left.
    assert len(pack_numbers(tmp_path)) <= 3
    with ChunkStore.open(tmp_path) as store:
        for seed in range(first):
            assert ChunkId.of(store.get(seed_chunk(seed))) == seed_chunk(seed)


def test_killed_while_naming_images(tmp_path: Path) -> None:
    dice = random.Random(5)
    for _ in range(3):
        with worker("name", tmp_path, 1) as process, worker("name", tmp_path, 2) as other:
            first_line(process)
            first_line(other)
            time.sleep(dice.uniform(0, 0.3))
            process.kill()
            other.kill()
        report = check(tmp_path)
        assert report.errors == []
        assert report.images >= 2


def test_a_killed_collection_is_taken_up_by_the_next(tmp_path: Path) -> None:
    dice = random.Random(6)
    with ChunkStore.open(tmp_path) as store:
        record = build_image(store, range(50))
        name_image(store, "kept:1", record)
    expected = {}
    for attempt in range(8):
        # Live chunks between garbage, in two packs, so that each collection sweeps, rewrites and removes.
        with ChunkStore.open(tmp_path) as one, ChunkStore.open(tmp_path) as two:
            for number in range(300):
                (one, two)[number % 2].put(noise(4000, 10_000 * attempt + number))
            name_image(one, f"kept:{attempt}", build_image(one, range(50 * attempt, 50 * attempt + 30)))
            expected = dict(one.refs.items())
        with worker("gc", tmp_path) as process:
            first_line(process)
            time.sleep(dice.uniform(0, 0.06))
            process.kill()
            process.wait()
        assert check(tmp_path).errors == []
    report = collect(tmp_path)
    assert check(tmp_path).errors == []
    with ChunkStore.open(tmp_path) as store:
        assert dict(store.refs.items()) == expected
        kept = {chunk for ref in expected.values() for chunk in reachable(store, ref.record)}
        assert report.kept_chunks == store.df().chunks == len(kept)
        for chunk in kept:
            store.get(chunk)
        assert pack_numbers(tmp_path) == list(store.index.packs())


def test_a_rebuild_names_who_has_the_store_open(tmp_path: Path) -> None:
    with worker("hold", tmp_path) as process:
        assert first_line(process) == "open"
        collect(tmp_path)
        with pytest.raises(StoreBusyError, match=f"process {process.pid} ") as caught:
            check(tmp_path, rebuild=True)
        assert "store_worker" in caught.value.message
        assert "pvisor node stop" in caught.value.hint
    check(tmp_path, rebuild=True)


def test_writing_beside_a_collection(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        for seed in range(500):
            store.put(noise(3000, seed))
        store.flush()
        with worker("gc", tmp_path) as process:
            first_line(process)
            with store.lease("a test"):
                store.put(noise(3000, 1))
                record = build_image(store, range(4))
                name_image(store, "kept:1", record)
            assert process.wait(30) == 0
        assert store.missing(reachable(store, record.id)) == []
    assert check(tmp_path).errors == []
