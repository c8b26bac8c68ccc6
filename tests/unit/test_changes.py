"""What a memory image has that the one before it had not."""

from __future__ import annotations

from imaged.blockimage import BlockImage
from imaged.changes import changes
from imaged.chunkstore.store import ChunkStore
from imaged.ids import BLOCK_BYTES
from tests.support.parked import Parked, add_snapshot
from tests.unit.conftest import IMAGE

CELL = 64 << 10


def test_what_a_machine_changed_is_found_by_its_leaves(store: ChunkStore, parked: Parked, image: BlockImage) -> None:
    memory = bytearray(parked.memory)
    memory[5 * BLOCK_BYTES : 6 * BLOCK_BYTES] = b"\1" * BLOCK_BYTES
    memory[9 << 20 : (9 << 20) + 2 * BLOCK_BYTES] = b"\2" * 2 * BLOCK_BYTES
    child = add_snapshot(store, None, IMAGE, memory=bytes(memory), parent=parked, seed=2)
    later = BlockImage.open(store, child.record.memory)
    found = list(changes(later, image))
    assert [(place.offset, place.length) for place in found] == [
        (5 * BLOCK_BYTES, BLOCK_BYTES),
        (9 << 20, 2 * BLOCK_BYTES),
    ]
    for place in found:
        assert later.way(place.offset, place.length) == [place.leaf, place.chunk]
    assert list(changes(image, image)) == []


def test_memories_of_different_sizes_are_not_compared(store: ChunkStore, image: BlockImage) -> None:
    other = add_snapshot(store, None, IMAGE, memory=b"\1" * CELL)
    assert list(changes(BlockImage.open(store, other.record.memory), image)) == []
