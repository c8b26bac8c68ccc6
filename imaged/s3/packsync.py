"""Makes the index of this host say which packs the bucket has, by listing their tables of contents.

Who asks for a chunk that is not known waits for such a look. So nothing here waits for the bucket while it holds a lock
that others take: what was listed and read is checked again when it comes into the index. Packs are taken in by age, so
that all are known which are older than the newest known one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PackWriter, pack_path
from imaged.chunkstore.rows import Location
from imaged.errors import FormatError, ObjectMissingError
from imaged.flock import alone
from imaged.ids import ChunkId
from imaged.s3 import packindex
from imaged.s3.objects import Objects, is_there
from imaged.s3.packindex import PackIndex
from imaged.s3.packtable import (
    IMPORTING,
    PACKS,
    REMOTE,
    UPLOADING,
    PackTable,
    RemotePack,
    id_before,
    index_key,
    locations,
)

_THREADS = 8
_SLICE = 64
"""So many tables of contents are read ahead of the index."""
_BATCH_ROWS = 1 << 16
_LOOK_BACK_S = 3600.0
"""Clocks of servers may differ by this: a listing of the newest packs begins so long before now."""
_DENSER = 64
"""A frame that is one part in so many shorter takes the place of the one that is known."""
log = logging.getLogger(__name__)
_Contents = tuple[str, PackIndex]


class PackSync:
    """Of one process. Threads share it, and so do processes of a host."""

    def __init__(self, root: Path, index: Index, objects: Objects, packs: PackTable) -> None:
        self._root, self._index, self._objects, self._packs = root, index, objects, packs
        self._bad: set[str] = set()
        self._new, self._all = _Turns(), _Turns()

    def catch_up(self, *, full: bool = False) -> None:
        """As `look`; who asks at the same time shares one."""
        turns = self._all if full else self._new
        with turns.next() as is_due:
            if is_due:
                self.look(full=full)

    def look(self, *, full: bool) -> None:
        """Know all packs that were in the bucket when this was called; with `full` forget those that are gone.

        BucketUnavailableError, StoreError.
        """
        while not self._look(full=full):
            log.info("packs went from the bucket while it was looked at; once more")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Where chunks lie is changed by nobody else of this host within the block, which makes no request."""
        with alone(self._root / "packs.lock"):
            yield

    def bring_in(self, names: Sequence[str]) -> None:
        """Have these packs in the index, as far as the bucket has them. BucketUnavailableError, StoreError."""
        while True:
            epoch = self._packs.forgotten()
            known = {pack.id for pack in self._packs.all()}
            if self._import([name for name in names if name not in known], epoch):
                return

    def _look(self, *, full: bool) -> bool:
        epoch = self._packs.forgotten()
        known = {pack.id: pack for pack in self._packs.all()}
        full = full or not known
        after = "" if full else PACKS + id_before(int(max(known)[:10], 16) - _LOOK_BACK_S)
        listed = {
            entry.key.removeprefix(PACKS).removesuffix(".idx")
            for entry in self._objects.list(PACKS, after=after)
            if entry.key.endswith(".idx")
        }
        half = [pack.id for pack in known.values() if pack.state == IMPORTING]
        fresh = [name for name in sorted(listed) if name not in known and name not in self._bad]
        if not self._import([*half, *fresh], epoch):
            return False
        if full:
            gone = [pack for pack in known.values() if pack.state != UPLOADING and pack.id not in listed]
            self._forget([pack for pack in gone if not is_there(self._objects, index_key(pack.id))])
        return True

    # Taking packs of others in

    def _import(self, names: Sequence[str], epoch: int) -> bool:
        """Many packs in a transaction. False when packs were forgotten since `epoch`, maybe some of these."""
        if not names:
            return True
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3-import") as pool:
            batch: list[_Contents] = []
            rows = 0
            for start in range(0, len(names), _SLICE):
                for name, contents in pool.map(self._fetch_contents, names[start : start + _SLICE]):
                    if contents is None:
                        continue
                    batch.append((name, contents))
                    rows += len(contents.rows)
                    if rows >= _BATCH_ROWS:
                        if not self._import_batch(batch, epoch):
                            return False
                        batch, rows = [], 0
            return self._import_batch(batch, epoch)

    def _fetch_contents(self, name: str) -> tuple[str, PackIndex | None]:
        found = self._packs.contents(name)
        if found is None:
            try:
                raw = self._objects.get(index_key(name))
                found = packindex.parse(raw)
                self._packs.keep_contents(name, raw)
            except ObjectMissingError:
                return name, None
            except FormatError as error:
                log.error("%s: %s", index_key(name), error.message)
                self._bad.add(name)
        return name, found

    def _import_batch(self, batch: list[_Contents], epoch: int) -> bool:
        with self.changing():
            if self._packs.forgotten() != epoch:
                return False
            known = {pack.id: pack for pack in self._packs.all()}
            batch = [one for one in batch if one[0] not in known or known[one[0]].state == IMPORTING]
            fresh = [name for name, _ in batch if name not in known]
            if not batch:
                return True
            known.update({pack.id: pack for pack in self._packs.import_new(fresh)} if fresh else {})
            entries: list[tuple[ChunkId, Location]] = []
            for name, contents in batch:
                entries += locations(known[name].number, contents)
            lengths = {known[name].number: (contents.pack_bytes, True) for name, contents in batch}
            held = self._index.find_many([chunk for chunk, _ in entries])
            denser = [
                (chunk, place)
                for (chunk, place), old in zip(entries, held, strict=True)
                if old is not None and (old.payload_bytes - place.payload_bytes) * _DENSER >= old.payload_bytes
            ]
            # Only what lies in the bucket already: anything else gives way by itself.
            self._index.commit(entries, lengths)
            if denser:
                self._index.commit(denser, {}, move=True)
            self._packs.set_all([known[name] for name, _ in batch], REMOTE)
        return True

    # Forgetting packs that a collection removed

    def _forget(self, packs: list[RemotePack]) -> None:
        """Their chunks lie elsewhere now, or nowhere."""
        if not packs:
            return
        gone = {pack.number for pack in packs}
        lost = {chunk: place for chunk, place in self._index.chunks() if place.pack in gone}
        moved = self._elsewhere(lost, gone) if lost else {}
        with self.changing():
            known = {pack.number for pack in self._packs.all()}
            moved = {chunk: place for chunk, place in moved.items() if place.pack in known}
            self._index.commit(list(moved.items()), {}, move=True)
            self._index.drop([(chunk, lost[chunk]) for chunk in lost if chunk not in moved], forget_memos=True)
            removed = set(self._index.delete_packs(sorted(gone)))
            for pack in packs:
                if pack.number in removed:
                    self._remove(pack)
        log.info("%d packs are gone from the bucket, with them %d chunks moved or gone", len(packs), len(lost))

    def _elsewhere(self, lost: dict[ChunkId, Location], gone: set[int]) -> dict[ChunkId, Location]:
        """Where else in the bucket chunks lie."""
        found: dict[ChunkId, Location] = {}
        for other in self._packs.all():
            contents = self._packs.contents(other.id) if other.number not in gone else None
            if contents is None or other.state != REMOTE:
                continue
            for chunk, place in locations(other.number, contents):
                if chunk in lost:
                    found.setdefault(chunk, place)
        return found

    def _remove(self, pack: RemotePack) -> None:
        held = PackWriter.lock(self._root, pack.number)
        if held is not None:
            held.empty()
            held.close()
            pack_path(self._root, pack.number).unlink(missing_ok=True)
        self._packs.drop_contents(pack.id)
        self._packs.forget(pack.number)


class _Turns:
    """One look at a time; who waited while another one began and ended well needs none of his own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._ended = 0

    @contextmanager
    def next(self) -> Iterator[bool]:
        """Whether a look is due within the block."""
        asked = self._begun
        with self._lock:
            if self._ended > asked:
                yield False
                return
            self._begun += 1
            number = self._begun
            yield True
            self._ended = number
