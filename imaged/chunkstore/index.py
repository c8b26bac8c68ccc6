"""The index of a store: the truth about which chunks exist and where their frames lie.

Tables: chunks (id -> Location), packs (number -> PackRow), condemned (imaged/chunkstore/condemned.py), and small ones
(imaged/chunkstore/refs.py, snapshotrefs.py, offers.py).
A change is one durable transaction, made after the packs it speaks of are durable; so a killed process loses what it
had not committed and nothing else. docs/formats/pack.md describes the values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import lmdb

from imaged.chunkstore.environment import COLLECTIONS, LAST_PACK, Environment, Txn
from imaged.chunkstore.pack import PACK_HEADER_BYTES, disk_bytes, is_written, pack_bytes
from imaged.chunkstore.rows import FOREIGN_PACKS, PACK_NUMBER, Location, PackRow, StoreUsage
from imaged.ids import ChunkId

_UPLOADED = b"r"
"""How the row of a pack in `remotes` begins when the bucket has it."""


class Index(Environment):
    """The chunks and packs of a store. Shared as an `Environment` is."""

    def __init__(self, path: Path, env: lmdb.Environment, *, readonly: bool) -> None:
        super().__init__(path, env, readonly=readonly)
        self.is_mirror = False
        """Of a bucket: a chunk that only another process of this host has does not count before it is uploaded."""

    def collections(self) -> int:
        """The epoch that a lease has which begins now."""
        return self.counter(COLLECTIONS)

    def find(self, chunk: ChunkId) -> Location | None:
        raw = self.get("chunks", chunk)
        return None if raw is None else Location.unpack(raw)

    def find_many(self, chunks: Sequence[ChunkId]) -> list[Location | None]:
        """The location of each, from one snapshot."""
        table = self._tables["chunks"]
        with self.read() as txn:
            found = [txn.get(chunk, db=table) for chunk in chunks]
        return [None if raw is None else Location.unpack(raw) for raw in found]

    def raw_locations(self, chunks: Sequence[ChunkId]) -> list[bytes | None]:
        """As `find_many`, as the table has them (`LOCATION`): five times as fast, for one who answers requests."""
        self._refuse_fork()
        try:
            with self._env.begin(db=self._tables["chunks"]) as txn:
                get = txn.get
                return [get(chunk) for chunk in chunks]
        except lmdb.Error:
            return [None if found is None else found.pack_bytes() for found in self.find_many(chunks)]

    def chunks(self, start: bytes = b"") -> Iterator[tuple[ChunkId, Location]]:
        """Those from `start` on, by id, of one snapshot."""
        with self.read() as txn:
            cursor = txn.cursor(db=self._tables["chunks"])
            if cursor.set_range(start) if start else cursor.first():
                for key, value in cursor:
                    yield ChunkId(key), Location.unpack(value)

    def packs(self, *, txn: Txn | None = None) -> dict[int, PackRow]:
        rows = self.rows("packs", txn=txn)
        return {PACK_NUMBER.unpack(key)[0]: PackRow.unpack(value) for key, value in rows}

    def pack(self, number: int) -> PackRow | None:
        raw = self.get("packs", PACK_NUMBER.pack(number))
        return None if raw is None else PackRow.unpack(raw)

    def last_pack(self) -> int:
        """The greatest number that a removed pack had. No pack may have it again, nor a lesser one that is free: other
        processes may have the removed file open under it."""
        return self.counter(LAST_PACK)

    def put_pack(self, number: int, row: PackRow) -> bool:
        """Note a new pack; False when its number was used before, by one that has been removed meanwhile."""
        with self.write("note a pack") as txn:
            if number <= self.counter(LAST_PACK, txn=txn):
                return False
            txn.put(PACK_NUMBER.pack(number), row.pack_bytes(), db=self._tables["packs"])
        return True

    def delete_packs(self, numbers: Iterable[int]) -> list[int]:
        """Forget those packs in which no chunk lies, also in the moment of the change; which these are."""
        gone = []
        with self.write("drop packs") as txn:
            for number in numbers:
                raw = txn.get(PACK_NUMBER.pack(number), db=self._tables["packs"])
                if raw is not None and PackRow.unpack(raw).live_chunks:
                    continue
                txn.delete(PACK_NUMBER.pack(number), db=self._tables["packs"])
                gone.append(number)
            last = max((number for number in gone if number < FOREIGN_PACKS), default=0)
            self.raise_counter(txn, LAST_PACK, last)
        return gone

    def commit(
        self,
        entries: Iterable[tuple[ChunkId, Location]],
        lengths: dict[int, tuple[int, bool]],
        *,
        move: bool = False,
        anew: Collection[Location] = (),
    ) -> None:
        """Durable frames become chunks; `lengths` are the packs' new (committed length, sealed).

        A chunk that another process committed first keeps its place and this frame is dead. One that was condemned is
        condemned no more, and has the new place: who put it has not looked at the old one. With `move` a chunk that is
        there gets the new place, condemned or not, and one that is not there stays away. In the mirror of a bucket a
        place in a pack that was not uploaded yet gives way, too. Places in `anew` take that of another in any case.
        """
        table, condemned = self._tables["chunks"], self._tables["condemned"]
        with self.write("commit chunks") as txn:
            rows = _PackRows(txn, self._tables["packs"])
            any_condemned = not self.is_empty("condemned", txn=txn)
            for chunk, location in entries:
                doomed = not move and any_condemned and txn.delete(chunk, db=condemned)
                forced = move or doomed or location in anew
                if forced or (self.is_mirror and self._gives_way(txn, chunk, location.pack)):
                    old = txn.get(chunk, db=table)
                    if old is not None:
                        rows.change(Location.unpack(old), -1)
                    elif move:
                        continue
                    txn.put(chunk, location.pack_bytes(), db=table)
                elif not txn.put(chunk, location.pack_bytes(), overwrite=False, db=table):
                    continue
                rows.change(location, 1)
            for number, (committed_bytes, sealed) in lengths.items():
                rows.rows[number] = rows.get(number)._replace(committed_bytes=committed_bytes, sealed=sealed)
            rows.store()

    def _gives_way(self, txn: Txn, chunk: ChunkId, pack: int) -> bool:
        """Whether a chunk lies in another pack that is not in the bucket: its writer may never upload it."""
        raw = txn.get(chunk, db=self._tables["chunks"])
        if raw is None:
            return False
        number = Location.unpack(raw).pack
        remote = txn.get(PACK_NUMBER.pack(number), db=self._tables["remotes"])
        return number != pack and (remote is None or not remote.startswith(_UPLOADED))

    def drop(self, entries: Iterable[tuple[ChunkId, Location]], *, forget_memos: bool) -> int:
        """Forget chunks that still lie where the caller saw them; how many did.

        `forget_memos` also empties the layer memos: one of them may promise a chunk that has just gone.
        """
        dropped = 0
        table = self._tables["chunks"]
        with self.write("drop chunks") as txn:
            rows = _PackRows(txn, self._tables["packs"])
            for chunk, location in entries:
                if txn.get(chunk, db=table) == location.pack_bytes():
                    txn.delete(chunk, db=table)
                    txn.delete(chunk, db=self._tables["condemned"])
                    rows.change(location, -1)
                    dropped += 1
            rows.store()
            if dropped and forget_memos:
                txn.drop(self._tables["memos"], delete=False)
        return dropped

    def remove(self, txn: Txn, chunks: Iterable[ChunkId]) -> int:
        """Forget these chunks wherever they lie, and that they were condemned, within the caller's transaction; how
        many there were."""
        removed = 0
        table, condemned = self._tables["chunks"], self._tables["condemned"]
        rows = _PackRows(txn, self._tables["packs"])
        for chunk in chunks:
            txn.delete(chunk, db=condemned)
            txn.delete(chunk, db=self._tables["uses"])
            raw = txn.pop(chunk, db=table)
            if raw is not None:
                rows.change(Location.unpack(raw), -1)
                removed += 1
        rows.store()
        return removed

    def usage(self) -> StoreUsage:
        packs = self.packs()
        rows = packs.values()
        return StoreUsage(
            logical_bytes=sum(row.live_size_bytes for row in rows),
            stored_bytes=sum(row.live_bytes for row in rows),
            chunks=sum(row.live_chunks for row in rows),
            packs=len(rows),
            dead_bytes=sum(self._dead_bytes(number, row) for number, row in packs.items()),
        )

    def _dead_bytes(self, number: int, row: PackRow) -> int:
        """Of one pack, with a tail past its committed length, unless that is a writer's who may commit it yet."""
        root = self.path.parent
        if self.get("remotes", PACK_NUMBER.pack(number)) is not None:
            return row.dead_bytes  # it takes what the bucket holds, whatever of it is here
        tail_bytes = max(pack_bytes(root, number) - row.committed_bytes, 0)
        pending_bytes = tail_bytes if tail_bytes and is_written(root, number) else 0
        dead_bytes = row.dead_bytes + tail_bytes - pending_bytes
        on_disk = disk_bytes(root, number) - PACK_HEADER_BYTES - row.live_bytes if dead_bytes else 0
        return min(dead_bytes, max(on_disk - pending_bytes, 0))


class _PackRows:
    """The pack rows that one transaction changes."""

    def __init__(self, txn: Txn, table: lmdb._Database) -> None:
        self.rows: dict[int, PackRow] = {}
        self._txn, self._table = txn, table

    def get(self, number: int) -> PackRow:
        row = self.rows.get(number)
        if row is None:
            raw = self._txn.get(PACK_NUMBER.pack(number), db=self._table)
            row = PackRow() if raw is None else PackRow.unpack(raw)
        return row

    def change(self, location: Location, sign: int) -> None:
        self.rows[location.pack] = self.get(location.pack).changed(location, sign)

    def store(self) -> None:
        for number, row in self.rows.items():
            self._txn.put(PACK_NUMBER.pack(number), row.pack_bytes(), db=self._table)
