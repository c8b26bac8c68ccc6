"""Where a batch lies in its packs, and whether sending it from there would wait for the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imaged.chunkstore import packranges as module
from imaged.chunkstore.packranges import NotCachedError
from imaged.chunkstore.store import ChunkStore
from imaged.frame import HEADER_BYTES

CHUNKS = [os.urandom(20_000) for _ in range(4)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


def test_chunks_that_lie_one_after_another_are_one_range(store: ChunkStore) -> None:
    ids = [store.put(data) for data in CHUNKS]
    store.flush()
    plan = store.planner().plan(ids)
    assert plan is not None and len(plan.ranges) == 1
    scattered = store.planner().plan([ids[2], ids[0], ids[3]])
    assert scattered is not None and len(scattered.ranges) == 3


@pytest.mark.parametrize("missing", ["a header", "the end of a range"])
def test_what_the_disk_would_have_to_be_waited_for_is_not_planned(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Nobody else is answered while the event loop waits for a disk."""
    ids = [store.put(data) for data in CHUNKS]
    store.flush()
    uncached = HEADER_BYTES if missing == "a header" else 1
    read_ahead: list[int] = []

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags & os.RWF_NOWAIT and len(buffers[0]) == uncached:
            raise BlockingIOError
        if len(buffers[0]) > HEADER_BYTES:
            read_ahead.append(offset)
        return real(fd, buffers, offset, flags)

    real = os.preadv
    monkeypatch.setattr(module.os, "preadv", preadv)
    planner = store.planner()
    with pytest.raises(NotCachedError):
        planner.plan(ids)
    assert not read_ahead
    plan = planner.plan(ids, wait=True)
    assert plan is not None and read_ahead == [plan.ranges[0][1]]
