"""Startup profiles: merging runs, the bytes, and the table in a store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imaged.blockimage import BlockImage
from imaged.chunkstore.environment import TABLES
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkMissingError, FormatError, StoreReadOnlyError
from imaged.ids import ChunkId
from imaged.profile import AGE_LIMIT, ENTRY_LIMIT, PROFILE_BYTES, Profile
from imaged.reach import belonging
from tests.support.memory_store import MemoryStore
from tests.support.store_images import build_image


def chunk(number: int) -> ChunkId:
    return ChunkId.of(b"%d" % number)


def chunks(*numbers: int) -> tuple[ChunkId, ...]:
    return tuple(chunk(number) for number in numbers)


def test_a_run_keeps_the_order_and_puts_what_is_new_last() -> None:
    first = Profile().merged(chunks(3, 1, 2, 1))
    assert first == Profile(1, chunks(3, 1, 2), bytes(3))
    second = first.merged(chunks(5, 2, 3, 4))
    assert second == Profile(2, chunks(3, 1, 2, 5, 4), bytes([0, 1, 0, 0, 0]))
    assert second.merged(chunks(1)).ages == bytes([1, 0, 1, 1, 1])


def test_what_no_run_touches_any_more_goes() -> None:
    profile = Profile().merged(chunks(1, 2))
    for _ in range(AGE_LIMIT):
        profile = profile.merged(chunks(2))
        assert profile.chunks == chunks(1, 2)
    assert profile.merged(chunks(2)).chunks == chunks(2)
    assert profile.merged(chunks(1)).ages == bytes([0, 1])


def test_above_the_limit_the_oldest_go_and_then_the_last() -> None:
    old = [chunk(number) for number in range(ENTRY_LIMIT)]
    profile = Profile().merged(old)
    fresh = [chunk(-number) for number in range(1, 11)]
    merged = profile.merged([*fresh, old[-1]])
    assert len(merged.chunks) == ENTRY_LIMIT
    assert merged.chunks == (*old[:-11], old[-1], *fresh)
    assert Profile().merged([*old, *fresh]).chunks == tuple(old)


def test_above_the_limit_of_bytes_the_oldest_go_and_then_the_last() -> None:
    old, fresh, unknown = chunks(*range(10)), chunks(*range(20, 26)), chunks(30)
    sizes = dict.fromkeys((*old, *fresh), PROFILE_BYTES // 10)
    profile = Profile().merged([*old, *unknown], sizes)
    assert profile.chunks == (*old, *unknown)
    merged = profile.merged(fresh, sizes)
    assert merged.chunks == (*old[:4], *fresh)
    assert Profile().merged(fresh, dict.fromkeys(fresh, PROFILE_BYTES)).chunks == fresh[:1]


runs = st.lists(st.lists(st.integers(0, 12).map(chunk), max_size=12), max_size=14)


@given(runs)
def test_merging_is_what_it_says(touched: list[list[ChunkId]]) -> None:
    profile = Profile()
    last_touch: dict[ChunkId, int] = {}
    for number, run in enumerate(touched, 1):
        profile = profile.merged(run)
        last_touch |= dict.fromkeys(run, number)
    expected = {one: len(touched) - at for one, at in last_touch.items() if len(touched) - at <= AGE_LIMIT}
    assert dict(zip(profile.chunks, profile.ages, strict=True)) == expected
    assert profile.runs == len(touched)
    assert Profile.parse(profile.pack()) == profile


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "magic"),
        (b"pvT2" + bytes(8), "magic"),
        (Profile().pack()[:-1], "header"),
        (Profile().pack() + b"x", "12 bytes for 0 entries"),
        (Profile(1, chunks(1), b"\0").pack()[:-1], "45 bytes for 1 entries"),
        (Profile(1, chunks(1, 1), b"\0\0").pack(), "twice"),
        (Profile(1, chunks(1), bytes([AGE_LIMIT + 1])).pack(), "ages"),
        (b"pvT1" + b"\xff" * 8, f"at most {ENTRY_LIMIT}"),
    ],
)
def test_what_is_no_profile_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        Profile.parse(raw)


def test_the_largest_profile_fits_a_batch_and_a_body() -> None:
    source = random.Random(1)
    ids = tuple(ChunkId(source.randbytes(32)) for _ in range(ENTRY_LIMIT))
    raw = Profile().merged(ids).pack()
    assert len(raw) == 12 + 33 * ENTRY_LIMIT
    assert Profile.parse(raw).chunks == ids


# In a store


def test_runs_are_merged_in_the_store_and_survive_it(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        assert store.profiles.get(chunk(0)) is None
        store.profiles.merge(chunk(0), chunks(1, 2))
        store.profiles.merge(chunk(0), chunks(2, 3))
        assert store.profiles.ids() == [chunk(0)]
    with ChunkStore.open(tmp_path, readonly=True) as store:
        assert store.profiles.get(chunk(0)) == Profile(2, chunks(1, 2, 3), bytes([1, 0, 0]))
        with pytest.raises(StoreReadOnlyError):
            store.profiles.merge(chunk(0), chunks(1))
        with pytest.raises(StoreReadOnlyError):
            store.profiles.delete(chunk(0))
    with ChunkStore.open(tmp_path) as store:
        assert store.profiles.delete(chunk(0))
        assert not store.profiles.delete(chunk(0))


def test_an_offer_does_not_replace_what_was_made_from_more_runs(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        store.profiles.merge(chunk(0), chunks(1))
        store.profiles.merge(chunk(0), chunks(1))
        store.profiles.offer(chunk(0), Profile(1, chunks(9), b"\0"))
        assert store.profiles.merge(chunk(0), chunks(2)).chunks == chunks(1, 2)
        offered = Profile(3, chunks(9), b"\0")
        store.profiles.offer(chunk(0), offered)
        assert store.profiles.get(chunk(0)) == offered


def test_a_damaged_row_is_made_anew(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        with store.index.write("damage") as txn:
            store.index.put(txn, "profiles", chunk(0), b"rubbish")
        assert store.profiles.get(chunk(0)) is None
        assert store.profiles.merge(chunk(0), chunks(1)) == Profile(1, chunks(1), b"\0")


def test_a_store_that_was_made_without_profiles_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("imaged.chunkstore.environment.TABLES", tuple(name for name in TABLES if name != "profiles"))
        with ChunkStore.open(tmp_path) as store:
            store.put(b"x" * 5000)
    with ChunkStore.open(tmp_path, readonly=True) as store:
        assert store.profiles.get(chunk(0)) is None
        assert store.profiles.ids() == []
    with ChunkStore.open(tmp_path) as store:
        store.profiles.merge(chunk(0), chunks(1))
        assert store.profiles.get(chunk(0)) is not None


# What belongs to an image


def test_only_what_the_leaves_of_the_list_name_belongs_to_an_image() -> None:
    store = MemoryStore()
    mine, other = (BlockImage.open(store, build_image(store, seeds).data) for seeds in (range(600), range(9000, 9004)))
    leaves, own = mine.leaf_ids(), list(mine.chunk_ids())
    assert len(leaves) > 1
    strangers = [*other.leaf_ids(), *other.chunk_ids(), mine.id, chunk(77)]
    found = belonging(store, mine.id, [*strangers, *own[::-1], *leaves])
    assert found == (leaves, own[::-1])
    assert belonging(store, mine.id, [*own, *strangers]) == ([], [])
    assert belonging(store, mine.id, [leaves[0], own[2], own[-1], own[2]]) == ([leaves[0]], [own[2]])
    del store.chunks[leaves[0]]
    assert belonging(store, mine.id, own) == ([], [])
    with pytest.raises(ChunkMissingError):
        belonging(store, mine.id, leaves)
