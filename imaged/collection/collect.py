"""Garbage collection: mark from the names, condemn the rest, forget what nobody relies on, then give the bytes back.

It goes on while servers, node daemons, conversions and virtual machines use the store (imaged/chunkstore/lease.py has
the argument), and a kill at any point leaves a sound store: marks are in memory only, a condemned chunk can be read and
is put anew by who wants it, a chunk leaves the index before its bytes go, a moved one is durable in its new pack before
the old one goes, and a layer memo goes before the chunks it promises. What a killed collection condemned is pardoned or
removed by the next one.

Chunks are condemned and removed in rounds of bounded size, so that little space is needed and, on a full disk, each
round makes room for the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from imaged.chunkstore import condemned
from imaged.chunkstore.condemned import NamesChangedError
from imaged.chunkstore.environment import Txn
from imaged.chunkstore.lease import least_epoch
from imaged.chunkstore.pack import PACKS_DIRECTORY, disk_bytes, pack_numbers
from imaged.chunkstore.store import MIRROR_NAME, ChunkStore
from imaged.chunkstore.storelock import CollectionLock
from imaged.collection import lastcollection, owned, reserve
from imaged.collection.compact import compact, cut_tails, punch_dead, remove_empty
from imaged.collection.marks import Marks
from imaged.collection.roots import Roots
from imaged.errors import NotFoundError, StoreFullError
from imaged.faults import store_faults
from imaged.ids import ChunkId
from imaged.slices import slices

_ROUND_COUNT = 65_536
_SWEEP_COUNT = 2000
"""Chunks condemned or removed in one transaction: small ones need little free space, and hold up writers for
milliseconds."""
_LEAST_COUNT = 16
_TRIES = 64
_TABLES = ("origins", "profiles", "fills", "offers")
"""Rows of block images and images, which go when these have gone."""
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What a collection did.

    `freed_bytes` went back to the file system, `dead_bytes` still lie between live chunks: parts of blocks, or all of
    them where the file system makes no holes; they go when their pack is rewritten. `damaged_packs` hold live chunks
    that do not verify and were left as they are. `waiting_chunks` are reachable from nothing, and stay because of
    leases, which `waiting_for` names: a later collection removes them.
    """

    kept_chunks: int
    removed_chunks: int
    freed_bytes: int
    dead_bytes: int
    removed_packs: int
    rewritten_packs: int
    forgotten_layers: int
    waiting_chunks: int = 0
    waiting_for: tuple[str, ...] = ()
    damaged_packs: tuple[int, ...] = ()


def _nothing() -> Iterable[ChunkId]:
    return ()


def collect(
    root: Path,
    *,
    keep: Callable[[], Iterable[ChunkId]] = _nothing,
    keep_snapshots: Callable[[], Iterable[ChunkId]] = _nothing,
) -> CollectReport:
    """Remove what neither a name, nor a lease, nor `keep`, more ids of image records, nor `keep_snapshots`, of snapshot
    records, keeps alive. Both are called several times: what they tell must be true until the end, or be kept by a
    lease before they tell it no longer.

    NotFoundError when there is no store. StoreBusyError while another process collects, checks or rebuilds it.
    StoreError, and nothing is removed, when an image or snapshot lacks chunks that no server holds: what it still needs
    can not be known. One that is to be kept and has no record is passed over. A snapshot does not keep its parent.
    """
    root = root.absolute()
    with store_faults("read its directory", root):
        mirrored = (root / MIRROR_NAME).exists()
    if mirrored:
        from imaged.s3.collect import collect_bucket

        return collect_bucket(root, keep=keep, keep_snapshots=keep_snapshots)
    if not (root / PACKS_DIRECTORY).is_dir():
        raise NotFoundError(
            f"no chunk store at {root}", hint="a server's store is the directory given to serve --store"
        )
    with CollectionLock.alone(root), reserve.given_up(root), ChunkStore.open(root) as store:
        before_bytes = _disk_bytes(root)
        marks = Marks(store.index)
        roots = Roots(store, marks, keep, keep_snapshots)
        roots.look()
        cut_tails(root, store.index)
        forgotten = _with_room(store, roots.forget_memos)
        sweep = _Sweep(store, marks, roots)
        owned.sweep(store)
        sweep.run()
        _with_room(store, lambda: _forget_rows(store, roots))
        removed_packs = _with_room(store, lambda: remove_empty(root, store.index))
        compacted = compact(root, store.index)
        punch_dead(root, store.index, exclude=compacted.damaged)
        usage = store.df()
        freed_bytes = max(before_bytes - _disk_bytes(root), 0)
        lastcollection.note(store.index, removed_chunks=sweep.removed, freed_bytes=freed_bytes)
        return CollectReport(
            kept_chunks=usage.chunks - sweep.waiting_chunks,
            removed_chunks=sweep.removed,
            freed_bytes=freed_bytes,
            dead_bytes=usage.dead_bytes,
            removed_packs=removed_packs,
            rewritten_packs=len(compacted.rewritten),
            forgotten_layers=forgotten,
            waiting_chunks=sweep.waiting_chunks,
            waiting_for=tuple(sorted(sweep.waiting_for)),
            damaged_packs=tuple(compacted.damaged),
        )


