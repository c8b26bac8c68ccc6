from __future__ import annotations

import random
import threading

from fuse.readahead import RUN_BYTES, WINDOW_BYTES, Prefetcher, Runs

SIZE = 64 << 20
STEP = 32 << 10


def test_a_run_is_read_ahead_once_and_in_windows() -> None:
    runs = Runs(SIZE)
    asked = [(at, found) for at in range(0, SIZE, STEP) if (found := runs.note(at, STEP))]
    first, _ = asked[0]
    assert first + STEP == RUN_BYTES
    position = RUN_BYTES
    for at, (offset, length) in asked:
        assert offset == position and offset >= at + STEP
        position += length
    assert position == SIZE
    assert len(asked) == (SIZE - RUN_BYTES) // WINDOW_BYTES


def test_a_starting_program_is_not_a_run() -> None:
    choose = random.Random(3)
    runs = Runs(SIZE)
    assert all(runs.note(choose.randrange(SIZE // 4096) * 4096, STEP) is None for _ in range(500))


def test_reads_that_arrive_out_of_order_are_a_run() -> None:
    runs = Runs(SIZE)
    order = [at + swap for at in range(0, 8 << 20, 2 * STEP) for swap in (STEP, 0)]
    assert sum(runs.note(at, STEP) is not None for at in order) >= 6


def test_several_runs_at_once() -> None:
    runs = Runs(SIZE)
    found = [runs.note(start + at, STEP) for at in range(0, 4 << 20, STEP) for start in range(0, SIZE, 8 << 20)]
    assert sum(one is not None for one in found) >= 8 * 3


def test_a_busy_prefetcher_leaves_out_and_survives_errors() -> None:
    gate = threading.Event()
    calls: list[int] = []

    def read(offset: int, length: int) -> bytes:
        calls.append(offset)
        gate.wait(10)
        raise OSError("no network")

    prefetcher = Prefetcher()
    for offset in range(10):
        prefetcher.start(read, offset, 1)
    gate.set()
    for _ in range(500):
        if len(calls) == 4:
            break
        threading.Event().wait(0.01)
    assert sorted(calls) == [0, 1, 2, 3]
    prefetcher.close()
    prefetcher.start(read, 11, 1)
