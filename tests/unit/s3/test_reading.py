"""Frames that come from the bucket: concurrent readers, background reads, failures."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PACK_HEADER_BYTES, PACKS_DIRECTORY
from imaged.errors import BucketUnavailableError, StoreError
from imaged.frame import Frame
from imaged.s3 import packindex
from imaged.s3.packindex import Row
from imaged.s3.packtable import REMOTE, PackTable, index_key, locations, pack_key
from imaged.s3.reading import Reading, Wanted
from tests.support.memory_objects import MemoryObjects

WAIT_S = 30.0
PACKS = 40


class Scattered:
    """A bucket with many packs of one frame each, so that a batch of them takes as many requests."""

    def __init__(self, root: Path) -> None:
        (root / PACKS_DIRECTORY).mkdir()
        self.objects = MemoryObjects()
        self.wanted: list[Wanted] = []
        index = Index.open(root / "index.mdb")
        index.is_mirror = True
        packs = PackTable(root, index)
        for number in range(1, PACKS + 1):
            frame = Frame.of(os.urandom(4096))
            header = frame.header
            row = Row(frame.id, PACK_HEADER_BYTES, header.size_bytes, header.payload_bytes, header.codec)
            name = f"{number:026}"
            raw = packindex.pack(row.end, [row])
            self.objects.put(pack_key(name), bytes(PACK_HEADER_BYTES) + frame.pack())
            self.objects.put(index_key(name), raw)
            packs.keep_contents(name, raw)
            packs.set(number, name, REMOTE)
            self.wanted += locations(number, packindex.parse(raw))
        self.objects.calls.clear()
        self.reading, self.index = Reading(root, self.objects, packs), index
        self.goes_on = threading.Event()
        self.objects.before = lambda operation, key: self.goes_on.wait(WAIT_S) and None

    def reads(self) -> list[str]:
        return [key for operation, key in self.objects.calls if operation == "read"]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Scattered]:
    made = Scattered(tmp_path)
    yield made
    made.goes_on.set()
    made.reading.close()
    made.index.close()


def test_who_reads_what_is_read_in_the_background_does_not_wait_for_ever(bucket: Scattered) -> None:
    """More requests than threads: none of those that run may wait for one that does not run yet."""
    bucket.reading.prefetch(bucket.wanted)
    with ThreadPoolExecutor(4) as clients:
        brought = [
            clients.submit(bucket.reading.bring, bucket.wanted[start : start + 16])
            for start in (0, 8, 16, 24)
            for _ in range(2)
        ]
        bucket.goes_on.set()
        for one in brought:
            one.result(timeout=WAIT_S)
    assert all(bucket.reading.is_here(place) for _, place in bucket.wanted)


def test_many_readers_of_the_same_frames_share_the_requests(bucket: Scattered) -> None:
    with ThreadPoolExecutor(8) as clients:
        brought = [clients.submit(bucket.reading.bring, bucket.wanted) for _ in range(8)]
        bucket.goes_on.set()
        for one in brought:
            one.result(timeout=WAIT_S)
    assert len(set(bucket.reads())) == PACKS
    assert len(bucket.reads()) < 2 * PACKS  # a few began when another reader had just ended


def test_all_who_wait_hear_of_a_failure_and_the_next_asks_again(bucket: Scattered) -> None:
    def refuse(operation: str, key: str) -> None:
        bucket.goes_on.wait(WAIT_S)
        raise BucketUnavailableError("no answer")

    bucket.objects.before = refuse
    bucket.reading.prefetch(bucket.wanted)
    with ThreadPoolExecutor(4) as clients:
        brought = [clients.submit(bucket.reading.bring, bucket.wanted) for _ in range(4)]
        bucket.goes_on.set()
        errors = [one.exception(timeout=WAIT_S) for one in brought]
    assert all(isinstance(error, BucketUnavailableError) for error in errors)
    assert len({id(error) for error in errors}) == len(errors)
    bucket.objects.before = None
    bucket.reading.bring(bucket.wanted)
    assert all(bucket.reading.is_here(place) for _, place in bucket.wanted)


def test_nobody_waits_for_what_a_closing_store_does_not_read_any_more(bucket: Scattered) -> None:
    bucket.reading.prefetch(bucket.wanted)
    with ThreadPoolExecutor(2) as clients:
        brought = clients.submit(bucket.reading.bring, bucket.wanted)
        closing = clients.submit(bucket.reading.close)
        while not bucket.reading._pool._shutdown:
            pass
        bucket.goes_on.set()
        assert isinstance(brought.exception(timeout=WAIT_S), StoreError)
        closing.result(timeout=WAIT_S)
