from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuse import files as files_module
from fuse.files import BlockFiles
from imaged.blockbuilder import BlockImageBuilder
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkMissingError, FormatError, NotFoundError
from imaged.extent import Extent
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import BLOCK_BYTES, ChunkId
from tests.support.crooked import Crooked, crooked_server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def files(store: ChunkStore) -> Iterator[BlockFiles]:
    fetcher = Fetcher(store)
    made = BlockFiles(fetcher)
    yield made
    made.close()
    fetcher.close()


def block_bytes(seed: int) -> bytes:
    return random.Random(seed).randbytes(4 * BLOCK_BYTES)


def build(store: ChunkStore, seeds: range) -> tuple[ChunkId, bytes]:
    """A block image with a hole after each chunk, and its bytes."""
    builder = BlockImageBuilder(store)
    content = b""
    for seed in seeds:
        data = block_bytes(seed)
        builder.append(Extent(len(data) // BLOCK_BYTES, store.put(data)))
        builder.append(Extent(1, None))
        content += data + bytes(BLOCK_BYTES)
    return builder.finish(), content


def test_reads_anywhere_are_what_the_image_holds(store: ChunkStore, files: BlockFiles) -> None:
    image, content = build(store, range(8))
    file = files.file(files.open(str(image)))
    assert file.size_bytes == len(content)
    choose = random.Random(1)
    for _ in range(100):
        offset, length = choose.randrange(len(content) + 100), choose.randrange(70000)
        assert file.read(offset, length) == content[offset : offset + length]


@pytest.mark.parametrize("name", ["", "x", "../etc/passwd", "0" * 63, "A" * 64])
def test_what_is_not_an_id_is_no_file(files: BlockFiles, name: str) -> None:
    with pytest.raises(NotFoundError, match="not a block image id"):
        files.lookup(name)


def test_what_nobody_has_and_what_is_no_root_are_no_files(store: ChunkStore, files: BlockFiles) -> None:
    with pytest.raises(NotFoundError, match="no block image"):
        files.lookup("ab" * 32)
    with pytest.raises(NotFoundError, match="no block image"):
        files.lookup(str(store.put(b"just a chunk" * 100)))


def test_a_lost_chunk_is_an_error_and_no_bytes(store: ChunkStore, files: BlockFiles) -> None:
    builder = BlockImageBuilder(store)
    builder.append(Extent(4, store.put(block_bytes(1))))
    builder.append(Extent(4, ChunkId(b"\1" * 32)))
    file = files.file(files.open(str(builder.finish())))
    assert file.read(0, 4 * BLOCK_BYTES) == block_bytes(1)
    with pytest.raises(ChunkMissingError):
        file.read(3 * BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_a_short_answer_of_the_image_is_an_error(
    store: ChunkStore, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, _ = build(store, range(2))
    file = files.file(files.open(str(image)))
    monkeypatch.setattr(type(file.image), "read", lambda self, offset, length: b"short")
    with pytest.raises(FormatError, match="expected 4096 bytes, found 5"):
        file.read(0, 4096)


def test_reads_count_for_the_image_that_was_opened(store: ChunkStore, files: BlockFiles) -> None:
    block_image, _ = build(store, range(2))
    use = files.use(ChunkId(b"\7" * 32), "debian:12")
    files.assign(block_image, use.tally)
    handle = files.open(str(block_image))
    files.file(handle).read(0, 4096)
    files.release(handle)
    row = files.status()[str(use.id)]
    assert (row["name"], row["reads"], row["fetched_chunks"]) == ("debian:12", 1, 0)
    assert row["hits"] > 0
    assert files.use(use.id, "other:1").tally is use.tally
    assert files.status()[str(use.id)]["name"] == "other:1"


def test_a_file_that_is_open_keeps_its_counters(store: ChunkStore, files: BlockFiles) -> None:
    block_image, _ = build(store, range(2))
    handle = files.open(str(block_image))
    held = files.file(handle)
    assert files.assign(block_image, Tally()) is held
    files.release(handle)
    tally = Tally()
    assert files.assign(block_image, tally).tally is tally


def test_idle_files_are_forgotten_and_open_ones_are_not(
    store: ChunkStore, files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_IDLE_FILES", 2)
    ids = [str(build(store, range(n, n + 1))[0]) for n in range(5)]
    handle = files.open(ids[0])
    for name in ids[1:]:
        files.release(files.open(name))
    assert files.names() == [ids[0], ids[3], ids[4]]
    files.release(handle)
    assert files.names() == ids[3:]
    with pytest.raises(KeyError):
        files.file(handle)


@pytest.fixture
def server() -> Iterator[Crooked]:
    with crooked_server() as crooked:
        yield crooked


def test_a_long_run_is_read_ahead_on_connections_of_its_own(store: ChunkStore, server: Crooked, tmp_path: Path) -> None:
    """A window in one request, and nothing more than the image once."""
    block_image, content = build(store, range(400))
    image = BlockImage.open(store, block_image)
    for chunk in [block_image, *image.leaf_ids(), *image.chunk_ids()]:
        server.add(store.get(chunk))
    with ChunkStore.open(tmp_path / "cache") as cache:
        fetcher = Fetcher(cache, [HttpUpstream(server.url)])
        opened = BlockFiles(fetcher)
        file = opened.file(opened.open(str(block_image)))
        step = 32 << 10
        assert b"".join(file.read(at, step) for at in range(0, len(content), step)) == content
        opened.close()
        fetcher.close()
    assert len(server.asked) == len(set(server.asked)) == len(server.chunks)
    assert server.requests < len(server.chunks) // 3


def test_reading_ahead_of_what_is_local_asks_nobody(store: ChunkStore, files: BlockFiles) -> None:
    block_image, content = build(store, range(300))
    file = files.file(files.open(str(block_image)))
    assert b"".join(file.read(at, 32 << 10) for at in range(0, len(content), 32 << 10)) == content
    row = files.status()[str(block_image)]
    assert (row["requests"], row["fetched_chunks"]) == (0, 0)
