"""The first answer of a server about an image: what is believed of it, and what becomes of the rest."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imaged.blockbuilder import BlockImageBuilder
from imaged.blockimage import BLOB_LIMIT_BYTES, BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import FormatError, UpstreamError
from imaged.extent import Extent
from imaged.fetching.boot import Ahead, recall
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.profile import Profile
from imaged.record import ImageRecord
from imaged.transfer.pull import pull_image
from tests.support.crooked import FAST, Crooked
from tests.support.synthetic import Synthetic, add_image

pytest_plugins = ("tests.support.fetching",)
ONCE = RetryPolicy(total_s=0.0)


@contextlib.contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[HttpUpstream]:
    """Each connection gets one request answered; it is over when the client hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            answer(connection)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    with HttpUpstream(f"http://127.0.0.1:{listener.getsockname()[1]}", retry=ONCE) as upstream:
        yield upstream
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def head(record: ImageRecord, *, frames: int, length: int | None = None) -> bytes:
    document = json.dumps({"name": "app:1", "id": str(record.id), "frames": frames})
    stated = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 200 OK\r\nPvisor-Image: {document}\r\n{stated}\r\n".encode()


@pytest.fixture
def image(tmp_path: Path, server: Crooked) -> Synthetic:
    """At a server that gives its chunks."""
    with ChunkStore.open(tmp_path / "origin") as origin:
        made = add_image(origin, "app:1", chunks=8)
        for chunk, _ in list(origin.index.chunks()):
            server.chunks[chunk] = origin.get(chunk)
    return made


@pytest.fixture
def fetcher(store: ChunkStore, server: Crooked) -> Iterator[Fetcher]:
    made = Fetcher(store, [HttpUpstream(server.url)], retry=FAST)
    yield made
    made.close()


