"""Makes the index of this host say what the bucket holds: packs by their tables of contents, names, condemned lists."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imaged.chunkstore.environment import COLLECTIONS
from imaged.chunkstore.index import Index
from imaged.chunkstore.rows import Location
from imaged.errors import FormatError, ObjectMissingError
from imaged.flock import alone
from imaged.ids import ChunkId
from imaged.s3 import condemnedlist
from imaged.s3.condemnedlist import LISTS, SUFFIX, CondemnedList
from imaged.s3.objects import Objects, is_there
from imaged.s3.packsync import PackSync
from imaged.s3.packtable import PackTable, locations
from imaged.s3.tables import SharedTables

_MIRRORED = "mirrored"
_CONDEMNED = "condemned"
_STAMP_BYTES = 8
log = logging.getLogger(__name__)


class Sync:
    """Of one process. Threads share it; only one process of a host is at it at a time. Requests do not wait for that:
    they look for packs by themselves (`packs`)."""

    def __init__(
        self,
        root: Path,
        index: Index,
        objects: Objects,
        packs: PackTable,
        tables: SharedTables,
    ) -> None:
        self._root, self._index, self._objects, self._table, self._tables = root, index, objects, packs, tables
        self.packs = PackSync(root, index, objects, packs)
        self._lock = threading.Lock()

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
            self._tables.sync_names(whole=True)
            self.packs.look(full=True)
            self._tables.sync_memos()
            self._tables.sync_blobs()
            self._apply_lists(lists)
            self._mark.touch()
            self._looked.touch()

    def often(self) -> None:
        """What changes most: names, new packs, condemned lists."""
        with self._alone():
            lists = self._lists()
            self._tables.sync_names(whole=False)
            # A list that is done with left packs that are gone: that is to be known before its chunks are pardoned.
            self.packs.look(full=not self.applied().keys() <= set(lists))
            if any(self._stamp(key) is None for key in lists):
                self._tables.sync_memos()  # as they were after the list was written
            self._apply_lists(lists)
            self._looked.touch()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock, alone(self._root / "sync.lock"):
            yield

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
        over = [key for key in self.applied() if key not in listed and not is_there(self._objects, key)]
        for key in over:
            self._end(key)

    def _apply(self, key: str, found: CondemnedList) -> None:
        # None of them may come in later: its chunks would count as not condemned.
        self.packs.bring_in(found.packs)
        with self.packs.changing():
            known = {pack.id: pack.number for pack in self._table.all()}
            numbers = {known[name] for name in found.packs if name in known}
            self._move_copies(found, numbers, known)
            self._condemn(key, found, numbers)

    def _condemn(self, key: str, found: CondemnedList, numbers: set[int]) -> None:
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
            contents = self._table.contents(name) if name in known and name not in found.packs else None
            if contents is None or not self._table.is_safe(known[name]):
                continue
            places = [(chunk, place) for chunk, place in locations(known[name], contents) if chunk in chunks]
            held = self._index.find_many([chunk for chunk, _ in places])
            moved = [one for one, old in zip(places, held, strict=True) if old is not None and old.pack in numbers]
            if moved:
                self._index.commit(moved, {}, move=True)

    def _end(self, key: str) -> None:
        """A list is done with: what it condemned and is still there was pardoned, unless another list has it, too."""
        stamp = self._index.get(_MIRRORED, b"l" + key.encode())
        numbers = {pack.id: pack.number for pack in self._table.all()}
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
