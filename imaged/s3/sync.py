"""Makes the index of this host say what the bucket holds: packs by their tables of contents, names, condemned lists."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from imaged.chunkstore.environment import COLLECTIONS
from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PackWriter, pack_path
from imaged.chunkstore.rows import Location
from imaged.errors import FormatError, ObjectMissingError
from imaged.ids import ChunkId
from imaged.s3 import condemnedlist, packindex
from imaged.s3.condemnedlist import LISTS, SUFFIX, CondemnedList
from imaged.s3.objects import Objects
from imaged.s3.packindex import PackIndex
from imaged.s3.packtable import (
    IMPORTING,
    PACKS,
    REMOTE,
    PackTable,
    RemotePack,
    id_before,
    index_key,
    locations,
)
from imaged.s3.tables import SharedTables

_MIRRORED = "mirrored"
_CONDEMNED = "condemned"
_STAMP_BYTES = 8
_THREADS = 8
_BATCH_ROWS = 1 << 16
_LOOK_BACK_S = 3600.0
"""Clocks of servers may differ by this: a listing of the newest packs begins so long before now."""
_DENSER = 64
"""A frame that is one part in so many shorter takes the place of the one that is known."""
log = logging.getLogger(__name__)


class Sync:
    """Of one process. Threads share it; only one process of a host is at it at a time."""

    def __init__(
        self,
        root: Path,
        index: Index,
        objects: Objects,
        packs: PackTable,
        tables: SharedTables,
    ) -> None:
        self._root, self._index, self._objects, self._packs, self._tables = root, index, objects, packs, tables
        self._lock = threading.Lock()
        self._begun = {"new": 0, "all": 0}
        self._bad: set[str] = set()

    @property
    def _mark(self) -> Path:
        return self._root / "synced"

    @property
    def _looked(self) -> Path:
        return self._root / "looked"

    def age_s(self) -> float:
        """Since some process of this host last had a whole look."""
        return _age_s(self._mark)

    def silence_s(self) -> float:
        """Since some process of this host last had any look."""
        return _age_s(self._looked)

    def everything(self) -> None:
        """Names, packs, memos, profiles, condemned lists. BucketUnavailableError, StoreError."""
        with self._alone():
            # A pack is there before a name, or a memo, that needs it.
            lists = self._lists()
            self._tables.sync_names()
            self._sync_packs(full=True)
            self._tables.sync_memos()
            self._tables.sync_blobs()
            self._apply_lists(lists)
            self._mark.touch()
            self._looked.touch()

    def often(self) -> None:
        """What changes most: names, new packs, condemned lists."""
        with self._alone():
            lists = self._lists()
            self._tables.sync_names()
            # A list that is done with left packs that are gone: that is to be known before its chunks are pardoned.
            self._sync_packs(full=not self.applied().keys() <= set(lists))
            if any(self._stamp(key) is None for key in lists):
                self._tables.sync_memos()  # as they were after the list was written
            self._apply_lists(lists)
            self._looked.touch()

    def catch_up(self, *, full: bool = False) -> None:
        """Know all packs that were in the bucket when this was called; with `full` forget those that are gone."""
        asked = self._begun["all" if full else "new"]
        with self._lock:
            if self._begun["all" if full else "new"] > asked:
                return  # one that began after we came has ended
            with self._alone_in_host():
                self._sync_packs(full=full)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock, self._alone_in_host():
            yield

    @contextmanager
    def _alone_in_host(self) -> Iterator[None]:
        fd = os.open(self._root / "sync.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    # Packs

    def _sync_packs(self, *, full: bool) -> None:
        self._begun["new"] += 1
        known = {pack.id: pack for pack in self._packs.all()}
        after = ""
        if full or not known:
            self._begun["all"] += 1
            full = True
        else:
            after = PACKS + id_before(int(max(known)[:10], 16) - _LOOK_BACK_S)
        listed = {
            entry.key.removeprefix(PACKS).removesuffix(".idx")
            for entry in self._objects.list(PACKS, after=after)
            if entry.key.endswith(".idx")
        }
        half = [pack for pack in known.values() if pack.state == IMPORTING]
        self._import(half, [name for name in sorted(listed) if name not in known and name not in self._bad])
        if full:
            gone = [pack for pack in known.values() if pack.state == REMOTE and pack.id not in listed]
            self._forget([pack for pack in gone if not self._is_there(index_key(pack.id))])

    def _import(self, half: Iterable[RemotePack], names: list[str]) -> None:
        """Take packs of others into the index, many in a transaction."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3-import") as pool:
            batch: list[tuple[str, PackIndex]] = []
            rows = 0
            numbers = {pack.id: pack for pack in half}
            for name, contents in pool.map(self._fetch_contents, [*numbers, *names]):
                if contents is None:
                    continue
                batch.append((name, contents))
                rows += len(contents.rows)
                if rows >= _BATCH_ROWS:
                    self._import_batch(batch, numbers)
                    batch, rows = [], 0
            if batch:
                self._import_batch(batch, numbers)

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

    def _import_batch(self, batch: list[tuple[str, PackIndex]], numbers: dict[str, RemotePack]) -> None:
        fresh = [name for name, _ in batch if name not in numbers]
        numbers.update({pack.id: pack for pack in self._packs.import_new(fresh)} if fresh else {})
        entries: list[tuple[ChunkId, Location]] = []
        for name, contents in batch:
            entries += locations(numbers[name].number, contents)
        lengths = {numbers[name].number: (contents.pack_bytes, True) for name, contents in batch}
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
        self._packs.set_all([numbers[name] for name, _ in batch], REMOTE)

    def _is_there(self, key: str) -> bool:
        try:
            self._objects.get(key)
        except ObjectMissingError:
            return False
        return True

    def _forget(self, packs: list[RemotePack]) -> None:
        """Packs that a collection removed: their chunks lie elsewhere now, or nowhere."""
        if not packs:
            return
        gone = {pack.number for pack in packs}
        lost = {chunk: place for chunk, place in self._index.chunks() if place.pack in gone}
        if lost:
            moved: dict[ChunkId, Location] = {}
            for other in self._packs.all():
                contents = self._packs.contents(other.id) if other.number not in gone else None
                if contents is None or other.state != REMOTE:
                    continue
                for chunk, place in locations(other.number, contents):
                    if chunk in lost:
                        moved.setdefault(chunk, place)
            self._index.commit(list(moved.items()), {}, move=True)
            self._index.drop([(chunk, lost[chunk]) for chunk in lost if chunk not in moved], forget_memos=True)
        removed = set(self._index.delete_packs(sorted(gone)))
        for pack in packs:
            if pack.number not in removed:
                continue
            held = PackWriter.lock(self._root, pack.number)
            if held is not None:
                held.empty()
                held.close()
                pack_path(self._root, pack.number).unlink(missing_ok=True)
            self._packs.drop_contents(pack.id)
            self._packs.forget(pack.number)
        log.info("%d packs are gone from the bucket, with them %d chunks moved or gone", len(packs), len(lost))

    # Condemned lists

    def _lists(self) -> list[str]:
        return [entry.key for entry in self._objects.list(LISTS) if entry.key.endswith(SUFFIX)]

    def _stamp(self, key: str) -> int | None:
        raw = self._index.get(_MIRRORED, b"l" + key.encode())
        return None if raw is None else int.from_bytes(raw, "big")

    def applied(self) -> dict[str, int]:
        """The condemned lists that this host goes by, and their stamps: a lease of a greater epoch knows them."""
        return {key[1:].decode(): int.from_bytes(raw, "big") for key, raw in self._index.range(_MIRRORED, b"l", b"l")}

    def _apply_lists(self, listed: list[str]) -> None:
        for key in listed:
            if self._stamp(key) is None:
                try:
                    self._apply(key, condemnedlist.parse(self._objects.get(key)))
                except ObjectMissingError:
                    continue
                except FormatError as error:
                    log.error("%s: %s", key, error.message)
        over = [key for key in self.applied() if key not in listed and not self._is_there(key)]
        for key in over:
            self._end(key)

    def _apply(self, key: str, found: CondemnedList) -> None:
        known = {pack.id: pack.number for pack in self._packs.all()}
        # None of them may come in later: its chunks would count as not condemned.
        self._import([], [name for name in found.packs if name not in known])
        known = {pack.id: pack.number for pack in self._packs.all()}
        numbers = {known[name] for name in found.packs if name in known}
        self._move_copies(found, numbers, known)
        with self._index.write("condemn chunks") as txn:
            stamp = self._index.bump(txn, COLLECTIONS).to_bytes(_STAMP_BYTES, "big")
            for chunk in (*found.chunks, *(copy.chunk for copy in found.copies)):
                raw = self._index.get("chunks", chunk, txn=txn)
                if raw is None or Location.unpack(raw).pack not in numbers:
                    continue
                if self._index.get(_CONDEMNED, chunk, txn=txn) is None:
                    self._index.put(txn, _CONDEMNED, chunk, stamp)
            self._index.put(txn, _MIRRORED, b"l" + key.encode(), stamp)
            self._index.bump(txn, COLLECTIONS)

    def _move_copies(self, found: CondemnedList, numbers: set[int], known: dict[str, int]) -> None:
        """What lies in other packs as well is read there from now on, and is not condemned."""
        others: dict[str, set[ChunkId]] = {}
        for copy in found.copies:
            others.setdefault(copy.other, set()).add(copy.chunk)
        for name, chunks in others.items():
            contents = self._packs.contents(name) if name in known and name not in found.packs else None
            if contents is None or not self._packs.is_safe(known[name]):
                continue
            places = [(chunk, place) for chunk, place in locations(known[name], contents) if chunk in chunks]
            held = self._index.find_many([chunk for chunk, _ in places])
            moved = [one for one, old in zip(places, held, strict=True) if old is not None and old.pack in numbers]
            if moved:
                self._index.commit(moved, {}, move=True)

    def _end(self, key: str) -> None:
        """A list is done with: what it condemned and is still there was pardoned, unless another list has it, too."""
        stamp = self._index.get(_MIRRORED, b"l" + key.encode())
        numbers = {pack.id: pack.number for pack in self._packs.all()}
        others: dict[ChunkId, list[tuple[int, set[int]]]] = {}
        for other, its_stamp in sorted(self.applied().items(), key=lambda item: item[1]):
            if other == key:
                continue
            try:
                found = condemnedlist.parse(self._objects.get(other))
            except ObjectMissingError:
                continue
            packs = {numbers[name] for name in found.packs if name in numbers}
            for chunk in (*found.chunks, *(copy.chunk for copy in found.copies)):
                others.setdefault(chunk, []).append((its_stamp, packs))
        with self._index.write("end a condemned list") as txn:
            for key_bytes in [row for row, raw in self._index.rows(_CONDEMNED, txn=txn) if raw == stamp]:
                place = self._index.get("chunks", key_bytes, txn=txn)
                pack = None if place is None else Location.unpack(place).pack
                left = [its_stamp for its_stamp, packs in others.get(ChunkId(key_bytes), ()) if pack in packs]
                if left:
                    self._index.put(txn, _CONDEMNED, key_bytes, left[0].to_bytes(_STAMP_BYTES, "big"))
                else:
                    self._index.delete(txn, _CONDEMNED, key_bytes)
            self._index.delete(txn, _MIRRORED, b"l" + key.encode())


def _age_s(path: Path) -> float:
    try:
        return max(time.time() - path.stat().st_mtime, 0.0)
    except FileNotFoundError:
        return float("inf")
