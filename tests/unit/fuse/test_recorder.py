"""Recording runs: what counts as a touch, when a run is over, and what is kept of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuse import recorder
from fuse.files import BlockFile, BlockFiles
from fuse.recorder import LONGEST_S, MEMORY_LONGEST_S, QUIET_S, MemoryRecording, Recorder, Recording
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import UpstreamError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.ids import ChunkId
from imaged.profile import Profile
from tests.support.synthetic import Synthetic, add_image

CHUNK = 65536


def unknown(chunk: ChunkId) -> None:
    """As if nothing was stored: a chunk then counts as what was read of it."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def image(store: ChunkStore) -> Synthetic:
    return add_image(store, "app:v1", chunks=80)


@pytest.fixture
def fetcher(store: ChunkStore) -> Iterator[Fetcher]:
    made = Fetcher(store)
    yield made
    made.close()


@pytest.fixture
def file(fetcher: Fetcher, image: Synthetic) -> Iterator[BlockFile]:
    files = BlockFiles(fetcher)
    yield files.assign(image.record.data, Tally())
    files.close()


def recorded(file: BlockFile) -> tuple[Recording, list[Recording]]:
    """A recording of the file, and where it says that it began."""
    begun: list[Recording] = []
    file.recording = Recording(ChunkId.of(b"image"), file, begun.append)
    return file.recording, begun


def way(file: BlockFile, *numbers: int) -> list[ChunkId]:
    """Leaves and chunks on the way to these chunks of the image, in order of first touch."""
    found: dict[ChunkId, None] = {}
    for number in numbers:
        found.update(dict.fromkeys(file.image.way(number * CHUNK, 1)))
    return list(found)


