from __future__ import annotations

import pytest

from imaged.fetching.link import FIRST_HEDGE_S, LACK_S, LEAST_HEDGE_S, LIE_S, MOST_HEDGE_S, MOST_REST_S, REST_S, Link


def noted(*waits_s: float, transfer_bytes: int = 0, transfer_s: float = 0.0) -> Link:
    link = Link()
    for wait_s in waits_s:
        link.note(wait_s, transfer_bytes, transfer_s)
    return link


def test_nothing_is_spare_before_anything_is_known_and_when_round_trips_are_short() -> None:
    assert Link().spare_bytes == 0
    assert noted(0.001, 0.0005, 0.1).spare_bytes == 0


def test_spare_is_what_comes_in_a_round_trip() -> None:
    link = noted(*[0.02] * 40, transfer_bytes=1 << 20, transfer_s=(1 << 20) / 25e6)
    assert 0.9 * 0.02 * 25e6 <= link.spare_bytes <= 0.02 * 25e6
    faster = noted(*[0.02] * 40, transfer_bytes=1 << 20, transfer_s=(1 << 20) / 50e6)
    assert faster.spare_bytes > 1.5 * link.spare_bytes


def test_answers_that_come_in_one_piece_say_nothing_of_the_rate() -> None:
    assert noted(*[0.02] * 40, transfer_bytes=1000, transfer_s=1e-6).spare_bytes == noted(0.02).spare_bytes


def test_the_first_sample_is_the_rate() -> None:
    slow = noted(0.03, transfer_bytes=128 << 10, transfer_s=0.25)
    assert slow.spare_bytes == int(0.03 * (128 << 10) / 0.25)


def test_little_is_spare_before_the_rate_is_known() -> None:
    assert 128 << 10 < noted(0.02).spare_bytes <= 192 << 10
    assert noted(0.3).spare_bytes == 192 << 10


def test_what_waited_behind_other_answers_does_not_seem_fast() -> None:
    link = noted(0.03, transfer_bytes=128 << 10, transfer_s=0.128)
    before = link.spare_bytes
    link.note(0.158, 128 << 10, 0.0001)
    assert link.spare_bytes <= 1.05 * before


def test_a_link_that_once_seemed_slow_is_found_to_be_fast() -> None:
    """By answers that are too short to measure: more are not asked for."""
    link = noted(0.02, transfer_bytes=128 << 10, transfer_s=1.0)
    assert link.spare_bytes < 64 << 10
    for _ in range(60):
        link.note(0.02, 20_000, 0.0005)
    assert link.spare_bytes > 192 << 10
    for _ in range(60):
        link.note(0.02, 20_000, 0.1)
    assert link.spare_bytes > 192 << 10, "a short answer proves nothing"


def test_the_shortest_of_the_last_waits_is_the_round_trip() -> None:
    assert noted(0.02, 0.5, 0.6).round_trip_s == 0.02
    assert noted(0.02, *[0.5] * 40).round_trip_s == 0.5


def test_a_silence_is_judged_by_the_usual_wait() -> None:
    assert Link().hedge_s == FIRST_HEDGE_S
    assert noted(*[0.001] * 20).hedge_s == LEAST_HEDGE_S
    assert noted(*[60.0] * 20).hedge_s == MOST_HEDGE_S
    steady = noted(*[0.3] * 40)
    assert 0.5 < steady.hedge_s < 0.8
    assert noted(*[0.1, 0.5] * 20).hedge_s > steady.hedge_s


def test_one_that_hung_rests_until_it_answers() -> None:
    link = noted(0.01)
    assert not link.is_resting
    link.hung()
    assert link.is_resting
    link.note(0.01, 0, 0.0)
    assert not link.is_resting


def test_who_lacks_fails_or_lies_is_asked_later_and_each_time_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("imaged.fetching.link.time.monotonic", lambda: now_s[0])
    link = Link()

    def lasts() -> float:
        """How long it is asked after others from now on."""
        began_s = now_s[0]
        while link.rank:
            now_s[0] += 0.5
        return now_s[0] - began_s

    pauses = []
    for _ in range(7):
        link.answered(10, 4)
        assert link.rank == 1
        pauses.append(lasts())
    assert pauses == [LACK_S, 2 * LACK_S, 4 * LACK_S, 8 * LACK_S, 16 * LACK_S, MOST_REST_S, MOST_REST_S]
    link.answered(10, 5)
    link.answered(10, 0)
    assert lasts() == LACK_S
    link.answered(10, 0)
    link.has_more()
    assert link.rank == 0
    for expected_s in (REST_S, 2 * REST_S):
        link.failed()
        link.failed()
        assert link.rank == 2
        assert lasts() == expected_s
    link.note(0.01, 100, 0.001)
    link.hung()
    assert lasts() == REST_S
    link.lied()
    link.answered(10, 10)
    assert link.rank == 3
    assert lasts() == LIE_S
