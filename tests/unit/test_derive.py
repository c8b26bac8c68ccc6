"""What a derived image stores, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest

from imaged.blockformat import LEAF_BYTES, Leaf, Root
from imaged.blockimage import BlockImage
from imaged.derive import CELL_BYTES, derive
from imaged.errors import ChunkMissingError, FormatError
from imaged.extent import Extent
from imaged.frame import Frame
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.parentleaves import ParentLeaves
from tests.support.memory_store import MemoryStore

SIZE_BYTES = 4 * LEAF_BYTES


class CountingStore(MemoryStore):
    """Says what was read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[ChunkId] = []

    def get(self, chunk: ChunkId) -> bytes:
        self.read.append(chunk)
        return super().get(chunk)

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        self.read += chunks
        return super().frames(chunks)


def block(number: int) -> bytes:
    return Random(number).randbytes(BLOCK_BYTES)


def leaf_of(store: MemoryStore, image: ChunkId, index: int) -> list[Extent]:
    leaf = Root.parse(store.get(image)).leaves[index]
    assert leaf is not None
    return Leaf.parse(store.get(leaf)).extents()


def test_an_image_of_nothing_is_a_root_of_holes() -> None:
    store = MemoryStore()
    image = derive(store, None, SIZE_BYTES, [(0, bytes(3 * CELL_BYTES)), (LEAF_BYTES, 2 * LEAF_BYTES)])
    assert list(store.chunks) == [image]
    assert Root.parse(store.get(image)).leaves == (None,) * 4
    assert derive(store, None, 0, []) == ChunkId.of(Root(0, ()).pack())


def test_the_changed_blocks_of_a_cell_are_one_chunk_and_zeros_are_holes() -> None:
    store = MemoryStore()
    data = block(1) + bytes(2 * BLOCK_BYTES) + block(2)
    image = derive(store, None, SIZE_BYTES, [(BLOCK_BYTES, data)])
    chunk = ChunkId.of(block(1) + block(2))
    expected = [Extent(1, None), Extent(1, chunk), Extent(2, None), Extent(1, chunk, 1), Extent(507, None)]
    assert leaf_of(store, image, 0) == expected
    assert len(store.chunks) == 3


def test_a_change_leaves_the_parents_chunk_around_it() -> None:
    store = MemoryStore()
    whole = b"".join(block(number) for number in range(16))
    parent = derive(store, None, SIZE_BYTES, [(CELL_BYTES, whole)])
    child = derive(store, parent, SIZE_BYTES, [(CELL_BYTES + 5 * BLOCK_BYTES, block(99))])
    before, new = ChunkId.of(whole), ChunkId.of(block(99))
    expected = [Extent(16, None), Extent(5, before), Extent(1, new), Extent(10, before, 6), Extent(480, None)]
    assert leaf_of(store, child, 0) == expected


def test_a_cell_that_is_given_as_it_was_is_the_parents() -> None:
    store = MemoryStore()
    whole = b"".join(block(number) for number in range(16))
    parent = derive(store, None, SIZE_BYTES, [(CELL_BYTES, whole)])
    count = len(store.chunks)
    assert derive(store, parent, SIZE_BYTES, [(CELL_BYTES, whole), (LEAF_BYTES, 4096)]) == parent
    assert len(store.chunks) == count


def test_a_parents_chunk_that_is_not_here_is_not_fetched() -> None:
    """A park works without the server, and with a damaged chunk."""
    store, far = MemoryStore(), CountingStore()
    parent = derive(far, None, SIZE_BYTES, [(0, block(1) + block(2))])
    far.read.clear()
    child = derive(store, parent, SIZE_BYTES, [(0, block(1))], before=ParentLeaves(far, parent, SIZE_BYTES))
    assert set(far.read) <= {parent, *Root.parse(far.chunks[parent]).leaves}
    assert leaf_of(store, child, 0)[:2] == [
        Extent(1, ChunkId.of(block(1))),
        Extent(1, ChunkId.of(block(1) + block(2)), 1),
    ]


