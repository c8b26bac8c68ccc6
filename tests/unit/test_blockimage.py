"""Builder and reader of block images over a store in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from imaged.blockbuilder import BlockImageBuilder, is_zero, write_blob
from imaged.blockformat import IMAGE_LIMIT_BYTES, LEAF_BLOCKS, LEAF_BYTES, NO_LEAF
from imaged.blockimage import BlockImage, Piece, get_many, read_blob
from imaged.errors import ChunkCorruptError, ChunkMissingError, FormatError
from imaged.extent import Extent
from imaged.frame import Frame
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.memory_store import MemoryStore


class CountingStore(MemoryStore):
    """Notes what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.single: list[ChunkId] = []
        self.batches: list[list[ChunkId]] = []

    def get(self, chunk: ChunkId) -> bytes:
        self.single.append(chunk)
        return super().get(chunk)

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        self.batches.append(list(chunks))
        return super().frames(chunks)


def blocks(text: bytes, count: int) -> bytes:
    """`count` blocks that differ from each other and from those of another text."""
    return b"".join((text + b"%06d" % number).ljust(BLOCK_BYTES, b".") for number in range(count))


def build(
    store: MemoryStore, extents: list[Extent], size_bytes: int | None = None, *, leaf_blocks: int = LEAF_BLOCKS
) -> ChunkId:
    builder = BlockImageBuilder(store, leaf_blocks=leaf_blocks)
    for extent in extents:
        builder.append(extent)
    return builder.finish(size_bytes)


def test_append_returns_the_first_block() -> None:
    store = MemoryStore()
    chunk = store.put(blocks(b"a", 4))
    builder = BlockImageBuilder(store)
    assert [builder.append(Extent(count, chunk)) for count in (3, 4, 1)] == [0, 3, 7]
    assert builder.position_blocks == 8
    image = BlockImage.open(store, builder.finish())
    assert image.size_bytes == 8 * BLOCK_BYTES
    assert image.read(0, 1 << 20) == blocks(b"a", 3) + blocks(b"a", 4) + blocks(b"a", 1)


def test_pieces_point_into_chunks_and_stop_at_the_end() -> None:
    store = MemoryStore()
    chunk = store.put(blocks(b"a", 4))
    image = BlockImage.open(store, build(store, [Extent(2, chunk, 1), Extent(3, None)], 5 * BLOCK_BYTES - 100))
    assert image.pieces(10, 1 << 30) == [
        Piece(2 * BLOCK_BYTES - 10, chunk, BLOCK_BYTES + 10),
        Piece(3 * BLOCK_BYTES - 100, None, 0),
    ]
    assert image.pieces(image.size_bytes, 1) == []
    assert image.pieces(1 << 60, 1) == []
    assert image.pieces(0, 0) == []
    assert image.read(image.size_bytes - 1, 50) == b"\0"
    with pytest.raises(ValueError, match="negative"):
        image.pieces(-1, 5)


def test_empty_image() -> None:
    store = MemoryStore()
    image = BlockImage.open(store, build(store, []))
    assert (image.size_bytes, image.read(0, 10), list(image.chunk_ids()), image.leaf_ids()) == (0, b"", [], [])
    image.preload()


def test_adjacent_extents_become_one_entry() -> None:
    store = MemoryStore()
    chunk = store.put(blocks(b"a", 16))
    split = build(store, [Extent(1, chunk, first) for first in range(16)] + [Extent(1, None)] * 5)
    assert split == build(store, [Extent(16, chunk), Extent(5, None)])


def test_holes_store_no_leaf_and_cost_no_reads() -> None:
    store = CountingStore()
    chunk = store.put(blocks(b"a", 1))
    image = BlockImage.open(store, build(store, [Extent(5 * LEAF_BLOCKS, None), Extent(1, chunk)]))
    assert len(store.chunks) == 3
    assert len(image.leaf_ids()) == 1
    store.single.clear()
    assert image.read(4 * LEAF_BYTES, LEAF_BYTES) == bytes(LEAF_BYTES)
    assert (store.single, store.batches) == ([], [])


