"""Leases, and what a collection may take while they last."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imaged.chunkstore import condemned, leasefile
from imaged.chunkstore.fsck import check
from imaged.chunkstore.lease import LONGEST_TTL_S, Leases, LeaseState, least_epoch
from imaged.chunkstore.leasefile import LEASES_DIRECTORY
from imaged.chunkstore.leaseformat import first_line
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.storelock import CollectionLock
from imaged.collection.collect import CollectReport, collect
from imaged.collection.holding import unsafe
from imaged.collection.rollinglease import LEAST_S, RollingLease
from imaged.errors import ChunkMissingError, NotFoundError, StoreBusyError, StoreReadOnlyError
from imaged.ids import ChunkId
from imaged.reach import reachable
from tests.support.store_images import DIFF_ID, build_image, build_layer, name_image, noise


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path) as store:
        yield store


def garbage(store: ChunkStore, seed: int = 1) -> ChunkId:
    chunk = store.put(noise(3000, seed))
    store.flush()
    return chunk


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def while_collecting(store: ChunkStore, act: Callable[[int], None]) -> CollectReport:
    """Collect, with `act` called each time that the collection looks at what is kept: first after it has marked the
    names for the first time, then between condemning and removing."""
    calls = 0

    def keep() -> list[ChunkId]:
        nonlocal calls
        calls += 1
        act(calls)
        return []

    return collect(store.root, keep=keep)


# Leases as files


def test_a_lease_lasts_as_long_as_its_holder(store: ChunkStore) -> None:
    record = ChunkId.of(b"an image")
    with store.lease("converting x", [record]) as lease:
        (state,) = store.leases.live()
        assert (state.id, state.holder, state.epoch, state.keeps) == (lease.id, "converting x", 0, {record})
        assert state.expires_at is None
        other = ChunkId.of(b"another")
        lease.keep(other, record)
        assert store.leases.live()[0].keeps == {record, other}
        lease.drop(record)
        assert store.leases.live()[0].keeps == {other}
    assert store.leases.live() == []
    assert list((store.root / LEASES_DIRECTORY).iterdir()) == []
    lease.release()
    lease.keep(record)


def test_a_dead_holder_s_lease_is_removed(store: ChunkStore) -> None:
    pid = os.fork()
    if pid == 0:
        leasefile.create(store.root, first_line("x", epoch=3))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    (left,) = (store.root / LEASES_DIRECTORY).iterdir()
    assert store.leases.live() == []
    assert not left.exists()


def test_a_child_does_not_hold_its_parent_s_lease(store: ChunkStore) -> None:
    lease = store.lease("x")
    (reading, writing), (told, telling) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.write(telling, b"!")
        os.read(reading, 1)
        os._exit(0)
    try:
        assert os.read(told, 1) == b"!"
        os.close(lease._fd)  # as the kernel does when the parent is killed
        lease._fd = -1
        assert store.leases.live() == []
    finally:
        for fd in (writing, reading, told, telling):
            os.close(fd)
        os.waitpid(pid, 0)


def test_a_lease_that_is_just_being_made_is_no_lease(store: ChunkStore) -> None:
    with store.lease("x"):
        pass
    directory = store.root / LEASES_DIRECTORY
    (directory / ".0123").touch()
    assert store.leases.live() == []
    assert list(directory.iterdir()) == []


def test_an_epoch_that_moves_while_a_lease_is_made_counts(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = leasefile.create

    def slow(*arguments: object, **options: object) -> object:
        created = real(*arguments, **options)  # type: ignore[arg-type]
        condemned.begin(store.index)
        return created

    monkeypatch.setattr(leasefile, "create", slow)
    with store.lease("x") as lease:
        assert lease.epoch == 1
        assert store.leases.live()[0].epoch == 1
        assert store.leases.newest_epoch == 1
    granted = store.leases.grant("y", keeps=None, ttl_s=10)
    assert granted.epoch == 2


def test_a_store_that_is_only_read_gives_no_lease(store: ChunkStore) -> None:
    root = store.root
    store.close()
    with ChunkStore.open(root, readonly=True) as reader, pytest.raises(StoreReadOnlyError):
        reader.lease("x")


def test_a_damaged_lease_holds_everything_back_and_ends(store: ChunkStore) -> None:
    clock = Clock()
    leases = Leases(store.root, store.index, clock)
    state = leases.grant("x", keeps=None, ttl_s=10)
    path = store.root / LEASES_DIRECTORY / state.id
    path.write_bytes(b'{"version": 1, "holder"')
    os.utime(path, (clock.now_s, clock.now_s))
    assert least_epoch(leases.live()) == 0
    clock.now_s += LONGEST_TTL_S + 1
    assert leases.live() == []


# Of clients elsewhere


def test_a_client_s_lease_ends_by_the_clock(store: ChunkStore) -> None:
    clock, record = Clock(), ChunkId.of(b"an image")
    leases = Leases(store.root, store.index, clock)
    state = leases.grant("node 7", keeps=[record], ttl_s=60)
    assert (state.epoch, state.keeps, state.expires_at) == (None, {record}, clock.now_s + 60)
    other = ChunkId.of(b"another")
    clock.now_s += 50
    renewed, fresh = leases.renew(state.id, keeps=[other], ttl_s=60)
    assert (renewed.keeps, fresh) == ({other}, {other})
    clock.now_s += 50
    assert [lease.keeps for lease in leases.live()] == [{other}]
    renewed, fresh = leases.renew(state.id, ttl_s=60)
    assert (renewed.keeps, fresh) == ({other}, set())
    clock.now_s += 61
    with pytest.raises(NotFoundError):
        leases.renew(state.id, ttl_s=60)
    assert leases.live() == []


def test_a_clock_that_was_wrong_makes_no_lease_for_ever(store: ChunkStore) -> None:
    clock = Clock()
    leases = Leases(store.root, store.index, clock)
    clock.now_s += 10 * 365 * 86400
    leases.grant("from the future", keeps=None, ttl_s=60)
    clock.now_s -= 10 * 365 * 86400
    assert leases.live() == []


def test_a_client_can_end_its_lease_and_use_no_other(store: ChunkStore) -> None:
    with store.lease("of this process") as own:
        state = store.leases.grant("x", keeps=None, ttl_s=60, namespace="team")
        for wrong in (own.id, "../lock", "", "0" * 32):
            assert not store.leases.revoke(wrong, namespace="team")
            with store.relying(wrong, namespace="team") as found:
                assert found is None
        assert not store.leases.revoke(state.id, namespace="other")
        with store.relying(state.id, namespace="team") as found:
            assert found == state
        assert store.leases.revoke(state.id, namespace="team")
        assert not store.leases.revoke(state.id, namespace="team")
        assert len(store.leases.live()) == 1


def test_a_lease_that_is_used_does_not_expire_under_its_user(store: ChunkStore) -> None:
    clock = Clock()
    leases = Leases(store.root, store.index, clock)
    state = leases.grant("x", keeps=None, ttl_s=60)
    with leases.relying(state.id):
        clock.now_s += 100
        assert [lease.id for lease in Leases(store.root, store.index, clock).live()] == [state.id]
    assert leases.live() == []


def test_a_thread_that_works_for_a_client_relies_with_its_epoch(store: ChunkStore) -> None:
    old = store.leases.grant("x", keeps=None, ttl_s=60)
    condemned.begin(store.index)
    with store.lease("newer"):
        assert store.leases.newest_epoch == 1
        with store.relying(old.id):
            assert store.leases.newest_epoch == 0
        assert store.leases.newest_epoch == 1
    assert store.leases.newest_epoch is None


def test_the_server_s_own_lease_rolls(store: ChunkStore) -> None:
    clock = Clock()
    rolling = RollingLease(store, clock)

    def epochs() -> list[int | None]:
        return sorted(lease.epoch for lease in store.leases.live() if lease.epoch is not None)

    for expected in ([0], [0, 1], [1, 2], [2, 3]):
        with rolling.borrowed():
            assert epochs() == expected
        condemned.begin(store.index)
        clock.now_s += LEAST_S
    with rolling.borrowed() as lease:
        clock.now_s += 2 * LEAST_S
        rolling.expire()
        assert epochs() == [lease.epoch]
    rolling.expire()
    assert epochs() == []
    with rolling.borrowed():
        pass
    rolling.close()
    assert epochs() == []


# Collections beside sessions, step by step


def test_garbage_goes_while_others_have_the_store_open(store: ChunkStore) -> None:
    name_image(store, "kept:1", kept := build_image(store, range(10)))
    chunk = garbage(store)
    assert store.has(chunk)
    report = collect(store.root)
    assert (report.removed_chunks, report.waiting_chunks) == (1, 0)
    assert not store.has(chunk)
    with pytest.raises(ChunkMissingError):
        store.get(chunk)
    assert [frame.header.size_bytes for frame in store.frames([chunk])] == [0]
    assert store.absent(reachable(store, kept.id)) == []
    assert check(store.root).errors == []


def test_what_a_session_relies_on_stays_until_it_is_named(store: ChunkStore) -> None:
    with store.lease("converting") as lease:
        record = build_image(store, range(10))
        report = collect(store.root)
        assert (report.removed_chunks, report.waiting_for) == (0, ("converting",))
        assert report.waiting_chunks == 16
        assert store.missing(reachable(store, record.id)) == []
        name_image(store, "new:1", record)
        lease.release()
    report = collect(store.root)
    assert (report.removed_chunks, report.waiting_chunks, report.kept_chunks) == (0, 0, 16)
    assert check(store.root).errors == []


def test_a_session_that_comes_after_puts_anew_what_was_condemned(store: ChunkStore) -> None:
    """Between condemning and removing: the chunk can be read, and counts as missing; the put saves it."""
    other = ChunkStore.open(store.root)
    chunk, lost = garbage(store), garbage(store, 2)
    with store.lease("old"):
        collect(store.root)
        assert store.missing([chunk]) == []
        place = store.index.find(chunk)
        with other.lease("new"):
            assert (other.missing([chunk]), other.absent([chunk]), other.has(chunk)) == ([chunk], [], True)
            other.put(noise(3000, 1))
            assert other.missing([chunk]) == []
            other.flush()
            assert condemned.stamp_of(store.index, chunk) is None
            assert store.index.find(chunk) not in (None, place)
            store.leases.live()
        assert condemned.stamp_of(store.index, lost) == 1
    other.close()
    assert store.get(chunk) == noise(3000, 1)
    assert collect(store.root).removed_chunks == 2
    assert check(store.root).errors == []


def test_a_put_between_condemning_and_removing_is_not_removed(store: ChunkStore) -> None:
    """The removal looks again in its transaction: the row of what was put anew is gone."""
    chunk = garbage(store)
    session = ChunkStore.open(store.root)
    leases = []

    def act(call: int) -> None:
        if call == 2:
            leases.append(session.lease("new"))
            assert session.missing([chunk]) == [chunk]
            session.put(noise(3000, 1))
            session.flush()

    assert while_collecting(store, act).removed_chunks == 0
    assert session.get(chunk) == noise(3000, 1)
    leases[0].release()
    session.close()
    assert collect(store.root).removed_chunks == 1


def test_a_name_that_is_set_while_it_collects_is_seen(store: ChunkStore) -> None:
    """By a session that began before, and ended before the leases were looked at."""
    lease = store.lease("converting")
    record = build_image(store, range(10))

    def act(call: int) -> None:
        if call == 1:
            name_image(store, "new:1", record)
            lease.release()

    report = while_collecting(store, act)
    assert (report.removed_chunks, report.kept_chunks, report.waiting_chunks) == (0, 16, 0)
    assert check(store.root).errors == []


def test_a_name_that_is_set_at_the_last_moment_is_seen(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After everything was looked at again: the transaction that removes notices that names changed."""
    record, other = build_image(store, range(10)), build_image(store, range(20, 25))
    real, waiting = condemned.remove, [record]

    def remove(*arguments: object, **options: object) -> int:
        if waiting:
            name_image(store, "new:1", waiting.pop())
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("imaged.collection.collect.condemned.remove", remove)
    report = collect(store.root)
    assert (report.kept_chunks, report.removed_chunks) == (16, 11)
    assert store.absent(reachable(store, record.id)) == []
    assert store.absent([other.id]) == [other.id]
    assert check(store.root).errors == []