def _disk_bytes(root: Path) -> int:
    return sum(disk_bytes(root, number) for number in pack_numbers(root))


def _with_room(store: ChunkStore, change: Callable[[], T]) -> T:
    """Do this; when the disk is full, once more after everything was given back that needs no room to be."""
    try:
        return change()
    except StoreFullError:
        punch_dead(store.root, store.index)
        return change()


@dataclass(slots=True)
class _Sweep:
    """Condemns what is not marked, and removes what is condemned as far as the leases allow."""

    store: ChunkStore
    marks: Marks
    roots: Roots
    removed: int = 0
    waiting_chunks: int = 0
    waiting_for: set[str] = field(default_factory=set)

    def run(self) -> None:
        """StoreError, StoreFullError when not even the smallest change has room."""
        index = self.store.index
        start: bytes | None = b""
        while start is not None:
            first = start
            fresh, start = self.marks.unmarked(index, first, _ROUND_COUNT)
            if not fresh and (first or next(condemned.rows(index), None) is None):
                break
            stamp = _with_room(self.store, lambda: condemned.begin(index))
            count = self._condemn(fresh, stamp)
            if count < len(fresh):  # the disk is full: make room, and come back for the others
                start = fresh[count]
            _with_room(self.store, lambda: condemned.finish(index))
            # Only now: a lease that is not among these does not rely on what was condemned.
            leases = self.store.leases.live()
            if self.roots.look():
                self._pardon()
            before, removed = least_epoch(leases), self.removed
            if not first:  # what other collections left
                self._pardon()
                for some in slices(self._rows(), _SWEEP_COUNT):
                    self._remove(some, before)
            self._remove(fresh[:count], before)
            self.waiting_for |= {lease.holder for lease in leases if lease.epoch is not None}
            if count < len(fresh) and self.removed == removed and start == first:
                raise StoreFullError(
                    f"store {self.store.root}: no room for the smallest change of its index",
                    hint="free a few hundred KB there, then collect again",
                )
        self.waiting_chunks = sum(1 for _ in condemned.rows(index))
        if not self.waiting_chunks:
            self.waiting_for = set()

    def _rows(self) -> Iterator[ChunkId]:
        """Every condemned chunk. No snapshot of the index is held meanwhile: its pages could not be used again."""
        start: bytes | None = b""
        while start is not None:
            some = list(islice(self.store.index.keys("condemned", start), _SWEEP_COUNT))
            start = some[-1] + b"\0" if len(some) == _SWEEP_COUNT else None
            yield from map(ChunkId, some)

    def _condemn(self, chunks: Sequence[ChunkId], stamp: int) -> int:
        """How many of them, from the first on: all, unless the disk is full."""
        done, size = 0, _SWEEP_COUNT
        while done < len(chunks):
            try:
                condemned.condemn(self.store.index, chunks[done : done + size], stamp)
            except StoreFullError:
                if size == _LEAST_COUNT:
                    return done
                size = max(_LEAST_COUNT, size // 4)
                punch_dead(self.store.root, self.store.index)
            else:
                done += size
        return len(chunks)

    def _pardon(self) -> None:
        """What is condemned and marked by now."""
        for some in slices((chunk for chunk in self._rows() if chunk in self.marks), _SWEEP_COUNT):
            condemned.pardon(self.store.index, some)

    def _remove(self, chunks: Sequence[ChunkId], before: int | None) -> None:
        index, size, done, tries = self.store.index, _SWEEP_COUNT, 0, 0
        while done < len(chunks):
            doomed = [chunk for chunk in chunks[done : done + size] if chunk not in self.marks]
            try:
                self.removed += condemned.remove(index, doomed, before=before, names=self.roots.names)
            except NamesChangedError:
                tries += 1
                if tries == _TRIES:
                    log.warning("names change too often: %d chunks stay until the next collection", len(chunks) - done)
                    return
                if self.roots.look():
                    self._pardon()
            except StoreFullError:
                if size == _LEAST_COUNT:
                    raise
                size = max(_LEAST_COUNT, size // 4)
                punch_dead(self.store.root, index)
            else:
                tries = 0
                done += size


def _forget_rows(store: ChunkStore, roots: Roots) -> None:
    """Drop what small tables say of block images and images that are neither kept nor here.

    Who goes to name one has put its root before he looks for such a row, or writes it.
    """
    index = store.index

    def is_stale(key: bytes, txn: Txn | None = None) -> bool:
        return ChunkId(key) not in roots.rooted and index.get("chunks", key, txn=txn) is None

    for table in _TABLES:
        stale = [key for key, _ in index.rows(table) if is_stale(key)]
        if stale:
            with index.write("forget an image") as txn:
                for key in stale:
                    if is_stale(key, txn):
                        index.delete(txn, table, key)