def test_what_is_read_is_noted_in_order_of_first_touch_with_its_leaves(store: ChunkStore, file: BlockFile) -> None:
    recording, begun = recorded(file)
    for number in (70, 3, 70, 2):
        file.read(number * CHUNK + 5, 10)
    file.read(3 * CHUNK - 1, 2)
    assert recording.touched(unknown) == way(file, 70, 3, 2)
    leaves = BlockImage.open(store, file.image.id).leaf_ids()
    assert [chunk for chunk in recording.touched(unknown) if chunk in leaves] == [
        leaves[70 * CHUNK // (2 << 20)],
        leaves[0],
    ]
    assert begun == [recording]


def test_holes_and_reads_past_the_end_touch_nothing(file: BlockFile) -> None:
    recording, _ = recorded(file)
    file.read(file.size_bytes, 10)
    assert recording.touched(unknown) == []
    file.read(file.size_bytes - 1, 10)
    assert recording.touched(unknown) == way(file, 79)


def test_reading_ahead_is_no_touch(file: BlockFile) -> None:
    """Whoever reads from front to back is read ahead of by a megabyte or more."""
    recording, _ = recorded(file)
    for number in range(40):
        file.read(number * CHUNK, CHUNK)
    assert recording.touched(unknown) == way(file, *range(40))


def test_a_read_that_fails_was_a_touch(store: ChunkStore, file: BlockFile) -> None:
    recording, _ = recorded(file)
    *_, chunk = file.image.way(7 * CHUNK, 1)
    location = store.index.find(chunk)
    assert location is not None
    store.index.drop([(chunk, location)], forget_memos=False)
    with pytest.raises(Exception, match=str(chunk)):
        file.read(7 * CHUNK, 10)
    assert recording.touched(unknown) == way(file, 7)


def test_threads_note_every_read(file: BlockFile) -> None:
    recording, begun = recorded(file)
    barrier = threading.Barrier(8)

    def read(thread: int) -> None:
        barrier.wait(10)
        for number in range(thread, 80, 8):
            file.read(number * CHUNK, 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert set(recording.touched(unknown)) == set(way(file, *range(80)))
    assert set(begun) == {recording}


def test_a_run_is_over_when_nothing_was_read_for_a_while(file: BlockFile) -> None:
    recording, _ = recorded(file)
    recording.note(0, 1)
    recording.start(100.0)
    assert not recording.is_over(100.0 + QUIET_S / 2)
    assert not recording.is_over(100.0 + QUIET_S)
    recording.note(CHUNK, 1)
    assert not recording.is_over(100.1 + 2 * QUIET_S)
    assert recording.is_over(100.2 + 3 * QUIET_S)


def test_a_run_that_never_rests_is_over_after_a_while(file: BlockFile) -> None:
    recording, _ = recorded(file)
    recording.start(0.0)
    now_s = 0.0
    while now_s < LONGEST_S - QUIET_S:
        now_s += QUIET_S
        recording.note(int(now_s), 1)
        assert not recording.is_over(now_s)
    recording.note(0, 1)
    assert recording.is_over(LONGEST_S)


@pytest.mark.parametrize(
    ("name", "value"), [("READ_LIMIT", 30), ("ENTRY_LIMIT", 15), ("RUN_BYTES", 50_000), ("DISK_LIMIT_BYTES", 99_999)]
)
def test_a_run_that_hits_a_bound_was_no_start(
    file: BlockFile, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    recording, _ = recorded(file)
    recording.start(0.0)
    for number in range(30):
        recording.note(number * CHUNK // 2, 4096)
    assert len(recording.touched(unknown)) == len(way(file, *range(15)))
    monkeypatch.setattr(recorder, name, value)
    assert recording.touched(unknown) == []
    assert recording.is_over(QUIET_S) is (name in ("READ_LIMIT", "DISK_LIMIT_BYTES")), "others are not worth a look"


def test_a_run_that_reads_much_of_the_image_was_no_start_unless_that_is_little(
    file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, _ = recorded(file)
    for number in range(26):
        recording.note(number * CHUNK, CHUNK)
    third = way(file, *range(26))
    monkeypatch.setattr(recorder, "SMALL_BYTES", 0)
    assert recording.touched(lambda chunk: (CHUNK, 1)) == third
    monkeypatch.undo()
    recording.note(27 * CHUNK, CHUNK)
    assert recording.touched(lambda chunk: (CHUNK, 1)) == way(file, *range(26), 27)
    monkeypatch.setattr(recorder, "SMALL_BYTES", 27)
    assert recording.touched(lambda chunk: (CHUNK, 1)) == []


@pytest.mark.parametrize(("name", "value"), [("ENTRY_LIMIT", 3), ("MEMORY_BYTES", 2 * CHUNK)])
def test_of_a_memory_what_comes_after_the_bounds_is_left_out(
    file: BlockFile, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    recording = MemoryRecording(ChunkId.of(b"snapshot"), file, lambda begun: None)
    for number in (7, 3, 7, 5, 6):
        recording.note(number * CHUNK, CHUNK)
    assert recording.touched(unknown) == way(file, 7, 3, 5, 6)
    assert list(recording.reads) == [(number * CHUNK, CHUNK) for number in (7, 3, 7, 5, 6)]
    monkeypatch.setattr(recorder, name, value)
    assert recording.touched(unknown) == way(file, 7, 3)
    assert recording.is_too_much() is (name == "MEMORY_BYTES")


def test_a_machine_that_never_rests_is_recorded_for_a_while(file: BlockFile) -> None:
    recording = MemoryRecording(ChunkId.of(b"snapshot"), file, lambda begun: None)
    recording.note(0, 1)
    recording.start(0.0)
    recording.note(1, 1)
    assert not recording.is_over(QUIET_S)
    recording.note(2, 1)
    assert recording.is_over(MEMORY_LONGEST_S)


# What is kept


def test_what_others_than_a_start_read_is_not_kept(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile
) -> None:
    made = Recorder(fetcher)
    made.watch(image.id, file)
    file.read(5 * CHUNK, 1)
    made.leave(file)
    file.read(6 * CHUNK, 1)
    made.close()
    assert store.profiles.ids() == []


def test_several_machines_on_one_memory_are_one_run(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile
) -> None:
    made = Recorder(fetcher)
    for number in (5, 3):
        made.watch_memory(image.id, file)
        file.read(number * CHUNK, 1)
    made.close()
    assert store.profiles.get(image.record.data) == Profile().merged(way(file, 5, 3))


def run_of(fetcher: Fetcher, image: Synthetic, file: BlockFile, *numbers: int) -> None:
    """One recorded run of an image that has no server."""
    made = Recorder(fetcher)
    made.watch(image.id, file)
    for number in numbers:
        file.read(number * CHUNK, 1)
    made.close()
    assert file.recording is None or not numbers


def test_the_end_of_the_daemon_keeps_what_was_recorded(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile
) -> None:
    run_of(fetcher, image, file)
    assert store.profiles.ids() == []
    run_of(fetcher, image, file, 5, 3)
    assert store.profiles.get(image.record.data) == Profile().merged(way(file, 5, 3))


def test_a_run_that_is_the_profile_changes_nothing_and_another_is_merged(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile
) -> None:
    for numbers, runs in (((5, 3), 1), ((3, 5), 1), ((5, 3, 9), 2), ((5,), 3)):
        run_of(fetcher, image, file, *numbers)
        profile = store.profiles.get(image.record.data)
        assert profile is not None
        assert (profile.runs, set(way(file, 5, 3)) - set(profile.chunks)) == (runs, set())


def test_quiet_ends_a_run_while_the_daemon_goes_on(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "QUIET_S", 0.02)
    kept = threading.Event()
    merge = store.profiles.merge
    monkeypatch.setattr(store.profiles, "merge", lambda *given: (merge(*given), kept.set())[0])
    made = Recorder(fetcher)
    made.watch(image.id, file)
    file.read(CHUNK, 1)
    assert kept.wait(20)
    assert file.recording is None
    file.read(9 * CHUNK, 1)
    made.close()
    assert store.profiles.get(image.record.data) == Profile().merged(way(file, 1))


def test_a_server_that_is_away_costs_the_offer_only(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile, caplog: pytest.LogCaptureFixture
) -> None:
    store.origins.set(image.record.data, "http://127.0.0.1:1")
    run_of(fetcher, image, file, 5)
    assert store.profiles.get(image.record.data) is not None
    assert "127.0.0.1:1" in caplog.text


def test_an_offer_that_failed_is_made_again_at_the_next_run(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of that image or of another, also when the run changes nothing, and by another daemon."""
    other = add_image(store, "other:v1", seed=7, chunks=80)
    files = BlockFiles(fetcher)
    another = files.assign(other.record.data, Tally())
    for made in (image, other):
        store.origins.set(made.record.data, "http://127.0.0.1:1")
    told: list[tuple[ChunkId, list[ChunkId]]] = []
    is_away = True

    def offer(self: Recorder, origin: str, image: ChunkId, touched: list[ChunkId]) -> None:
        if is_away:
            raise UpstreamError("away")
        told.append((image, touched))

    monkeypatch.setattr(Recorder, "_offer", offer)
    run_of(fetcher, image, file, 5)
    run_of(fetcher, image, file, 5)
    run_of(fetcher, image, file, 9)
    assert store.offers.ids() == [image.record.data]
    is_away = False
    run_of(fetcher, other, another, 3)
    assert told == [(other.id, way(another, 3)), (image.id, way(file, 5, 9))]
    assert store.offers.ids() == []
    run_of(fetcher, other, another, 3)
    assert len(told) == 2
    files.close()


def test_a_run_without_a_touch_is_nothing(
    store: ChunkStore, fetcher: Fetcher, image: Synthetic, file: BlockFile
) -> None:
    made = Recorder(fetcher)
    made.watch(image.id, file)
    file.read(file.size_bytes, 10)
    made.close()
    assert store.profiles.ids() == []
