"""Working sets: from a profile, from a parent, and the bytes that they are."""

from __future__ import annotations

import pytest

from fuse import workingset
from fuse.workingset import WorkingSet
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.parked import add_snapshot
from tests.unit.conftest import IMAGE

CELL = 64 << 10


def test_a_profile_becomes_the_places_of_its_chunks_in_its_order(image: BlockImage) -> None:
    touched = [*image.way(70 * CELL, 10), *image.way(3 * CELL, 10), *image.way(6 * CELL + 5, 10)]
    found = WorkingSet.of_profile(image, touched)
    assert found.ranges == ((70 * CELL, CELL), (3 * CELL, CELL), (6 * CELL, CELL))
    assert set(found.chunks) == set(touched)


def test_what_is_not_of_the_image_is_left_out(image: BlockImage) -> None:
    leaf, chunk = image.way(3 * CELL, 10)
    assert WorkingSet.of_profile(image, [ChunkId(b"\7" * 32), leaf, chunk]).ranges == ((3 * CELL, CELL),)
    assert WorkingSet.of_profile(image, [chunk]) == WorkingSet(), "its leaf was not touched"


def test_ranges_are_kept_once_and_joined_and_bounded(image: BlockImage, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(3 * CELL, CELL // 2), (3 * CELL + CELL // 2, CELL // 2), (3 * CELL, CELL // 2), (7 * CELL, CELL)]
    assert WorkingSet.of_ranges(image, ranges).ranges == ((3 * CELL, CELL), (7 * CELL, CELL))
    monkeypatch.setattr(workingset, "WORKING_SET_BYTES", CELL)
    found = WorkingSet.of_ranges(image, ranges)
    assert found.ranges == ((3 * CELL, CELL),)
    assert list(found.chunks) == image.way(3 * CELL, CELL)


def test_a_profile_takes_the_holes_beside_its_chunks_along(store: ChunkStore) -> None:
    memory = bytearray(4 * CELL + BLOCK_BYTES)
    memory[CELL + BLOCK_BYTES : CELL + 2 * BLOCK_BYTES] = b"\1" * BLOCK_BYTES
    memory[-BLOCK_BYTES:] = b"\2" * BLOCK_BYTES
    parked = add_snapshot(store, None, IMAGE, memory=bytes(memory))
    image = BlockImage.open(store, parked.record.memory)
    touched = image.way(0, len(memory))
    assert WorkingSet.of_profile(image, touched).ranges == ((CELL, CELL), (4 * CELL, BLOCK_BYTES))
