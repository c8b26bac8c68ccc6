"""ChunkStore in one process."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.chunkstore import appender, pack
from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import pack_numbers, pack_path
from imaged.chunkstore.refs import Ref, RefTable
from imaged.chunkstore.rows import StoreUsage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    ChunkUnreadableError,
    FormatError,
    InvalidNameError,
    NotFoundError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from imaged.frame import CHUNK_LIMIT_BYTES, HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from tests.support.store_images import block_bytes, noise


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


def some_ref(record: ChunkId) -> Ref:
    return Ref(record=record, created_at=1700000000, source="oci:x", origin="", chunks=3, stored_bytes=99)


def flip(store: ChunkStore, chunk: ChunkId, *, at: int) -> None:
    """Flip one bit of a stored frame, `at` bytes into it."""
    location = store.index.find(chunk)
    assert location is not None
    with pack_path(store.root, location.pack).open("r+b") as file:
        file.seek(location.offset + at)
        byte = file.read(1)
        file.seek(location.offset + at)
        file.write(bytes([byte[0] ^ 1]))


def test_put_is_readable_at_once_and_after_flush(store: ChunkStore) -> None:
    data = [block_bytes(seed) for seed in range(50)]
    ids = [store.put(item) for item in data]
    assert [store.get(chunk) for chunk in ids] == data
    assert [frame.open() for frame in store.frames(ids)] == data
    store.flush()
    assert [store.get(chunk) for chunk in ids] == data
    assert ids == [ChunkId.of(item) for item in data]
    assert [frame.open() for frame in store.frames(ids)] == data


def test_it_survives_closing(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        ids = [store.put(block_bytes(seed)) for seed in range(5)]
    with ChunkStore.open(tmp_path) as store:
        assert [store.get(chunk) for chunk in ids] == [block_bytes(seed) for seed in range(5)]
        assert store.df().chunks == 5


def test_equal_chunks_are_stored_once(store: ChunkStore) -> None:
    for _ in range(3):
        assert store.put(block_bytes(1)) == ChunkId.of(block_bytes(1))
        store.put_frame(Frame.of(block_bytes(1)))
    store.flush()
    store.put(block_bytes(1))
    store.put_frame(Frame.of(block_bytes(1)))
    store.flush()
    frame = store.frame(ChunkId.of(block_bytes(1)))
    assert frame is not None
    assert store.df() == StoreUsage(
        logical_bytes=len(block_bytes(1)), stored_bytes=frame.stored_bytes, chunks=1, packs=1, dead_bytes=0
    )


def test_missing_chunks(store: ChunkStore) -> None:
    here, absent = store.put(b"here"), ChunkId.of(b"absent")
    assert store.has(here)
    assert not store.has(absent)
    assert store.frame(absent) is None
    assert store.sizes(absent) is None
    assert store.missing([absent, here, absent]) == [absent]
    with pytest.raises(ChunkMissingError) as caught:
        store.get(absent)
    assert caught.value.chunk == absent
    assert [frame.header.codec for frame in store.frames([here, absent, here])] == [0, Codec.MISSING, 0]
    store.flush()
    assert store.missing([absent, here]) == [absent]


@pytest.mark.parametrize("data", [b"", bytes(CHUNK_LIMIT_BYTES + 1)])
def test_a_chunk_has_a_length(store: ChunkStore, data: bytes) -> None:
    with pytest.raises(FormatError):
        store.put(data)


def test_the_longest_chunk(store: ChunkStore) -> None:
    data = noise(CHUNK_LIMIT_BYTES)
    chunk = store.put(data)
    store.flush()
    assert store.get(chunk) == data
    assert store.sizes(chunk) == (CHUNK_LIMIT_BYTES, CHUNK_LIMIT_BYTES + HEADER_BYTES)


def test_sizes_of_a_chunk_that_is_being_compressed(store: ChunkStore) -> None:
    chunk = store.put(bytes(65536))
    sizes = store.sizes(chunk)
    assert sizes is not None
    assert sizes[0] == 65536
    assert sizes[1] < 200
    store.flush()
    assert store.sizes(chunk) == sizes


def test_put_frame_keeps_the_compression_it_came_with(store: ChunkStore) -> None:
    data = block_bytes(1)
    frame = Frame(FrameHeader(ChunkId.of(data), Codec.RAW, len(data), len(data)), data)
    store.put_frame(frame)
    assert store.frame(frame.id) == frame
    store.flush()
    assert store.frame(frame.id) == frame
    assert frame != Frame.of(data)


def test_put_frame_refuses_what_does_not_match_its_id(store: ChunkStore) -> None:
    good = Frame.of(block_bytes(1))
    lie = Frame(FrameHeader(ChunkId.of(b"other"), *_fields(good.header)), good.payload)
    for frame in (lie, Frame.missing(good.id), Frame(good.header, good.payload[:-1] + b"\xff")):
        with pytest.raises(ChunkCorruptError):
            store.put_frame(frame)
    store.flush()
    assert store.df().chunks == 0


def _fields(header: FrameHeader) -> tuple[Codec, int, int]:
    return header.codec, header.size_bytes, header.payload_bytes


@pytest.mark.parametrize("at", [0, 4, 8, 12, 20, HEADER_BYTES + 30])
def test_a_flipped_bit_is_an_error_and_the_chunk_can_be_put_again(store: ChunkStore, at: int) -> None:
    chunk, other = store.put(block_bytes(1)), store.put(block_bytes(2))
    store.memos.set("sha256:x", other)
    flip(store, chunk, at=at)
    with pytest.raises(ChunkCorruptError) as caught:
        store.get(chunk)
    assert caught.value.chunk == chunk
    assert not store.has(chunk)
    assert store.memos.get("sha256:x") is None
    assert store.get(other) == block_bytes(2)
    assert store.df().chunks == 1
    assert store.df().dead_bytes > 0
    assert store.put(block_bytes(1)) == chunk
    assert store.get(chunk) == block_bytes(1)
    store.flush()
    assert store.get(chunk) == block_bytes(1)


def test_frames_gives_missing_for_a_damaged_header(store: ChunkStore) -> None:
    chunk = store.put(block_bytes(1))
    store.flush()
    flip(store, chunk, at=20)
    assert [frame.header.codec for frame in store.frames([chunk])] == [Codec.MISSING]
    assert not store.has(chunk)


def test_a_pack_that_is_gone_or_short(store: ChunkStore) -> None:
    first, second = store.put(block_bytes(1)), store.put(block_bytes(2))
    store.flush()
    path = pack_path(store.root, 1)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(ChunkCorruptError):
        store.get(second)
    assert store.get(first) == block_bytes(1)
    path.unlink()
    with ChunkStore.open(store.root, readonly=True) as again, pytest.raises(ChunkCorruptError, match="gone"):
        again.get(first)


def test_a_chunk_that_moves_between_lookup_and_read(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a gc of another process compacts a pack, and removes it."""
    chunk = store.put(b"data" * 1000)
    store.flush()
    found = store.index.find(chunk)
    assert found is not None
    places = [found._replace(pack=99), found]
    monkeypatch.setattr(store.index, "find", lambda _chunk: places.pop(0))
    assert store.get(chunk) == b"data" * 1000
    assert places == []


