from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from imaged.turns import Turns


def test_one_at_a_time_however_they_come() -> None:
    """Also who comes when one has just ended and others still wait."""
    turns, lock = Turns(), threading.Lock()
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        time.sleep(number * 0.005)
        with turns.take("x"):
            with lock:
                inside.append(number)
                most.append(len(inside))
            time.sleep(0.02)
            with lock:
                inside.remove(number)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))
    assert most == [1] * 12
    assert turns._turns == {}


def test_other_things_do_not_wait() -> None:
    turns = Turns()
    with turns.take("x"), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: turns.take("y").__enter__()).result(timeout=60)


def test_an_error_ends_the_turn() -> None:
    turns = Turns()
    for _ in range(2):
        try:
            with turns.take("x"):
                raise ValueError
        except ValueError:
            pass
    assert turns._turns == {}