def test_names_that_never_stop_changing_only_put_it_off(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = build_image(store, range(3))
    chunk = garbage(store)
    real = condemned.remove

    def remove(*arguments: object, **options: object) -> int:
        name_image(store, "new:1", record)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("imaged.collection.collect.condemned.remove", remove)
    report = collect(store.root)
    assert (report.removed_chunks, report.waiting_chunks) == (0, 1)
    monkeypatch.undo()
    assert collect(store.root).removed_chunks == 1
    assert not store.has(chunk)


def test_a_name_that_moves_to_a_lease_is_seen_in_one_place(store: ChunkStore) -> None:
    record = build_image(store, range(10))
    name_image(store, "old:1", record)
    keeping = store.keeping("node daemon")

    def act(call: int) -> None:
        if call == 1:
            keeping.keep(record.id)
            assert unsafe(store, [record.id]) == []
            store.refs.delete("old:1")

    report = while_collecting(store, act)
    assert (report.removed_chunks, report.kept_chunks) == (0, 16)
    assert collect(store.root).removed_chunks == 0
    keeping.release()
    assert collect(store.root).removed_chunks == 16


def test_what_has_no_name_is_safe_only_while_it_is_whole(store: ChunkStore) -> None:
    record = build_image(store, range(10))
    keeping = store.keeping("node daemon", [record.id])
    assert unsafe(store, [record.id, ChunkId.of(b"gone")]) == [ChunkId.of(b"gone")]
    keeping.release()
    verdicts = []

    def act(call: int) -> None:
        if call == 2:  # it is condemned, and the leases were looked at
            late = store.keeping("too late", [record.id])
            verdicts.extend(unsafe(store, [record.id]))
            late.release()

    while_collecting(store, act)
    assert verdicts == [record.id]


def test_a_tag_is_one_step(store: ChunkStore) -> None:
    name_image(store, "one:1", record := build_image(store, range(4)))
    assert store.refs.copy("one:1", "two:1") == store.refs.get("two:1")
    store.refs.delete("one:1")
    assert collect(store.root).removed_chunks == 0
    assert store.absent(reachable(store, record.id)) == []
    assert store.refs.copy("one:1", "three:1") is None


def test_a_memo_that_comes_while_it_collects_stays_whole_or_goes(store: ChunkStore) -> None:
    def act(call: int) -> None:
        if call == 2:
            store.memos.set(DIFF_ID, build_layer(store, range(8)))

    build_layer(store, range(8))
    store.flush()
    while_collecting(store, act)
    assert check(store.root).errors == []


def test_an_old_collection_writes_no_late_rows(store: ChunkStore) -> None:
    chunk = garbage(store)
    stamp = condemned.begin(store.index)
    condemned.finish(store.index)
    with pytest.raises(Exception, match="overtaken"):
        condemned.condemn(store.index, [chunk], stamp)
    assert store.missing([chunk]) == []


def test_a_killed_collection_is_put_right(store: ChunkStore) -> None:
    """Condemned and never removed: pardoned when it has a name since, else removed."""
    named, lost = build_image(store, range(4)), garbage(store)
    stamp = condemned.begin(store.index)
    condemned.condemn(store.index, [*reachable(store, named.id), lost], stamp)
    name_image(store, "kept:1", named)
    assert check(store.root).errors == []
    assert collect(store.root).removed_chunks == 1
    assert store.missing(reachable(store, named.id)) == []


def test_one_at_a_time(store: ChunkStore) -> None:
    with CollectionLock.alone(store.root), pytest.raises(StoreBusyError, match=f"process {os.getpid()} "):
        collect(store.root)
    with CollectionLock.shared(store.root), pytest.raises(StoreBusyError):
        collect(store.root)
    with CollectionLock.alone(store.root):
        assert CollectionLock.alone_if_free(store.root) is None
        with pytest.raises(StoreBusyError):
            CollectionLock.shared(store.root, wait_s=0.0)
    collect(store.root)


def test_a_rebuilt_index_knows_the_epochs_of_leases(store: ChunkStore) -> None:
    root = store.root
    for _ in range(5):
        condemned.begin(store.index)
    lease = store.leases.grant("x", keeps=None, ttl_s=600)
    chunk = garbage(store)
    store.close()
    assert check(root, rebuild=True).errors == []
    with ChunkStore.open(root) as again:
        assert again.index.collections() == lease.epoch == 5
        assert collect(root).removed_chunks == 0
        with again.relying(lease.id):
            assert again.missing([chunk]) == []


def test_pack_numbers_are_not_used_again(store: ChunkStore) -> None:
    garbage(store)
    root = store.root
    store.close()
    collect(root)
    with ChunkStore.open(root) as again:
        garbage(again)
        assert list(again.index.packs()) == [2]


def test_readers_follow_what_moves(store: ChunkStore) -> None:
    """A process that has the old pack open, and looked up places in it, reads on."""
    reader = ChunkStore.open(store.root)
    record = build_image(store, range(5))
    name_image(store, "kept:1", record)
    for seed in range(20):
        store.put(noise(20_000, seed))
    root = store.root
    store.close()
    chunks = list(reachable(reader, record.id))
    before = [reader.get(chunk) for chunk in chunks]
    stale = {chunk: reader.index.find(chunk) for chunk in chunks}
    assert collect(root).rewritten_packs == 1
    real, index = reader.index.find, reader.index
    seen: set[ChunkId] = set()

    def find(chunk: ChunkId) -> object:
        if chunk in seen:
            return real(chunk)
        seen.add(chunk)
        return stale[chunk]

    index.find = find  # type: ignore[method-assign,assignment]
    assert [reader.get(chunk) for chunk in chunks] == before
    del index.find  # type: ignore[method-assign]
    index.find_many = lambda wanted: [stale[chunk] for chunk in wanted]  # type: ignore[method-assign]
    assert [frame.open() for frame in reader.frames(chunks)] == before
    del index.find_many  # type: ignore[method-assign]
    assert reader.absent(chunks) == []
    reader.close()
    assert check(root).errors == []


# Leases that last for long


def test_the_file_of_a_lease_does_not_grow_for_ever(store: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever looks meanwhile sees what it keeps."""
    monkeypatch.setattr(leasefile, "LONG_BYTES", 2000)
    kept, others = ChunkId.of(b"kept"), [ChunkId.of(b"%d" % number) for number in range(10)]
    with store.keeping("the node daemon") as lease:
        lease.keep(kept)
        ended = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(_look_until, ended, store)
            for number in range(500):
                lease.keep(others[number % 10])
                lease.drop(others[number % 10])
            ended.set()
            assert all(kept in keeps for keeps in seen.result())
        (state,) = store.leases.live()
        assert (state.id, state.keeps) == (lease.id, {kept})
        assert (store.root / LEASES_DIRECTORY / lease.id).stat().st_size < 4000
    assert list((store.root / LEASES_DIRECTORY).iterdir()) == []


def _look_until(ended: threading.Event, store: ChunkStore) -> list[set[ChunkId]]:
    leases, seen = Leases(store.root, store.index), list[set[ChunkId]]()
    while not ended.is_set():
        seen.append({record for state in leases.live() for record in state.keeps})
    return seen


def test_a_lease_that_goes_on_in_another_file_while_they_are_listed_is_seen(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old file was listed, and gone when it was to be read."""
    monkeypatch.setattr(leasefile, "LONG_BYTES", 0)
    kept, other = ChunkId.of(b"kept"), ChunkId.of(b"other")
    with store.keeping("the node daemon", [kept]) as lease:
        before, look = lease.id, Leases._look

        def look_late(self: Leases, name: str) -> LeaseState | None:
            if name == before:
                lease.keep(other)
                lease.drop(other)
            return look(self, name)

        monkeypatch.setattr(Leases, "_look", look_late)
        (state,) = store.leases.live()
        assert (state.id, kept in state.keeps) == (lease.id, True)
        assert lease.id != before


def test_a_client_that_renews_a_lease_often_gets_another_one(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasefile, "LONG_BYTES", 1000)
    record, other = ChunkId.of(b"kept"), ChunkId.of(b"other")
    lease = store.leases.grant("a node daemon", keeps=[record], ttl_s=60)
    with pytest.raises(NotFoundError, match="too often"):
        for _ in range(100):
            store.leases.renew(lease.id, keeps=[record, other], ttl_s=60)
            store.leases.renew(lease.id, keeps=[record], ttl_s=60)
    (state,) = store.leases.live()
    assert record in state.keeps  # until it ends by itself, so that there is no gap
    upload = store.leases.grant("an upload", keeps=None, ttl_s=60)
    for _ in range(100):
        store.leases.renew(upload.id, ttl_s=60)
