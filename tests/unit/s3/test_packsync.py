from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from imaged.errors import BucketUnavailableError, ChunkMissingError
from imaged.ids import ChunkId
from imaged.s3.packtable import index_key, pack_key
from imaged.s3.store import MirrorStore
from tests.support.memory_objects import MemoryObjects
from tests.support.store_images import build_image, name_image
from tests.unit.s3.conftest import Open

_LONGEST_S = 20.0
_random = random.Random(11)


def _put(store: MirrorStore) -> ChunkId:
    """A chunk in a new pack of the bucket."""
    chunk = store.put(_random.randbytes(3000))
    store.flush()
    return chunk


def _aside(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("at", ["", ".idx"])
def test_a_look_up_waits_for_no_sync_wherever_that_is(
    server: Open, objects: MemoryObjects, whole: bool, at: str
) -> None:
    """`at` is how the keys end at whose requests the sync stops: at all of them, or while it reads packs of others."""
    first, second = server("a"), server("b")
    for _ in range(3):
        _put(first)
    name_image(first, "one:1", build_image(first, range(3)))
    looking = threading.Event()
    waited: list[tuple[str, str]] = []
    stops: list[str] = []

    def before(operation: str, key: str) -> None:
        if looking.is_set() or waited or not key.endswith(at):
            return
        looking.set()  # what follows makes requests, too
        new = _put(first)
        asking = _aside(lambda: second.get(new))
        asking.join(_LONGEST_S)
        if asking.is_alive():
            waited.append((operation, key))
        stops.append(operation)
        looking.clear()

    objects.before = before
    (second.bucket.sync.everything if whole else second.bucket.sync.often)()
    objects.before = None
    assert waited == []
    assert set(stops) == ({"get"} if at else {"list", "get"})


def test_who_asks_at_the_same_time_shares_one_look(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    new = _put(first)
    held, asked = threading.Event(), threading.Barrier(6)
    objects.calls.clear()

    def before(operation: str, key: str) -> None:
        held.wait(_LONGEST_S)

    def ask() -> None:
        asked.wait(_LONGEST_S)
        second.get(new)

    objects.before = before
    threads = [_aside(ask) for _ in range(5)]
    asked.wait(_LONGEST_S)
    held.set()
    for thread in threads:
        thread.join(_LONGEST_S)
    assert not any(thread.is_alive() for thread in threads)
    assert 1 <= sum(operation == "list" for operation, _ in objects.calls) <= 2


def test_who_waits_for_a_look_that_fails_has_one_of_its_own(server: Open, objects: MemoryObjects) -> None:
    second = server("b")
    packs = second.bucket.sync.packs
    begun, over = threading.Event(), threading.Event()
    errors: list[str] = []

    def before(operation: str, key: str) -> None:
        begun.set()
        over.wait(_LONGEST_S)
        raise BucketUnavailableError("no answer")

    def catch_up() -> None:
        try:
            packs.catch_up(full=True)
        except BucketUnavailableError as error:
            errors.append(error.message)

    objects.before = before
    one = _aside(catch_up)
    assert begun.wait(_LONGEST_S)
    others = [_aside(catch_up) for _ in range(3)]
    over.set()
    for thread in (one, *others):
        thread.join(_LONGEST_S)
    assert errors == ["no answer"] * 4


def test_a_pack_that_goes_while_it_is_read_does_not_come_back(server: Open, objects: MemoryObjects) -> None:
    first, second = server("a"), server("b")
    chunk = _put(first)
    pack = next(key for key in objects.objects if key.endswith(".idx")).removeprefix("packs/").removesuffix(".idx")
    has_it, go_on = threading.Event(), threading.Event()
    keep = second.bucket.packs.keep_contents

    def slow(name: str, raw: bytes) -> None:
        keep(name, raw)
        if threading.current_thread().name.startswith("s3-import") and not has_it.is_set():
            has_it.set()
            go_on.wait(_LONGEST_S)

    second.bucket.packs.keep_contents = slow  # type: ignore[method-assign]
    late = _aside(second.bucket.sync.packs.catch_up)
    assert has_it.wait(_LONGEST_S)
    second.bucket.sync.everything()
    assert second.get(chunk)
    for key in (index_key(pack), pack_key(pack)):
        objects.delete(key)
    second.bucket.sync.everything()
    go_on.set()
    late.join(_LONGEST_S)
    assert not late.is_alive()
    assert second.bucket.packs.all() == [] and not second.has(chunk)
    with pytest.raises(ChunkMissingError):
        second.get(chunk)


def test_an_import_that_was_broken_off_of_a_pack_that_is_gone_is_forgotten(
    server: Open, objects: MemoryObjects
) -> None:
    second = server("b")
    second.bucket.packs.import_new(["00000000000123456789abcdef"])
    second.bucket.sync.everything()
    assert second.bucket.packs.all() == []
    objects.calls.clear()
    second.bucket.sync.everything()
    assert not any(operation == "get" and key.startswith("packs/") for operation, key in objects.calls)