def test_of_the_parent_only_the_root_and_touched_leaves_are_read() -> None:
    store = CountingStore()
    changes = [(index * LEAF_BYTES, block(index)) for index in range(4)]
    parent = derive(store, None, SIZE_BYTES, changes)
    leaves = Root.parse(store.chunks[parent]).leaves
    store.read.clear()
    child = derive(store, parent, SIZE_BYTES, [(2 * LEAF_BYTES + BLOCK_BYTES, block(9))])
    assert set(store.read) <= {parent, leaves[2]}
    after = Root.parse(store.chunks[child]).leaves
    assert [old == new for old, new in zip(leaves, after, strict=True)] == [True, True, False, True]


def test_leaves_that_are_read_ahead_are_read_once() -> None:
    store = CountingStore()
    parent = derive(store, None, SIZE_BYTES, [(index * LEAF_BYTES, block(index)) for index in range(4)])
    changes = [(index * LEAF_BYTES + BLOCK_BYTES, block(9 + index)) for index in (0, 1, 3)]
    wanted = derive(store, parent, SIZE_BYTES, changes)
    before = ParentLeaves(store, parent, SIZE_BYTES)
    before.read([0, 1, LEAF_BYTES - 1, LEAF_BYTES, 2 * LEAF_BYTES, LEAF_BYTES])
    store.read.clear()
    assert derive(store, parent, SIZE_BYTES, changes, before=before) == wanted
    assert store.read == [Root.parse(store.chunks[parent]).leaves[3]]
    with pytest.raises(FormatError, match="parent image"):
        ParentLeaves(store, parent, SIZE_BYTES - BLOCK_BYTES)


def test_a_parent_that_is_elsewhere_is_read_there() -> None:
    far, here = MemoryStore(), MemoryStore()
    parent = derive(far, None, SIZE_BYTES, [(0, block(1) + block(2))])
    with pytest.raises(ChunkMissingError):
        derive(here, parent, SIZE_BYTES, [(0, block(3))])
    child = derive(here, parent, SIZE_BYTES, [(0, block(3))], before=ParentLeaves(far, parent, SIZE_BYTES))
    assert not set(here.chunks) & set(far.chunks)
    far.chunks.update(here.chunks)
    assert BlockImage.open(far, child).read(0, 3 * BLOCK_BYTES) == block(3) + block(2) + bytes(BLOCK_BYTES)


def test_changes_are_taken_as_they_come() -> None:
    """Memory stays small: some cells and those of one leaf wait, however many there are."""
    store = MemoryStore()
    seen: list[int] = []

    def changes() -> Iterator[tuple[int, bytes]]:
        for number in range(SIZE_BYTES // CELL_BYTES):
            seen.append(len(store.chunks))
            yield number * CELL_BYTES, block(number) * 16

    derive(store, None, SIZE_BYTES, changes())
    assert max(number - stored for number, stored in enumerate(seen)) <= 64 + LEAF_BYTES // CELL_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        [(1, bytes(4096))],
        [(0, b"short")],
        [(0, b"")],
        [(4096, bytes(4096)), (0, bytes(4096))],
        [(0, bytes(8192)), (4096, bytes(4096))],
        [(SIZE_BYTES, bytes(4096))],
        [(SIZE_BYTES - 4096, 8192)],
    ],
)
def test_changes_that_break_the_rules_are_refused(changes: list[tuple[int, bytes | int]]) -> None:
    with pytest.raises(ValueError, match="a change of"):
        derive(MemoryStore(), None, SIZE_BYTES, changes)


def test_a_parent_of_another_size_is_refused() -> None:
    store = MemoryStore()
    parent = derive(store, None, SIZE_BYTES, [])
    with pytest.raises(FormatError, match="expected 4096 bytes, found 8388608 bytes"):
        derive(store, parent, 4096, [])


def test_a_parent_leaf_of_another_length_is_refused() -> None:
    store = MemoryStore()
    parent = derive(store, None, SIZE_BYTES, [(0, block(1))])
    leaf = Root.parse(store.get(parent)).leaves[0]
    crooked = store.put(Root(BLOCK_BYTES, (leaf,)).pack())
    with pytest.raises(FormatError, match="expected 1 blocks, found 512"):
        derive(store, crooked, BLOCK_BYTES, [(0, block(2))])
