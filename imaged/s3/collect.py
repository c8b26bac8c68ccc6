"""Garbage collection of a bucket on which several servers work; docs/s3.md has the argument.

A collection condemns in an object that names packs and chunks in them, waits until every server's lease says that it
goes by that list, looks again what is reachable, brings what stays into new packs, and only then removes the old ones.
Several may go on at once, and each may be killed anywhere: a list that is left is finished by the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from imaged.chunkstore.appender import Appender
from imaged.chunkstore.pack import PACK_HEADER_BYTES
from imaged.chunkstore.rows import Location
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.storelock import CollectionLock
from imaged.collection import lastcollection, owned
from imaged.collection.collect import CollectReport
from imaged.collection.marks import Marks
from imaged.collection.roots import Keep, Roots, mark_either
from imaged.errors import ChunkError, FormatError, ObjectMissingError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.reach import Marker
from imaged.s3 import condemnedlist
from imaged.s3.condemnedlist import LISTS, SUFFIX, CondemnedList, Copy
from imaged.s3.leftovers import remove_leftovers
from imaged.s3.packindex import PackIndex, Row
from imaged.s3.packtable import RemotePack, index_key, pack_key
from imaged.s3.serverlease import live, missing_from
from imaged.s3.store import MirrorStore

LIVE_SHARE = 0.5
"""A pack of which less than this is live is rewritten."""
SMALL_BYTES = 8 << 20
SMALL_COUNT = 16
"""So many packs below that size are made into one: each costs a request at every start of a server."""
MERGED_BYTES = 256 << 20
"""Of them, in one collection."""
_POLL_S = 1.0
log = logging.getLogger(__name__)


class _Roots(Roots):
    """With what the leases of other servers keep."""

    def __init__(self, store: MirrorStore, marks: Marks, keep: Keep, keep_snapshots: Keep) -> None:
        super().__init__(store, marks, keep, keep_snapshots)
        self._bucket = store.bucket

    def _mark_leases(self, marker: Marker) -> bool:
        found = super()._mark_leases(marker)
        kept = {record for state in live(self._bucket.objects, self._bucket.lease.now_s()) for record in state.keeps}
        for record in kept - self._unnamed:
            try:
                mark_either(self._store, marker, record)
            except FormatError as error:
                log.warning("what a lease of another server keeps: %s", error.message)
            found = True
            self._unnamed.add(record)
        return found


@dataclass(slots=True)
class _Done:
    removed_chunks: int = 0
    removed_packs: int = 0
    rewritten_packs: int = 0
    freed_bytes: int = 0
    damaged: list[int] = field(default_factory=list)


def collect_bucket(root: Path, *, keep: Keep, keep_snapshots: Keep) -> CollectReport:
    """As `imaged.collection.collect.collect`, of the bucket that `root` is a mirror of. BucketUnavailableError too.

    `freed_bytes` are of the bucket. What servers may still rely on after the longest wait is left for the next time.
    """
    with CollectionLock.alone(root), ChunkStore.open(root) as store:
        assert isinstance(store, MirrorStore)
        bucket = store.bucket
        bucket.sync.everything()
        bucket.renew()
        marks = Marks(store.index)
        roots = _Roots(store, marks, keep, keep_snapshots)
        roots.look()
        forgotten = roots.forget_memos()
        owned.sweep(store)
        pending = _pending(store)
        fresh = _choose(store, marks, {pack for listed in pending.values() for pack in listed.packs})
        if fresh.packs:
            key = condemnedlist.new_key()
            bucket.objects.put(key, condemnedlist.pack(fresh))
            pending[key] = fresh
        done, waiting, holders = _Done(), 0, set[str]()
        if pending:
            bucket.sync.often()
            bucket.renew()
            ready, holders = _wait(store, pending)
            for key in ready:
                listed = pending.pop(key)
                others = {pack for other in pending.values() for pack in other.packs}
                _finish(store, key, listed, marks, roots, others, done)
            waiting = sum(len(listed.chunks) for listed in pending.values())
        _forget_rows(store, roots)
        remove_leftovers(bucket.objects, bucket.lease.now_s())
        usage = store.df()
        freed_bytes = max(done.freed_bytes, 0)
        lastcollection.note(store.index, removed_chunks=done.removed_chunks, freed_bytes=freed_bytes)
        return CollectReport(
            kept_chunks=usage.chunks - waiting,
            removed_chunks=done.removed_chunks,
            freed_bytes=freed_bytes,
            dead_bytes=usage.dead_bytes,
            removed_packs=done.removed_packs,
            rewritten_packs=done.rewritten_packs,
            forgotten_layers=forgotten,
            waiting_chunks=waiting,
            waiting_for=tuple(sorted(holders)) if waiting else (),
            damaged_packs=tuple(done.damaged),
        )


def _pending(store: MirrorStore) -> dict[str, CondemnedList]:
    """Lists that other collections have left, or are at."""
    found = {}
    objects = store.bucket.objects
    for entry in objects.list(LISTS):
        if entry.key.endswith(SUFFIX):
            try:
                found[entry.key] = condemnedlist.parse(objects.get(entry.key))
            except ObjectMissingError:
                continue
            except FormatError as error:
                log.error("%s is removed: %s", entry.key, error.message)
                objects.delete(entry.key)
    return found


def _choose(store: MirrorStore, marks: Marks, listed: set[str]) -> CondemnedList:
    """Packs that are worth removing, and what in them is dead."""
    bucket = store.bucket
    packs = {pack.number: pack for pack in bucket.packs.all() if bucket.is_safe(pack.number) and pack.id not in listed}
    live_bytes = dict.fromkeys(packs, 0)
    for chunk, place in store.index.chunks():
        if place.pack in live_bytes and chunk in marks:
            live_bytes[place.pack] += place.stored_bytes
    rows = store.index.packs()
    sizes = {n: rows[n].committed_bytes - PACK_HEADER_BYTES for n in packs if n in rows}
    victims: set[int] = {number for number, size in sizes.items() if live_bytes[number] < LIVE_SHARE * size or not size}
    small = sorted((size, number) for number, size in sizes.items() if size < SMALL_BYTES and number not in victims)
    if len(small) >= SMALL_COUNT:
        total = 0
        for size, number in small:
            total += size
            if total <= MERGED_BYTES:
                victims.add(number)
    dead: dict[ChunkId, None] = {}
    copies: list[Copy] = []
    ids = []
    for number in sorted(victims):
        contents = bucket.packs.contents(packs[number].id)
        if contents is None:
            continue
        ids.append(packs[number].id)
        places = store.index.find_many([row.chunk for row in contents.rows])
        for row, found in zip(contents.rows, places, strict=True):
            if row.chunk not in marks:
                dead[row.chunk] = None
            elif found is not None and found.pack in packs.keys() - victims - {number}:
                copies.append(Copy(row.chunk, packs[found.pack].id))
    return CondemnedList(tuple(ids), tuple(dead), tuple(copies))


def _wait(store: MirrorStore, pending: dict[str, CondemnedList]) -> tuple[list[str], set[str]]:
    """The lists by which every server goes, and which servers the others wait for."""
    bucket, patience = store.bucket, store.bucket.patience
    settle_s = bucket.tables.names.settle_s()
    deadline = time.monotonic() + patience.wait_s
    while True:
        # In this order: a lease that is not among these was written after the lists could be seen.
        written = {entry.key: entry.modified_s for entry in bucket.objects.list(LISTS)}
        now_s = bucket.lease.now_s()
        states = live(bucket.objects, now_s)
        holders = {server for key in pending for server in missing_from(states, key)}
        ready = [
            key for key in pending
            if key in written and now_s >= written[key] + settle_s and not missing_from(states, key)
        ]  # fmt: skip
        if len(ready) == len(pending) or time.monotonic() > deadline:
            return ready, holders
        time.sleep(min(_POLL_S, patience.poll_s))
        bucket.sync.often()
        bucket.renew_if_changed()


def _finish(
    store: MirrorStore,
    key: str,
    listed: CondemnedList,
    marks: Marks,
    roots: Roots,
    others: set[str],
    done: _Done,
) -> None:
    """Remove the packs of a list, all that has to stay being in new ones before."""
    bucket = store.bucket
    bucket.sync.everything()
    roots.look()
    known = {pack.id: pack for pack in bucket.packs.all()}
    packs = [known[name] for name in listed.packs if name in known and bucket.is_safe(known[name].number)]
    chunks, copies = frozenset(listed.chunks), frozenset(copy.chunk for copy in listed.copies)
    doomed = {known[name].number for name in (*listed.packs, *others) if name in known}

    def stays(row: Row, place: Location | None) -> bool:
        if row.chunk in chunks:
            return row.chunk in marks
        if row.chunk in copies:
            elsewhere = place is not None and place.pack not in doomed and bucket.is_safe(place.pack)
            return row.chunk in marks and not elsewhere
        return True

    gone: list[RemotePack] = []
    copied_bytes = 0
    with closing(Appender(store.root, store.index)) as appender:
        for pack in packs:
            contents = bucket.packs.contents(pack.id)
            if contents is None:
                continue
            places = store.index.find_many([row.chunk for row in contents.rows])
            rows = [row for row, place in zip(contents.rows, places, strict=True) if stays(row, place)]
            if _is_worth_leaving(contents, rows):
                continue  # what was uploaded while it was condemned has got a name
            moved = _frames(store, pack.number, rows)
            if moved is None:
                done.damaged.append(pack.number)
                continue
            for frame in moved:
                appender.append([frame])
                copied_bytes += frame.stored_bytes
            gone.append(pack)
            dead = chunks.difference(row.chunk for row in rows)
            done.removed_chunks += sum(
                row.chunk in dead and place is not None and place.pack == pack.number
                for row, place in zip(contents.rows, places, strict=True)
            )
            done.freed_bytes += contents.pack_bytes
            done.removed_packs += not rows
            done.rewritten_packs += bool(rows)
        appender.seal()
        appender.commit(move=True)
    bucket.upload()
    done.freed_bytes -= copied_bytes
    for pack in gone:
        bucket.objects.delete(index_key(pack.id))
    for pack in gone:
        bucket.objects.delete(pack_key(pack.id))
    bucket.objects.delete(key)
    bucket.sync.everything()


def _is_worth_leaving(contents: PackIndex, rows: list[Row]) -> bool:
    size = contents.pack_bytes - PACK_HEADER_BYTES
    return size >= SMALL_BYTES and sum(row.end - row.offset for row in rows) >= LIVE_SHARE * size


def _frames(store: MirrorStore, number: int, rows: list[Row]) -> list[Frame] | None:
    """Verified frames of a pack; None when one can not be had: the pack is then left to fsck and the user."""
    places = [(row.chunk, Location(number, *row[1:])) for row in rows]
    store.bucket.bring(places)
    found = []
    for chunk, place in places:
        try:
            found.append(store.read_verified(chunk, place))
        except ChunkError as error:
            log.warning("pack %d is left as it is: %s", number, error.message)
            return None
    return found


def _forget_rows(store: MirrorStore, roots: Roots) -> None:
    """Profiles and origins of block images that are neither kept nor here."""
    index = store.index
    tables: tuple[tuple[str, Callable[[ChunkId], bool]], ...] = (
        ("origins", store.origins.delete),
        ("profiles", store.profiles.delete),
    )
    for table, delete in tables:
        for chunk in _stale(roots, (ChunkId(key) for key, _ in index.rows(table)), store):
            delete(chunk)


def _stale(roots: Roots, keys: Iterable[ChunkId], store: MirrorStore) -> list[ChunkId]:
    return [key for key in list(keys) if key not in roots.rooted and store.index.find(key) is None]
