"""Any list of extents reads back as a bytearray model says; damage is an error, never other bytes."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.blockformat import LEAF_BLOCKS, LEAF_LIMIT_BLOCKS, Leaf, Root, mergeable, pack_leaf
from imaged.blockimage import BlockImage, read_blob
from imaged.conversion.cutter import Cutter
from imaged.erofs.tree import Inode
from imaged.errors import PvisorError
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.memory_store import MemoryStore

CHUNKS = [Random(size).randbytes(size) for size in (1, 4096, 4097, 20000, 65536, 256 * 4096)]
IDS = [ChunkId.of(data) for data in CHUNKS]
BLOCKS = [-(-len(data) // BLOCK_BYTES) for data in CHUNKS]


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    number = draw(st.integers(-2, len(CHUNKS) - 1))
    if number < 0:
        return Extent(draw(st.one_of(st.integers(1, 20), st.integers(LEAF_BLOCKS - 300, LEAF_BLOCKS + 20))), None)
    first = draw(st.integers(0, BLOCKS[number] - 1))
    return Extent(draw(st.integers(1, BLOCKS[number] - first)), IDS[number], first)


def chunk_store() -> MemoryStore:
    store = MemoryStore()
    for data in CHUNKS:
        store.put(data)
    return store


def model_of(parts: list[Extent]) -> bytearray:
    model = bytearray()
    for extent in parts:
        size, start = extent.block_count * BLOCK_BYTES, extent.first_block * BLOCK_BYTES
        data = b"" if extent.chunk is None else CHUNKS[IDS.index(extent.chunk)]
        model += data[start : start + size].ljust(size, b"\0")
    return model


@given(st.lists(extents(), max_size=12), st.integers(0, BLOCK_BYTES - 1), st.data())
@settings(max_examples=150, deadline=None)
def test_reads_equal_the_model(parts: list[Extent], short_by: int, data: st.DataObject) -> None:
    store = chunk_store()
    builder = BlockImageBuilder(store, leaf_blocks=data.draw(st.sampled_from([256, LEAF_BLOCKS, LEAF_LIMIT_BLOCKS])))
    model = model_of(parts)
    for extent in parts:
        builder.append(extent)
    del model[max(len(model) - short_by, 0) :]
    image = BlockImage.open(store, builder.finish(len(model)), cache_bytes=data.draw(st.sampled_from([0, 1 << 20])))
    assert image.size_bytes == len(model)
    for _ in range(4):
        offset = data.draw(st.integers(0, len(model) + 10))
        length = data.draw(st.integers(0, 3 << 20))
        assert image.read(offset, length) == model[offset : offset + length]
    used = dict.fromkeys(extent.chunk for extent in parts if extent.chunk is not None)
    assert list(image.chunk_ids()) == list(used)


@given(st.lists(extents(), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_how_extents_are_split_does_not_change_the_id(parts: list[Extent], random: Random) -> None:
    whole, split = BlockImageBuilder(chunk_store()), BlockImageBuilder(chunk_store())
    for extent in parts:
        whole.append(extent)
        cut = random.randint(0, extent.block_count)
        if 0 < cut < extent.block_count:
            after = 0 if extent.chunk is None else extent.first_block + cut
            split.append(Extent(cut, extent.chunk, extent.first_block))
            split.append(Extent(extent.block_count - cut, extent.chunk, after))
        else:
            split.append(extent)
    assert whole.finish() == split.finish()


@given(st.lists(extents(), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_leaf_parses_to_what_was_packed(parts: list[Extent]) -> None:
    merged: list[Extent] = []
    for extent in parts:
        if merged and mergeable(merged[-1], extent):
            last = merged.pop()
            extent = Extent(last.block_count + extent.block_count, last.chunk, last.first_block)
        merged.append(extent)
    total = sum(extent.block_count for extent in merged)
    raw = pack_leaf(merged)
    if raw is None:
        assert all(extent.chunk is None for extent in merged)
        return
    if total > LEAF_LIMIT_BLOCKS:
        return
    leaf = Leaf.parse(raw)
    assert leaf.extents() == merged
    assert leaf.block_count == total
    assert pack_leaf(leaf.extents()) == raw


@given(st.lists(extents(), min_size=1, max_size=6), st.integers(0, 1 << 20), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_damaged_leaf_is_refused_or_another_canonical_leaf(parts: list[Extent], at: int, flip: int) -> None:
    raw = pack_leaf(parts[:1] + [part for left, part in pairwise(parts) if not mergeable(left, part)])
    if raw is None:
        return
    damaged = bytearray(raw)
    damaged[at % len(raw)] ^= flip
    try:
        leaf = Leaf.parse(bytes(damaged))
    except PvisorError:
        return
    assert pack_leaf(leaf.extents()) == bytes(damaged)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_parse_or_are_refused(raw: bytes) -> None:
    for candidate in (raw, b"pvL1" + raw, b"pvR1" + raw):
        try:
            leaf = Leaf.parse(candidate)
            assert pack_leaf(leaf.extents()) == candidate
        except PvisorError:
            pass
        try:
            root = Root.parse(candidate)
            assert root.pack() == candidate
        except PvisorError:
            pass


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damage_in_any_chunk_is_never_wrong_bytes(data: st.DataObject) -> None:
    """The store here does not verify, as a frame from a lying server before `Frame.open`: reads go through frames."""
    store = chunk_store()
    builder = BlockImageBuilder(store)
    parts = [Extent(16, IDS[4]), Extent(3, None), Extent(5, IDS[3]), Extent(256, IDS[5])]
    for extent in parts:
        builder.append(extent)
    image_id = builder.finish()
    victim = data.draw(st.sampled_from(sorted(set(store.chunks) - {IDS[0], IDS[1], IDS[2]})))
    damaged = bytearray(store.chunks[victim])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    store.chunks[victim] = bytes(damaged)
    reader = VerifyingStore(store)
    try:
        image = BlockImage.open(reader, image_id)
        found = image.read(0, image.size_bytes)
    except PvisorError:
        return
    raise AssertionError(f"read {len(found)} bytes through a damaged {victim}")


class VerifyingStore(MemoryStore):
    """Opens a frame on `get`, as every real store does."""

    def __init__(self, below: MemoryStore) -> None:
        super().__init__()
        self.chunks = below.chunks

    def get(self, chunk: ChunkId) -> bytes:
        return next(iter(self.frames([chunk]))).open()


@given(st.binary(max_size=30000), st.integers(0, 30000), st.sampled_from([4096, 8192, 1 << 20]))
@settings(max_examples=100, deadline=None)
def test_blob_round_trip(data: bytes, zeros: int, chunk_bytes: int) -> None:
    store = MemoryStore()
    data = data[: len(data) // 2] + bytes(zeros) + data[len(data) // 2 :]
    assert read_blob(store, write_blob(store, data, chunk_bytes)) == data


pieces = st.one_of(
    st.tuples(st.just("data"), st.integers(0, 40000)),
    st.tuples(st.just("zero"), st.integers(0, 40000)),
    st.tuples(st.just("hole"), st.integers(0, 100000)),
)
files = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.lists(pieces, max_size=5)), max_size=12)


@given(files, st.sampled_from([(4096, 4096), (16384, 4096), (65536, 32768)]), st.sampled_from([0, 8192, 65536]))
@settings(max_examples=150, deadline=None)
def test_files_cut_and_placed_read_back(
    tree: list[tuple[bytes, list[tuple[str, int]]]], sizes: tuple[int, int], cut_bytes: int
) -> None:
    store = MemoryStore()
    chunk_bytes, piece_bytes = sizes
    cutter = Cutter(store, chunk_bytes=chunk_bytes, piece_bytes=piece_bytes, cut_bytes=cut_bytes)
    made: list[tuple[Inode, bytes]] = []
    for number, (directory, steps) in enumerate(tree):
        inode, model, random = Inode(mode=0o100644), bytearray(), Random(number)
        cutter.begin(inode, directory)
        for kind, size in steps:
            data = random.randbytes(size) if kind == "data" else bytes(size)
            model += data
            if kind == "hole":
                cutter.hole(size)
            else:
                cutter.write(data)
        cutter.end()
        made.append((inode, bytes(model)))
    cutter.finish()
    assert all(0 < len(chunk) <= chunk_bytes and chunk.strip(b"\0") for chunk in store.chunks.values())
    builder = BlockImageBuilder(store)
    starts = []
    for inode, model in made:
        assert sum(extent.block_count for extent in inode.extents) == -(-len(model) // BLOCK_BYTES)
        starts.append(builder.position_blocks)
        for extent in inode.extents:
            builder.append(extent)
    image = BlockImage.open(store, builder.finish())
    for (inode, model), start in zip(made, starts, strict=True):
        assert inode.size_bytes == len(model)
        assert image.read(start * BLOCK_BYTES, len(model)) == model