def test_a_pack_that_comes_back_has_lost_nothing(store: ChunkStore) -> None:
    chunk = store.put(block_bytes(1))
    store.flush()
    path = pack_path(store.root, 1)
    path.rename(path.with_suffix(".away"))
    with ChunkStore.open(store.root) as again, pytest.raises(ChunkUnreadableError):
        again.get(chunk)
    path.with_suffix(".away").rename(path)
    with ChunkStore.open(store.root) as again:
        assert again.get(chunk) == block_bytes(1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_who_has_no_room_to_read_is_not_told_of_damage(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    chunk = store.put(block_bytes(1))
    store.flush()

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(pack.PackReader, "read", fail)
        for read in (store.get, store.frame):
            with pytest.raises(StoreBusyError, match=os.strerror(number)):
                read(chunk)
    assert store.get(chunk) == block_bytes(1)


def test_a_readonly_store_does_not_drop(store: ChunkStore) -> None:
    chunk = store.put(block_bytes(1))
    store.flush()
    flip(store, chunk, at=HEADER_BYTES + 5)
    with ChunkStore.open(store.root, readonly=True) as reader, pytest.raises(ChunkCorruptError):
        reader.get(chunk)
    assert store.has(chunk)


def test_packs_are_sealed_when_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appender, "PACK_LIMIT_BYTES", 40_000)
    with ChunkStore.open(tmp_path) as store:
        ids = [store.put(block_bytes(seed)) for seed in range(80)]
        store.flush()
        rows = store.index.packs()
        assert len(rows) > 3
        assert [row.sealed for row in rows.values()][:-1] == [True] * (len(rows) - 1)
        assert [store.get(chunk) for chunk in ids] == [block_bytes(seed) for seed in range(80)]
        assert store.df().dead_bytes == 0
    assert pack_numbers(tmp_path) == list(rows)


def test_a_torn_tail_is_cut_by_the_next_writer(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        chunk = store.put(block_bytes(1))
    path = pack_path(tmp_path, 1)
    length = path.stat().st_size
    with path.open("ab") as file:
        file.write(Frame.of(block_bytes(2)).pack() + b"pvF1 and half a frame")
    with ChunkStore.open(tmp_path) as store:
        assert store.missing([ChunkId.of(block_bytes(2))])
        other = store.put(block_bytes(3))
        store.flush()
        location = store.index.find(other)
        assert location is not None
        assert (location.pack, location.offset) == (1, length)
        assert store.get(chunk) == block_bytes(1)


def test_two_stores_of_one_process_write_different_packs(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as first, ChunkStore.open(tmp_path) as second:
        a, b = first.put(block_bytes(1)), second.put(block_bytes(2))
        first.flush()
        second.flush()
        assert first.get(b) == block_bytes(2)
        assert second.get(a) == block_bytes(1)
        assert second.df().packs == 2


def test_threads_share_a_store(store: ChunkStore) -> None:
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for seed in range(first, first + 60):
                chunk = store.put(block_bytes(seed % 90))
                assert store.get(chunk) == block_bytes(seed % 90)
                if seed % 20 == 0:
                    store.flush()
                    assert store.index.find(chunk) is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 120, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.flush()
    assert store.df().chunks == 90


def test_the_background_commits_within_seconds(store: ChunkStore) -> None:
    chunk = store.put(block_bytes(1))
    committed = threading.Event()
    for _ in range(100):
        if store.index.find(chunk) is not None:
            committed.set()
            break
        committed.wait(0.1)
    assert committed.is_set()


def test_refs_keep_a_copy(store: ChunkStore) -> None:
    record = store.put(b"record")
    store.refs.set("debian:12", some_ref(record))
    store.refs.set("alpine:latest", some_ref(record))
    assert store.index.find(record) is not None
    assert store.refs.get("debian:12") == some_ref(record)
    assert [name for name, _ in store.refs.items()] == ["alpine:latest", "debian:12"]
    assert RefTable.read_copy(store.root) == dict(store.refs.items())
    assert store.refs.delete("debian:12")
    assert not store.refs.delete("debian:12")
    assert store.refs.get("debian:12") is None
    assert list(RefTable.read_copy(store.root)) == ["alpine:latest"]


@pytest.mark.parametrize("name", ["", "x" * 600])
def test_names_have_a_limit(store: ChunkStore, name: str) -> None:
    with pytest.raises(InvalidNameError):
        store.refs.set(name, some_ref(ChunkId.of(b"")))


def test_memos_and_origins(store: ChunkStore) -> None:
    chunk = store.put(b"layer")
    store.memos.set("sha256:aa", chunk)
    assert store.index.find(chunk) is not None
    assert store.memos.get("sha256:aa") == chunk
    assert list(store.memos.items()) == [("sha256:aa", chunk)]
    assert store.memos.delete("sha256:aa")
    assert store.memos.get("sha256:aa") is None
    store.origins.set(chunk, "http://127.0.0.1:1")
    store.origins.set(chunk, "http://127.0.0.1:2")
    assert store.origins.get(chunk) == "http://127.0.0.1:2"
    assert store.origins.get(ChunkId.of(b"?")) is None


def test_readonly_refuses_every_change(store: ChunkStore) -> None:
    chunk = store.put(b"x")
    store.flush()
    with ChunkStore.open(store.root, readonly=True) as reader:
        assert reader.get(chunk) == b"x"
        for change in (
            lambda: reader.put(b"y"),
            lambda: reader.put_frame(Frame.of(b"y")),
            lambda: reader.refs.set("a:b", some_ref(chunk)),
            lambda: reader.refs.delete("a:b"),
            lambda: reader.memos.set("sha256:x", chunk),
            lambda: reader.origins.set(chunk, "http://x"),
        ):
            with pytest.raises(StoreReadOnlyError):
                change()
        reader.flush()


def test_readonly_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        ChunkStore.open(tmp_path / "none", readonly=True)
    assert not (tmp_path / "none").exists()


def test_a_lost_index_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        store.put(block_bytes(1))
    (tmp_path / INDEX_NAME).unlink()
    for readonly in (False, True):
        with pytest.raises(StoreError, match="the index is gone, 1 packs") as caught:
            ChunkStore.open(tmp_path, readonly=readonly)
        assert "fsck --rebuild" in caught.value.hint


def index_of_many(root: Path) -> Path:
    with ChunkStore.open(root) as store:
        for seed in range(300):
            store.put(block_bytes(seed))
    return root / INDEX_NAME


@pytest.mark.parametrize("pages", [2, 3, 5])
def test_a_truncated_index_is_refused(tmp_path: Path, pages: int) -> None:
    index = index_of_many(tmp_path)
    os.truncate(index, pages * 4096)
    for readonly in (False, True):
        # In a process of its own: mapped, it would end this one.
        program = "import sys; from pathlib import Path; from imaged.chunkstore.store import ChunkStore\n"
        program += f"with ChunkStore.open(Path(sys.argv[1]), readonly={readonly}) as store: list(store.index.chunks())"
        result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
        assert (result.returncode, "StoreError" in result.stderr) == (1, True)
        with pytest.raises(StoreError, match="truncated") as caught:
            ChunkStore.open(tmp_path, readonly=readonly)
        assert "fsck --rebuild" in caught.value.hint
    assert index.stat().st_size == pages * 4096


def test_an_index_that_ends_with_unused_pages_may_be_short(tmp_path: Path) -> None:
    index = index_of_many(tmp_path)
    size = index.stat().st_size
    # As if one transaction had taken more pages and given them back.
    raw = bytearray(index.read_bytes())
    for meta in (0, 4096):
        struct.pack_into("<Q", raw, meta + 136, size // 4096 + 2)
    index.write_bytes(raw)
    with ChunkStore.open(tmp_path, readonly=True) as store:
        assert store.df().chunks == 300
        assert index.stat().st_size == size + 3 * 4096
    with ChunkStore.open(tmp_path) as store:
        store.put(b"more")
    with ChunkStore.open(tmp_path, readonly=True) as store:
        assert store.df().chunks == 301


def test_what_is_not_committed_gives_its_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreFullError("no space")

    store = ChunkStore.open(tmp_path)
    chunk = store.put(block_bytes(1))
    store.flush()
    length = pack_path(tmp_path, 1).stat().st_size
    monkeypatch.setattr(Index, "commit", fail)
    tail = store.put(noise(100_000))
    with pytest.raises(StoreFullError):
        store.flush()
    assert store.get(tail) == noise(100_000)
    assert pack_path(tmp_path, 1).stat().st_size - length > 100_000
    assert store.df().dead_bytes == 0  # the writer may commit it yet
    with pytest.raises(StoreFullError):
        store.close()
    assert pack_path(tmp_path, 1).stat().st_size == length
    monkeypatch.undo()
    with ChunkStore.open(tmp_path) as again:
        assert (again.get(chunk), again.has(tail), again.df().dead_bytes) == (block_bytes(1), False, 0)


def test_one_that_commits_at_flush_keeps_nothing_that_was_put_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaged.chunkstore.writer.COMMIT_BYTES", 1 << 20)
    with ChunkStore.open(tmp_path) as store:
        kept = store.put(block_bytes(1))
    before = pack_path(tmp_path, 1).stat().st_size
    with ChunkStore.open(tmp_path, commit_s=None) as store:
        lost = [store.put(noise(300_000, seed)) for seed in range(20)]
        store.put_frame(Frame.of(noise(1 << 20, 99)))
        assert store.sizes(lost[-1]) is not None  # all are in the pack by now
        assert pack_path(tmp_path, 1).stat().st_size > before + (5 << 20)
        time.sleep(1.5)  # a background commit would have come
        with ChunkStore.open(tmp_path, readonly=True) as other:
            assert other.df().chunks == 1
        assert store.get(lost[0]) == noise(300_000, 0)
    assert pack_path(tmp_path, 1).stat().st_size == before
    with ChunkStore.open(tmp_path, commit_s=None) as store:
        assert (store.get(kept), store.missing(lost)) == (block_bytes(1), lost)
        again = store.put(noise(300_000, 0))
        store.flush()
        store.put(noise(300_000, 1))
    with ChunkStore.open(tmp_path, readonly=True) as store:
        assert (store.has(again), store.df().chunks) == (True, 2)


def test_an_index_that_is_none(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path):
        pass
    (tmp_path / INDEX_NAME).write_bytes(b"x" * 20000)
    with pytest.raises(StoreError, match="damaged"):
        ChunkStore.open(tmp_path)


def test_a_forked_child_may_not_use_it(store: ChunkStore) -> None:
    chunk = store.put(b"x")
    store.flush()
    pid = os.fork()
    if pid == 0:
        try:
            store.get(chunk)
        except StoreError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert store.get(chunk) == b"x"


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = ChunkStore.open(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError):
        store.put(b"x")


def test_a_failed_sync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OSError(5, "Input/output error")

    store = ChunkStore.open(tmp_path)
    chunk = store.put(block_bytes(1))
    monkeypatch.setattr(pack.PackWriter, "sync", fail)
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output"):
            store.flush()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="Input/output"):
        store.put(block_bytes(2))
    with pytest.raises(StoreError, match="Input/output"):
        store.close()
    with ChunkStore.open(tmp_path) as again:
        assert not again.has(chunk)


@pytest.mark.parametrize("row", [b"", b"{", b"[]", b'{"record": "x"}', b"\xff"])
def test_a_damaged_name_can_be_set_and_deleted(store: ChunkStore, row: bytes) -> None:
    record = store.put(b"record")
    store.refs.set("sound:1", some_ref(record))
    store.fills.set(record, 5)

    def damage(name: str) -> None:
        with store.index.write("damage") as txn:
            store.index.put(txn, "refs", name.encode(), row)

    damage("bad:1")
    with pytest.raises(FormatError, match="bad:1"):
        store.refs.get("bad:1")
    with pytest.raises(FormatError, match="bad:1"):
        store.refs.items()
    store.refs.set("sound:2", some_ref(record))
    store.refs.set("bad:1", some_ref(record))
    assert store.refs.get("bad:1") == some_ref(record)
    damage("bad:1")
    store.refs.complete(record)
    assert store.refs.delete("bad:1")
    assert [name for name, _ in store.refs.items()] == ["sound:1", "sound:2"]
    assert RefTable.read_copy(store.root) == dict(store.refs.items())


@pytest.mark.parametrize("which", [0, 1])
def test_an_interrupt_while_its_threads_start_is_only_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    begin, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        if len(begun) == which:
            raise KeyboardInterrupt
        begun.append(thread)
        begin(thread)

    opened = ChunkStore.open(tmp_path / "store", commit_s=None)
    with pytest.raises(KeyboardInterrupt), opened as store, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        store.put(b"x" * 4096)
    assert not any(thread.is_alive() for thread in begun)
    with ChunkStore.open(tmp_path / "store") as store:
        store.put(b"x" * 4096)