def test_equal_ranges_share_a_leaf_wherever_they_lie() -> None:
    store = MemoryStore()
    first, second = store.put(blocks(b"a", 128)), store.put(blocks(b"b", 128))
    row = [Extent(128, first), Extent(128, second)] * (LEAF_BLOCKS // 256)
    image = BlockImage.open(store, build(store, [*row, Extent(LEAF_BLOCKS, None), *row]))
    assert len(image.leaf_ids()) == 1
    assert list(image.chunk_ids()) == [first, second]
    assert image.read(2 * LEAF_BYTES, 5) == image.read(0, 5) == b"a0000"


def test_an_extent_across_leaves_is_split() -> None:
    store = MemoryStore()
    chunk = store.put(blocks(b"a", 10))
    image = BlockImage.open(store, build(store, [Extent(LEAF_BLOCKS - 4, None), Extent(10, chunk)]))
    assert image.read(LEAF_BYTES - 4 * BLOCK_BYTES, 1 << 20) == blocks(b"a", 10)
    assert list(image.chunk_ids()) == [chunk]
    assert [piece.length for piece in image.pieces(LEAF_BYTES - 10, 20)] == [10, 10]


@pytest.mark.parametrize("leaf_blocks", [256, 512, 4096])
def test_an_image_reads_the_same_whatever_its_leaves_map(leaf_blocks: int) -> None:
    store = MemoryStore()
    chunks = [store.put(blocks(b"%d" % number, 200)) for number in range(30)]
    extents = [extent for chunk in chunks for extent in (Extent(200, chunk), Extent(100, None))]
    image = BlockImage.open(store, build(store, extents, leaf_blocks=leaf_blocks))
    assert len(image.root.leaves) == -(-9000 // leaf_blocks)
    assert list(image.chunk_ids()) == chunks
    expected = b"".join(store.get(chunk) + bytes(100 * BLOCK_BYTES) for chunk in chunks)
    assert image.read(0, image.size_bytes) == expected
    assert set(image.way(0, image.size_bytes)) == {*image.leaf_ids(), *chunks}


def test_an_update_of_one_range_writes_one_leaf() -> None:
    store = MemoryStore()
    chunks = [store.put(blocks(b"%d" % number, 256)) for number in range(16)]
    extents = [Extent(256, chunk) for chunk in chunks * 4]
    build(store, extents)
    before = set(store.chunks)
    extents[20] = Extent(256, chunks[0])
    build(store, extents)
    assert len(set(store.chunks) - before) == 2, "one leaf and the root"


def test_last_block_of_a_short_chunk_reads_as_zeros() -> None:
    store = MemoryStore()
    short = store.put(b"x" * 5000)
    image = BlockImage.open(store, build(store, [Extent(2, short), Extent(1, short)]))
    assert image.read(0, 1 << 20) == b"x" * 5000 + bytes(3192) + b"x" * 4096


def test_a_chunk_shorter_than_its_entry_is_an_error() -> None:
    store = MemoryStore()
    image = BlockImage.open(store, build(store, [Extent(3, store.put(b"x" * 5000))]))
    assert image.read(0, 8192) == b"x" * 5000 + bytes(3192)
    with pytest.raises(FormatError, match="at least 12288 bytes"):
        image.read(0, 12288)


def test_a_read_asks_once_for_all_its_chunks() -> None:
    store = CountingStore()
    chunks = [store.put(blocks(b"%d" % number, 16)) for number in range(6)]
    extents = [Extent(LEAF_BLOCKS - 48, None), *(Extent(16, chunk) for chunk in chunks), Extent(16, chunks[0])]
    image = BlockImage.open(store, build(store, extents))
    store.single.clear()
    image.read(LEAF_BYTES - 48 * BLOCK_BYTES, 112 * BLOCK_BYTES)
    assert [len(batch) for batch in store.batches] == [2, 6], "two leaves, then six chunks"
    image.read(LEAF_BYTES, BLOCK_BYTES)
    assert store.single == [chunks[3]]


def test_preload_fetches_every_leaf_in_one_request() -> None:
    store = CountingStore()
    chunks = [store.put(blocks(b"%d" % number, 1)) for number in range(5)]
    extents = [extent for chunk in chunks for extent in (Extent(1, chunk), Extent(LEAF_BLOCKS - 1, None))]
    image = BlockImage.open(store, build(store, extents))
    image.preload()
    assert store.batches == [image.leaf_ids()]
    assert list(image.chunk_ids()) == chunks
    assert len(store.batches) == 1, "leaves are kept"


def test_leaf_cache_is_bounded_by_bytes() -> None:
    store = CountingStore()
    chunks = [store.put(blocks(b"%d" % number, 1)) for number in range(4)]
    extents = [extent for chunk in chunks for extent in (Extent(1, chunk), Extent(LEAF_BLOCKS - 1, None))]
    image = BlockImage.open(store, build(store, extents), cache_bytes=100)
    store.single.clear()
    for index in (0, 1, 1, 2, 0):
        assert image.read(index * LEAF_BYTES, 1) == b"%d" % index
    leaves = image.leaf_ids()
    asked = [chunk for chunk in store.single if chunk in leaves]
    assert asked == [leaves[index] for index in (0, 1, 2, 0)], "100 bytes hold two leaves of 50"


def test_a_leaf_of_the_wrong_length_is_refused() -> None:
    store = MemoryStore()
    chunk = store.put(blocks(b"a", 2))
    short = BlockImage.open(store, build(store, [Extent(1, chunk)])).leaf_ids()[0]
    root = store.get(build(store, [Extent(2, chunk)]))
    forged = BlockImage.open(store, store.put(root[:24] + short))
    with pytest.raises(FormatError, match="expected 2 blocks, found 1"):
        forged.read(0, 1)
    with pytest.raises(FormatError, match="expected 2 blocks, found 1"):
        list(forged.chunk_ids())


def test_a_chunk_that_is_no_root_is_refused() -> None:
    store = MemoryStore()
    with pytest.raises(FormatError, match="block image root"):
        BlockImage.open(store, store.put(b"hello"))


def test_a_missing_chunk_is_named() -> None:
    store = MemoryStore()
    present, absent = store.put(blocks(b"a", 1)), store.put(blocks(b"b", 1))
    image = BlockImage.open(store, build(store, [Extent(1, present), Extent(1, absent)]))
    del store.chunks[absent]
    for length in (2 * BLOCK_BYTES, BLOCK_BYTES + 1):
        with pytest.raises(ChunkMissingError) as caught:
            image.read(0, length)
        assert caught.value.chunk == absent
    assert image.read(0, BLOCK_BYTES) == blocks(b"a", 1)


def test_a_frame_for_another_chunk_is_refused() -> None:
    class Swapping(MemoryStore):
        def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
            return super().frames(list(reversed(chunks)))

    store = Swapping()
    with pytest.raises(ChunkCorruptError, match="came in its place"):
        get_many(store, [store.put(b"a"), store.put(b"b")])


def test_a_reader_of_many_chunks_is_used() -> None:
    class Many(MemoryStore):
        def get_many(self, chunks: Sequence[ChunkId]) -> dict[ChunkId, bytes]:
            return {chunk: self.chunks[chunk] for chunk in chunks}

        def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
            raise AssertionError("frames need not be made")

    store = Many()
    image = BlockImage.open(store, build(store, [Extent(1, store.put(text)) for text in (b"a", b"b")]))
    assert image.read(0, 4097) == b"a" + bytes(4095) + b"b"


@pytest.mark.parametrize(
    "extent",
    [
        Extent(0, None),
        Extent(-1, None),
        Extent(1, None, 1),
        Extent(1, ChunkId.of(b""), -1),
        Extent(2, ChunkId.of(b""), 255),
    ],
)
def test_an_impossible_extent_is_refused(extent: Extent) -> None:
    with pytest.raises(FormatError, match="extent"):
        BlockImageBuilder(MemoryStore()).append(extent)


def test_too_long_an_image_is_refused_at_once() -> None:
    builder = BlockImageBuilder(MemoryStore())
    with pytest.raises(FormatError, match="at most"):
        builder.append(Extent(1 << 60, None))
    assert builder.position_blocks == 0


def test_the_longest_image_builds_and_reads() -> None:
    store = MemoryStore()
    image = BlockImage.open(store, build(store, [Extent(IMAGE_LIMIT_BYTES // BLOCK_BYTES, None)], leaf_blocks=4096))
    assert image.size_bytes == IMAGE_LIMIT_BYTES
    assert image.read(IMAGE_LIMIT_BYTES - 10, 100) == bytes(10)


@pytest.mark.parametrize("size_bytes", [0, BLOCK_BYTES, 2 * BLOCK_BYTES + 1])
def test_a_size_outside_the_last_block_is_refused(size_bytes: int) -> None:
    with pytest.raises(FormatError, match="ends in block 1"):
        build(MemoryStore(), [Extent(2, None)], size_bytes)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 3 << 20, (3 << 20) + 1])
def test_blob_round_trip_and_sizes(size: int) -> None:
    store = CountingStore()
    data = Random(size).randbytes(size)
    blob = write_blob(store, data)
    assert read_blob(store, blob) == data
    assert len(store.single) + len(store.batches) <= 3
    assert write_blob(store, data, chunk_bytes=4096) not in (None, blob) or size <= 4096
    if size:
        assert len(store.chunks[list(BlockImage.open(store, blob).chunk_ids())[-1]]) == (size - 1) % (1 << 20) + 1


def test_blob_zeros_are_not_stored() -> None:
    store = MemoryStore()
    blob = write_blob(store, bytes(8192) + b"x" + bytes(20000), chunk_bytes=4096)
    assert read_blob(store, blob) == bytes(8192) + b"x" + bytes(20000)
    assert len(store.chunks) == 3, "one chunk, one leaf, one root"
    assert read_blob(store, write_blob(store, bytes(100 << 20))) == bytes(100 << 20)
    assert NO_LEAF not in store.chunks


@pytest.mark.parametrize("chunk_bytes", [0, 100, 4095, (1 << 20) + 4096])
def test_blob_chunk_size_is_checked(chunk_bytes: int) -> None:
    with pytest.raises(FormatError, match="chunk size"):
        write_blob(MemoryStore(), b"x", chunk_bytes)


def test_blob_limit() -> None:
    store = MemoryStore()
    huge = build(store, [Extent(IMAGE_LIMIT_BYTES // BLOCK_BYTES, None)], leaf_blocks=4096)
    with pytest.raises(FormatError, match="blob"):
        read_blob(store, huge)


def test_is_zero() -> None:
    assert is_zero(b"")
    assert is_zero(bytes(1 << 20))
    assert is_zero(memoryview(bytes(100)))
    assert not is_zero(bytes(99) + b"x")


def test_threads_share_an_image() -> None:
    store = MemoryStore()
    chunks = [store.put(blocks(b"%d" % number, 1)) for number in range(32)]
    extents = [extent for chunk in chunks for extent in (Extent(1, chunk), Extent(LEAF_BLOCKS - 1, None))]
    image = BlockImage.open(store, build(store, extents), cache_bytes=300)

    def check(seed: int) -> None:
        random = Random(seed)
        for _ in range(200):
            index = random.randrange(31)
            assert image.read(index * LEAF_BYTES, 6) == (b"%d000000" % index)[:6]
            assert image.read((index + 1) * LEAF_BYTES - 1, 7) == b"\0" + (b"%d000000" % (index + 1))[:6]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(4)))


def test_the_id_of_an_image_never_changes() -> None:
    """Ids are stored and shared; another id here means another format, which needs another magic."""
    blob = write_blob(MemoryStore(), b"".join(b"%08d" % number for number in range(300_000)))
    assert str(blob) == "bf06155579ad131bccdd3439c7bb1ef9a6fdb2efc9dddab0725bcaf46813cb61"
