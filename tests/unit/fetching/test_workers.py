from __future__ import annotations

import threading

import pytest

from imaged.fetching.workers import Workers


def test_work_runs_at_once_to_a_number_and_then_in_turn() -> None:
    workers = Workers(3, "test")
    release, done = threading.Event(), threading.Semaphore(0)
    running = threading.Semaphore(0)
    seen: list[int] = []

    def work(number: int) -> None:
        seen.append(number)
        running.release()
        assert release.wait(20)
        done.release()

    for number in range(10):
        workers.run(lambda number=number: work(number))  # type: ignore[misc]
    for _ in range(3):
        assert running.acquire(timeout=20)
    assert not running.acquire(timeout=0.05)
    release.set()
    for _ in range(10):
        assert done.acquire(timeout=20)
    assert sorted(seen) == list(range(10))
    workers.close()


def test_a_thread_is_used_again_and_survives_errors() -> None:
    workers = Workers(8, "test")
    names: list[str] = []
    for number in range(20):
        done = threading.Event()

        def work(number: int = number, done: threading.Event = done) -> None:
            names.append(threading.current_thread().name)
            done.set()
            if number % 2:
                raise ValueError("told to")

        workers.run(work)
        assert done.wait(20)
    assert len(names) == 20
    assert len(set(names)) <= 8
    workers.close()


def test_closed_it_ends_its_threads_after_what_was_queued() -> None:
    workers = Workers(1, "test")
    release, ran = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def first() -> None:
        threads.append(threading.current_thread())
        assert release.wait(20)

    workers.run(first)
    workers.run(ran.set)
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        workers.run(ran.set)
    release.set()
    assert ran.wait(20)
    threads[0].join(20)
    assert not threads[0].is_alive()
