"""Chains of derived images read as a bytearray model says, and equal bytes over one parent have one id."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from imaged.blockformat import LEAF_BLOCKS, Root
from imaged.blockimage import BlockImage
from imaged.derive import CELL_BLOCKS, Change, derive
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.memory_store import MemoryStore

BLOCKS = [bytes(BLOCK_BYTES), *(Random(number).randbytes(BLOCK_BYTES) for number in range(3))]
"""Few different blocks, so that equal ones meet."""
Writes = dict[int, int]
"""What each changed block becomes: a number in BLOCKS."""


@st.composite
def sizes(draw: st.DrawFn) -> int:
    """Images of one to three leaves, some with a short last block."""
    blocks = draw(st.one_of(st.integers(1, 40), st.integers(2 * LEAF_BLOCKS - 3, 2 * LEAF_BLOCKS + 20)))
    return blocks * BLOCK_BYTES - draw(st.sampled_from([0, 0, 1, BLOCK_BYTES - 1]))


@st.composite
def writes(draw: st.DrawFn, block_count: int) -> Writes:
    """A few runs, near where cells and leaves end."""
    found: Writes = {}
    near = [0, CELL_BLOCKS, 2 * CELL_BLOCKS, LEAF_BLOCKS, 2 * LEAF_BLOCKS]
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.sampled_from(near)) + draw(st.integers(-3, 5))
        run = draw(st.lists(st.integers(0, len(BLOCKS) - 1), min_size=1, max_size=2 * CELL_BLOCKS + 3))
        if draw(st.booleans()):
            run = [run[0]] * len(run)
        found.update({start + n: kind for n, kind in enumerate(run) if 0 <= start + n < block_count})
    return dict(sorted(found.items()))


def as_changes(wanted: Writes, size_bytes: int, random: Random) -> list[Change]:
    """The writes as runs, cut here and there; some zeros are given as bytes, some as a number."""
    changes: list[tuple[int, list[int]]] = []
    for block, kind in wanted.items():
        if changes and changes[-1][0] + len(changes[-1][1]) == block and random.random() < 0.8:
            changes[-1][1].append(kind)
        else:
            changes.append((block, [kind]))
    found: list[Change] = []
    for first, kinds in changes:
        start = first * BLOCK_BYTES
        data = b"".join(BLOCKS[kind] for kind in kinds)[: size_bytes - start]
        found.append((start, len(data) if not any(kinds) and random.random() < 0.5 else data))
    return found


def write_to(model: bytearray, wanted: Writes) -> None:
    size_bytes = len(model)
    for block, kind in wanted.items():
        start = block * BLOCK_BYTES
        model[start : start + BLOCK_BYTES] = BLOCKS[kind][: size_bytes - start]


@given(sizes(), st.data(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_chains_read_as_the_model(size_bytes: int, data: st.DataObject, random: Random) -> None:
    store, model = MemoryStore(), bytearray(size_bytes)
    image: ChunkId | None = None
    made: list[tuple[ChunkId, bytes]] = []
    block_count = -(-size_bytes // BLOCK_BYTES)
    for _ in range(data.draw(st.integers(1, 5))):
        wanted = data.draw(writes(block_count))
        parent = image
        image = derive(store, parent, size_bytes, as_changes(wanted, size_bytes, random))
        # However the same change is cut into runs, it is the same image.
        assert derive(store, parent, size_bytes, as_changes(wanted, size_bytes, random)) == image
        write_to(model, wanted)
        made.append((image, bytes(model)))
    for one, expected in made:
        assert BlockImage.open(store, one).read(0, size_bytes + 1) == expected
    assert all(store.chunks.values())


@given(sizes(), st.data(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_only_touched_leaves_are_new(size_bytes: int, data: st.DataObject, random: Random) -> None:
    store = MemoryStore()
    block_count = -(-size_bytes // BLOCK_BYTES)
    first = derive(store, None, size_bytes, as_changes(data.draw(writes(block_count)), size_bytes, random))
    wanted = data.draw(writes(block_count))
    second = derive(store, first, size_bytes, as_changes(wanted, size_bytes, random))
    before, after = (Root.parse(store.get(image)) for image in (first, second))
    touched = {block // before.leaf_blocks for block in wanted}
    for index, (old, new) in enumerate(zip(before.leaves, after.leaves, strict=True)):
        assert index in touched or old == new
    assert derive(store, second, size_bytes, []) == second


@given(sizes(), st.data(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_writing_what_is_there_reads_the_same(size_bytes: int, data: st.DataObject, random: Random) -> None:
    """Doing so twice is the same image: what it has does not depend on how often a guest wrote it."""
    store, model = MemoryStore(), bytearray(size_bytes)
    block_count = -(-size_bytes // BLOCK_BYTES)
    image: ChunkId | None = None
    for _ in range(data.draw(st.integers(1, 3))):
        wanted = data.draw(writes(block_count))
        image = derive(store, image, size_bytes, as_changes(wanted, size_bytes, random))
        write_to(model, wanted)
        again = [(at, bytes(model[at : at + BLOCK_BYTES])) for at in range(0, size_bytes, BLOCK_BYTES)]
        same = derive(store, image, size_bytes, again)
        assert BlockImage.open(store, same).read(0, size_bytes + 1) == model
        count = len(store.chunks)
        assert derive(store, same, size_bytes, again) == same
        assert len(store.chunks) == count
