"""Frames made shorter in place: the same chunks, fewer bytes, nothing lost whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.errors import StoreFullError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.serving.denser import Denser, densify
from tests.integration.test_store_limits import file_system, fill

ROOT = Path(__file__).parents[3]
KILLED = """
import os, signal, sys
from pathlib import Path
from imaged.serving.denser import densify
from imaged.chunkstore.store import ChunkStore

def until_killed(chunks, count):
    yield from chunks[:count]
    os.kill(os.getpid(), signal.SIGKILL)

with ChunkStore.open(Path(sys.argv[1])) as store:
    densify(store, until_killed([chunk for chunk, _ in store.index.chunks()], int(sys.argv[2])))
"""


def text(seed: int, words: int = 4000) -> bytes:
    """Data that a harder level makes shorter."""
    random = Random(seed)
    return b" ".join(b"word%d" % random.randrange(900) for _ in range(words))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


def put(store: ChunkStore, *data: bytes) -> list[ChunkId]:
    chunks = [store.put(one) for one in data]
    store.flush()
    return chunks


def stored(store: ChunkStore, chunk: ChunkId) -> int:
    found = store.sizes(chunk)
    assert found is not None
    return found[1]


def test_frames_get_shorter_and_chunks_stay(store: ChunkStore) -> None:
    data = [text(seed) for seed in range(20)]
    chunks = put(store, *data)
    before = [stored(store, chunk) for chunk in chunks]
    done = densify(store, chunks)
    after = [stored(store, chunk) for chunk in chunks]
    assert done.chunks == 20
    assert done.saved_bytes == sum(before) - sum(after) > sum(before) // 20
    assert [store.get(chunk) for chunk in chunks] == data
    assert [frame.open() for frame in store.frames(chunks)] == data
    assert store.packed_cached(chunks[0]) == Frame.of(data[0], level=19).pack()


def test_the_store_is_sound_and_counts_right_afterwards(tmp_path: Path, store: ChunkStore) -> None:
    chunks = put(store, *(text(seed) for seed in range(5)))
    usage = store.df()
    done = densify(store, chunks)
    now = store.df()
    assert (now.chunks, now.logical_bytes) == (usage.chunks, usage.logical_bytes)
    assert now.stored_bytes == usage.stored_bytes - done.saved_bytes
    store.close()
    report = check(tmp_path / "store")
    assert (report.errors, report.chunks) == ([], 5)
    assert check(tmp_path / "store", rebuild=True).errors == []


def test_what_gains_nothing_keeps_its_frame(store: ChunkStore) -> None:
    chunks = put(store, os.urandom(30000), b"short", bytes([7]) * 5000)
    places = [store.index.find(chunk) for chunk in chunks]
    assert densify(store, chunks) == (0, 0)
    assert [store.index.find(chunk) for chunk in chunks] == places


def test_a_second_time_changes_nothing(store: ChunkStore) -> None:
    chunks = put(store, text(1))
    assert densify(store, chunks).chunks == 1
    assert densify(store, chunks).chunks == 0


def test_absent_and_damaged_chunks_are_passed_over(store: ChunkStore) -> None:
    sound, damaged = put(store, text(1), text(2))
    location = store.index.find(damaged)
    assert location is not None
    pack = next((store.root / "packs").glob("*.pack"))
    with pack.open("r+b") as file:
        file.seek(location.offset + 60)
        file.write(b"\xff\xff\xff\xff")
    assert densify(store, [ChunkId.of(b"absent"), damaged, sound]).chunks == 1
    assert store.get(sound) == text(1)
    assert not store.has(damaged), "dropped, as by any reader"


def test_a_reader_with_the_old_place_reads_on(store: ChunkStore) -> None:
    (chunk,) = put(store, text(1))
    old = store.index.find(chunk)
    assert old is not None
    densify(store, [chunk])
    frame = store._read(chunk, old)
    assert frame.open() == text(1)


@pytest.mark.root
def test_a_full_disk_leaves_every_chunk_readable(tmp_path: Path) -> None:
    data = [text(seed) for seed in range(40)]
    with file_system(tmp_path, "tmpfs", 16) as directory, ChunkStore.open(directory / "store") as store:
        chunks = put(store, *data)
        fill(directory / "ballast")
        with pytest.raises(StoreFullError):
            densify(store, chunks)
        assert [store.get(chunk) for chunk in chunks] == data
        (directory / "ballast").unlink()
        assert densify(store, chunks).chunks == 40
        assert [store.get(chunk) for chunk in chunks] == data


@pytest.mark.parametrize("appended", [0, 1, 7, 29])
def test_kill_9_leaves_one_frame_or_the_other(tmp_path: Path, appended: int) -> None:
    data = [text(seed) for seed in range(30)]
    with ChunkStore.open(tmp_path / "store") as store:
        chunks = put(store, *data)
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "store", str(appended)], cwd=ROOT)
    assert child.wait(60) == -signal.SIGKILL
    assert check(tmp_path / "store").errors == []
    with ChunkStore.open(tmp_path / "store") as store:
        assert [store.get(chunk) for chunk in chunks] == data
        assert densify(store, chunks).chunks == 30
    assert check(tmp_path / "store").errors == []


def test_in_the_background(store: ChunkStore) -> None:
    data = [text(seed) for seed in range(10)]
    chunks = put(store, *data)
    before = store.df().stored_bytes
    with Denser(store) as denser:
        denser.add(chunks[:5])
        denser.add(chunks)
        assert denser.wait(30)
        denser.add(chunks)
        assert denser.wait(0), "what was tried is not queued again"
    assert store.df().stored_bytes < before
    assert [store.get(chunk) for chunk in chunks] == data
    denser.add(put(store, text(99)))
    assert denser.wait(0), "nothing is taken on after the end"


def test_what_failed_is_tried_again(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = put(store, text(1))
    before = store.df().stored_bytes

    def full(store: ChunkStore, chunks: object) -> None:
        raise StoreFullError("no room")

    with Denser(store) as denser:
        with monkeypatch.context() as failing:
            failing.setattr("imaged.serving.denser.densify", full)
            denser.add(chunks)
            assert denser.wait(30)
        denser.add(chunks)
        assert denser.wait(30)
    assert store.df().stored_bytes < before
