from __future__ import annotations

import threading
from typing import Any

import pytest

from imaged.errors import BucketUnavailableError, StoreError
from imaged.s3.leftovers import KEPT_S, remove_leftovers
from imaged.s3.names import CLAIM_S, Held, Keep, Names, current, directory, parse_key
from tests.support.memory_objects import MemoryObjects

Document = dict[str, Any]


def _names(objects: MemoryObjects) -> Names:
    return Names(objects, sleep=lambda seconds: threading.Event().wait(seconds / 50) and None)


def _read(objects: MemoryObjects, name: str) -> Document | None:
    place = directory("images", name)
    versions = [found[2] for entry in objects.list(place) if (found := parse_key(entry.key))]
    return Names(objects).read(place, current(versions)).document


def _count_up(held: Document | None) -> Document:
    return {"n": (held or {"n": 0})["n"] + 1}


@pytest.mark.parametrize("conditional", [True, False])
def test_a_name_is_set_changed_and_removed(conditional: bool) -> None:
    objects = MemoryObjects(conditional=conditional)
    names = _names(objects)
    assert names.change("images", "a/b:1", _count_up).document == {"n": 1}
    assert names.change("images", "a/b:1", _count_up).document == {"n": 2}
    assert _read(objects, "a/b:1") == {"n": 2}
    assert names.change("images", "a/b:1", lambda held: None).document is None
    assert _read(objects, "a/b:1") is None
    assert names.change("images", "a/b:1", _count_up).document == {"n": 1}
    assert names.conditional is conditional
    assert not [key for key in objects.objects if key.endswith(".claim")]


@pytest.mark.parametrize("conditional", [True, False])
def test_no_change_is_lost_however_many_make_one(conditional: bool) -> None:
    objects = MemoryObjects(conditional=conditional)
    start, failures = threading.Barrier(6), list[StoreError]()

    def work() -> None:
        names = _names(objects)
        start.wait()
        try:
            for _ in range(5):
                names.change("images", "one", _count_up)
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert _read(objects, "one") == {"n": 30}


def test_with_conditional_put_a_listing_that_lags_loses_nothing() -> None:
    objects = MemoryObjects(conditional=True, lag=4)
    first, second = _names(objects), _names(objects)
    for _ in range(4):
        first.change("images", "one", _count_up)
        second.change("images", "one", _count_up)
    for _ in range(8):
        objects.list("")
    assert _read(objects, "one") == {"n": 8}


def test_who_decides_may_leave_a_name_alone_or_give_up() -> None:
    objects = MemoryObjects(conditional=False)
    names = _names(objects)
    names.change("images", "one", _count_up)

    def keep(held: Document | None) -> Document | None:
        raise Keep

    assert names.change("images", "one", keep) == Held(names.change("images", "one", keep).version, {"n": 1})
    with pytest.raises(ZeroDivisionError):
        names.change("images", "one", lambda held: {"n": 1 // 0})
    assert _read(objects, "one") == {"n": 1}
    assert names.change("images", "two", lambda held: None).version == ""
    assert not [key for key in objects.objects if "two" in key]


def test_a_claim_that_was_left_is_in_the_way_for_a_while_only() -> None:
    objects = MemoryObjects(conditional=False)
    names = _names(objects)
    place = directory("images", "one")

    def killed(operation: str, key: str) -> None:
        if (operation in ("put", "delete") and not key.endswith(".claim")) or operation == "delete":
            raise BucketUnavailableError("killed")

    objects.before = killed
    with pytest.raises(BucketUnavailableError):
        names.change("images", "one", _count_up)
    objects.before = None
    assert [entry.key.rpartition(".")[2] for entry in objects.list(place)] == ["claim"]

    def pass_time(operation: str, key: str) -> None:
        objects.now_s += 7

    objects.before = pass_time
    begun = objects.now_s
    assert names.change("images", "one", _count_up).document == {"n": 1}
    assert objects.now_s - begun > CLAIM_S / 2


def test_a_version_that_was_written_meanwhile_is_not_written_over() -> None:
    objects = MemoryObjects(conditional=False)
    names, rival = _names(objects), _names(objects)
    once = [True]

    def other_first(operation: str, key: str) -> None:
        if operation == "put" and key.endswith(".claim") and once:
            once.clear()
            objects.before = None
            rival.change("images", "one", _count_up)

    objects.before = other_first
    seen: list[Document | None] = []

    def decide(held: Document | None) -> Document:
        seen.append(held)
        return _count_up(held)

    assert names.change("images", "one", decide).document == {"n": 2}
    assert seen == [None, {"n": 1}]


@pytest.mark.parametrize("conditional", [True, False])
def test_what_is_superseded_goes_after_a_day(conditional: bool) -> None:
    objects = MemoryObjects(conditional=conditional)
    names = _names(objects)
    for _ in range(3):
        names.change("images", "kept", _count_up)
        names.change("images", "gone", _count_up)
    names.change("images", "gone", lambda held: None)
    before = set(objects.objects)
    remove_leftovers(objects, objects.now_s)
    assert set(objects.objects) == before
    objects.now_s += KEPT_S + 1
    names.change("images", "kept", _count_up)
    remove_leftovers(objects, objects.now_s)
    # The third version was superseded just now, so that somebody may still be about to read it.
    assert [key for key in objects.objects if "gone" in key] == []
    assert len([key for key in objects.objects if "kept" in key]) == 4
    objects.now_s += KEPT_S + 1
    remove_leftovers(objects, objects.now_s)
    assert len([key for key in objects.objects if "kept" in key]) == 1
    assert _read(objects, "kept") == {"n": 4}
    assert names.change("images", "gone", _count_up).document == {"n": 1}


def test_lonely_packs_old_leases_and_marks_of_jobs_go_after_a_day() -> None:
    objects = MemoryObjects()
    stay = ["jobs/1.json", "packs/b.idx", "packs/b.pack", "profiles/1"]
    go = ["packs/a.pack", "leases/x.json", "jobs/1.taken-17", "jobs/2.cancel"]
    for key in stay + go:
        objects.put(key, b"")
    remove_leftovers(objects, objects.now_s + KEPT_S - 1)
    assert len(objects.objects) == len(stay + go)
    remove_leftovers(objects, objects.now_s + KEPT_S + 1)
    assert sorted(objects.objects) == stay