def test_frames_without_end_break_off_and_the_image_starts(
    fetcher: Fetcher, image: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaged.fetching.bootstream._FIRST_LIMIT_BYTES", 300_000)
    broke = threading.Event()

    def endless(connection: socket.socket) -> None:
        try:
            connection.sendall(head(image.record, frames=10**9) + Frame.of(image.record.to_bytes()).pack())
            while True:
                connection.sendall(Frame.of(os.urandom(5000)).pack())
        except OSError:
            broke.set()
            raise

    tally = Tally()
    with raw_server(endless) as upstream:
        pulled = pull_image(fetcher, upstream, "app:1", lazy=True, tally=tally)
        assert broke.wait(30)
    assert pulled.id == image.id
    assert tally.fetched_bytes < 2 * 300_000 + len(image.metadata)


@pytest.mark.parametrize("shape", ["trickle", "cut"])
def test_an_answer_that_does_not_end_breaks_off_and_the_rest_comes_singly(
    fetcher: Fetcher, image: Synthetic, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr("imaged.fetching.bootstream._FIRST_LIMIT_S", 1.5)
    go_on = threading.Event()
    frame = Frame.of(os.urandom(5000)).pack()

    def answer(connection: socket.socket) -> None:
        length = 10**6 if shape == "cut" else None
        raw = head(image.record, frames=9, length=length) + Frame.of(image.record.to_bytes()).pack()
        connection.sendall(raw + frame + frame[:100])
        while shape == "trickle" and not go_on.wait(0.05):
            connection.sendall(b"x")

    with raw_server(answer) as upstream:
        assert pull_image(fetcher, upstream, "app:1", lazy=True).id == image.id
        go_on.set()


def test_status_304_to_who_knows_nothing(fetcher: Fetcher) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 304 Not Modified\r\n\r\n")

    with raw_server(answer) as upstream, pytest.raises(UpstreamError, match="304"):
        pull_image(fetcher, upstream, "app:1", lazy=True)


def flipped(frame: Frame) -> bytes:
    raw = frame.pack()
    return raw[:-1] + bytes([raw[-1] ^ 1])


@pytest.mark.parametrize(
    ("wrong", "says"), [("bits", "do not match the id|zstd"), ("other", "expected id"), ("text", "image record")]
)
def test_a_record_that_is_not_what_it_should_be_names_the_server(
    fetcher: Fetcher, image: Synthetic, wrong: str, says: str
) -> None:
    """As a failure of that server, so that the next one is asked."""
    sound = image.record
    sent = {
        "bits": flipped(Frame.of(sound.to_bytes())),
        "other": Frame.of(replace(sound, entries=sound.entries + 1).to_bytes()).pack(),
        "text": Frame.of(b"no record").pack(),
    }[wrong]

    def answer(connection: socket.socket) -> None:
        connection.sendall(head(sound, frames=1, length=len(sent)) + sent)

    with raw_server(answer) as upstream, pytest.raises(UpstreamError, match=says) as caught:
        pull_image(fetcher, upstream, "app:1", lazy=True)
    assert caught.value.message.startswith(f"{upstream.url}: image app:1: ")
    assert "pvisor image verify" in caught.value.hint


def test_a_corrupt_chunk_of_a_boot_answer_names_the_server(
    fetcher: Fetcher, image: Synthetic, caplog: pytest.LogCaptureFixture
) -> None:
    frames = Frame.of(image.record.to_bytes()).pack() + flipped(Frame.of(os.urandom(5000)))

    def answer(connection: socket.socket) -> None:
        connection.sendall(head(image.record, frames=2, length=len(frames)) + frames)

    with raw_server(answer) as upstream:
        assert pull_image(fetcher, upstream, "app:1", lazy=True).id == image.id
    assert f"{upstream.url}: image app:1: chunk " in caplog.text


def test_metadata_that_says_to_be_huge_is_refused_before_its_chunks_are_listed(
    fetcher: Fetcher, image: Synthetic, server: Crooked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(tmp_path / "huge") as store:
        builder = BlockImageBuilder(store)
        builder.append(Extent(BLOB_LIMIT_BYTES // BLOCK_BYTES + 1, None))
        huge = builder.finish()
        root = server.add(store.get(huge))
    record = ImageRecord(
        metadata=root, metadata_bytes=1, data=image.record.data, data_bytes=1, entries=1, platform="linux/amd64"
    )

    def listed(self: BlockImage) -> Iterator[ChunkId]:
        raise AssertionError("its chunks were listed")

    monkeypatch.setattr(BlockImage, "chunk_ids", listed)

    def answer(connection: socket.socket) -> None:
        frame = Frame.of(record.to_bytes()).pack()
        connection.sendall(head(record, frames=1, length=len(frame)) + frame)

    with raw_server(answer) as upstream, pytest.raises(FormatError, match="at most"):
        pull_image(fetcher, upstream, "app:1", lazy=True)


# Behind the start


def test_what_is_planned_runs_on_a_bounded_number_of_threads(fetcher: Fetcher) -> None:
    release, started, done = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        started.release()
        release.wait(60)
        done.release()

    before = threading.active_count()
    for _ in range(200):
        ahead = Ahead()
        ahead.plan(fetcher, work)
        ahead.start()
    assert started.acquire(timeout=30)
    assert threading.active_count() - before <= 40
    release.set()
    for _ in range(200):
        assert done.acquire(timeout=30)


def test_nothing_is_planned_after_the_end(fetcher: Fetcher) -> None:
    fetcher.close()
    ran = []
    ahead = Ahead()
    ahead.plan(fetcher, lambda: ran.append(True))
    ahead.start()
    fetcher._prefetches.close()
    assert ran == []


def test_a_local_profile_brings_only_what_is_of_the_image(store: ChunkStore) -> None:
    made = add_image(store, "app:1", chunks=8)
    other = store.put(b"of another image" * 100)
    own = list(BlockImage.open(store, made.record.data).chunk_ids())[:3]
    leaf = BlockImage.open(store, made.record.data).leaf_ids()[0]
    store.profiles.offer(made.record.data, Profile().merged([other, leaf, *own]))
    fetcher = Fetcher(store)
    done = threading.Event()
    ahead = Ahead()
    recall(fetcher, made.record.data, ahead)
    ahead.start()
    fetcher.behind(done.set)
    fetcher._prefetches.close()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]:
        thread.join(30)
    assert done.is_set()
    assert all(chunk in fetcher._memory for chunk in own)
    assert other not in fetcher._memory
    fetcher.close()


def test_those_who_load_at_once_share_a_room(store: ChunkStore) -> None:
    """So that none drives out of memory what another has just loaded."""
    chunks = [store.put(os.urandom(1000)) for _ in range(40)]
    fetcher = Fetcher(store, memory_bytes=20_000)
    nested: list[ChunkId] = []

    def first() -> Iterator[ChunkId]:
        yield from chunks[:8]
        fetcher.load(chunks[20:])
        nested.extend(chunk for chunk in chunks[20:] if chunk in fetcher._memory)

    fetcher.load(first())
    assert nested == chunks[20:22]
    assert fetcher._memory.size_bytes == 10_000
    assert fetcher._loading_bytes == 0
    fetcher.close()
