"""The LMDB index of a store: the truth about which chunks exist and where their frames lie.

Tables: chunks (id -> Location), packs (number -> PackRow), condemned (imaged/chunkstore/condemned.py), and small ones
(imaged/chunkstore/refs.py, snapshotrefs.py, offers.py).
A change is one durable transaction, made after the packs it speaks of are durable; so a killed process loses what it
had not committed and nothing else. docs/formats/pack.md describes the values.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import lmdb

from imaged.chunkstore.indexfile import MAX_READERS, allocate_lock_file, refuse_lost_index, refuse_truncated
from imaged.chunkstore.pack import PACK_HEADER_BYTES, disk_bytes, is_written, pack_bytes
from imaged.errors import StoreError
from imaged.faults import store_faults
from imaged.frame import HEADER_BYTES, Codec
from imaged.ids import ChunkId
from imaged.publish import sync_directory

INDEX_NAME = "index.mdb"
MAP_BYTES = 64 << 30
FORMAT = b"1"
TABLES = (
    "meta",
    "chunks",
    "packs",
    "refs",
    "memos",
    "origins",
    "profiles",
    "fills",
    "offers",
    "snapshots",
    "condemned",
    "owned",
    "tenantprofiles",
    "remotes",
    "mirrored",
    "uses",
)
_LATER_TABLES = frozenset(
    {"profiles", "fills", "offers", "snapshots", "condemned", "owned", "tenantprofiles", "remotes", "mirrored", "uses"}
)
"""Stores of format 1 may lack these until someone opens them for writing; they are then empty."""
LOCATION = struct.Struct("<IQIIB")
"""pack, offset, size_bytes, payload_bytes, codec"""
_PACK_NUMBER = struct.Struct(">I")
FOREIGN_PACKS = 1 << 31
"""Packs of other servers of a bucket have greater numbers (imaged/s3/packtable.py), those of this host lesser ones."""
_UPLOADED = b"r"
"""How the row of a pack in `remotes` begins when the bucket has it."""
_COUNTER = struct.Struct(">Q")
COLLECTIONS = b"collections"
"""Counter: goes up as a collection begins and once more when it has condemned; the epoch of leases."""
NAMES = b"names"
"""Counter: goes up in each transaction after which something new may be kept alive by a name, or no longer is."""
LAST_PACK = b"last_pack"
"""Counter: the greatest number of a pack that was removed."""
_PACK_ROW = struct.Struct("<QBIQQ")
Txn: TypeAlias = "lmdb.Transaction[bytes]"
log = logging.getLogger(__name__)


class Location(NamedTuple):
    """Where a chunk's frame lies, and what its header says."""

    pack: int
    offset: int
    size_bytes: int
    payload_bytes: int
    codec: Codec

    @property
    def stored_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        pack, offset, size_bytes, payload_bytes, codec = LOCATION.unpack(raw)
        return cls(pack, offset, size_bytes, payload_bytes, Codec(codec))

    def pack_bytes(self) -> bytes:
        return LOCATION.pack(self.pack, self.offset, self.size_bytes, self.payload_bytes, self.codec)


class PackRow(NamedTuple):
    """One pack: how much of the file counts, and what of it is live (is the one place of a chunk)."""

    committed_bytes: int = PACK_HEADER_BYTES
    sealed: bool = False
    live_chunks: int = 0
    live_bytes: int = 0
    live_size_bytes: int = 0

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        committed_bytes, sealed, live_chunks, live_bytes, live_size_bytes = _PACK_ROW.unpack(raw)
        return cls(committed_bytes, bool(sealed), live_chunks, live_bytes, live_size_bytes)

    def pack_bytes(self) -> bytes:
        return _PACK_ROW.pack(*self)

    def changed(self, location: Location, sign: int) -> PackRow:
        """With one live chunk more (sign 1) or less (-1)."""
        return self._replace(
            live_chunks=self.live_chunks + sign,
            live_bytes=self.live_bytes + sign * location.stored_bytes,
            live_size_bytes=self.live_size_bytes + sign * location.size_bytes,
        )

    @property
    def dead_bytes(self) -> int:
        return self.committed_bytes - PACK_HEADER_BYTES - self.live_bytes


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """`logical_bytes` uncompressed and `stored_bytes` as frames of what is live.

    `dead_bytes` are of the packs' bytes on disk those that no chunk lies in, nor will: gc frees them, but for parts of
    blocks.
    """

    logical_bytes: int
    stored_bytes: int
    chunks: int
    packs: int
    dead_bytes: int


_shared: dict[Path, Index] = {}
_shared_lock = threading.Lock()


class Index:
    """An open index. Threads share it, and so do all stores of one process at one path; a forked child may not."""

    def __init__(self, path: Path, env: lmdb.Environment, *, readonly: bool) -> None:
        self.path, self.readonly = path, readonly
        self._env, self._pid, self._users = env, os.getpid(), 1
        self._write_lock = threading.Lock()
        self.is_mirror = False
        """Of a bucket: a chunk that only another process of this host has does not count before it is uploaded."""
        if readonly:
            self._tables = {}
            for name in TABLES:
                try:
                    self._tables[name] = env.open_db(name.encode(), create=False)
                except lmdb.NotFoundError:
                    if name not in _LATER_TABLES:
                        raise
        else:
            with env.begin(write=True) as txn:
                self._tables = {name: env.open_db(name.encode(), txn=txn) for name in TABLES}

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False, trust: bool = False) -> Self:
        """The index at `path`, made when it is not there (unless `readonly`).

        A file that is too short is refused, not mapped: its lost pages would end us with SIGBUS. `trust` maps it.
        """
        path = path.resolve()
        with _shared_lock:
            found = _shared.get(path)
            if found is not None and found._pid == os.getpid():
                if found.readonly and not readonly:
                    with store_faults("open its index for writing", path.parent):
                        os.close(os.open(path, os.O_RDWR))
                    raise StoreError(f"store {path.parent}: open for reading only in this process")
                found._users += 1
                assert isinstance(found, cls)
                return found
            with store_faults("open its index", path.parent):
                if not trust:
                    refuse_truncated(path)
                index = cls._open(path, readonly=readonly)
            _shared[path] = index
            return index

    @classmethod
    def _open(cls, path: Path, *, readonly: bool) -> Self:
        fresh = not path.exists()
        if (fresh or path.stat().st_size == 0) and path.name == INDEX_NAME:
            refuse_lost_index(path.parent)
        try:
            allocate_lock_file(path)
            env = _environment(path, readonly=False, lock=True)
        except (lmdb.Error, OSError):
            if not readonly or fresh:
                raise
            # A directory this user, or the mount, lets nobody write: without a lock file when that can not be had.
            try:
                env = _environment(path, readonly=True, lock=True)
            except (lmdb.Error, OSError):
                env = _environment(path, readonly=True, lock=False)
        try:
            index = cls(path, env, readonly=bool(env.flags()["readonly"]))
            index._check_format()
            if fresh:
                sync_directory(path.parent)
            env.reader_check()
        except BaseException:
            env.close()
            raise
        return index

    def _check_format(self) -> None:
        with self._env.begin() as txn:
            found = txn.get(b"format", db=self._tables["meta"])
        if found is None and not self.readonly:
            with self.write("set up its index") as txn:
                txn.put(b"format", FORMAT, db=self._tables["meta"])
        elif found != FORMAT:
            raise StoreError(
                f"store {self.path.parent}: index format {found!r}, this version reads {FORMAT!r}",
                hint="use the pVisor version that made it, or another PVISOR_HOME",
            )

    def close(self) -> None:
        """Give back one `open`; the last one closes the environment."""
        with _shared_lock:
            self._users -= 1
            if self._users == 0 and self._pid == os.getpid():
                _shared.pop(self.path, None)
                self._env.close()

    @contextmanager
    def read(self) -> Iterator[Txn]:
        """A snapshot."""
        self._refuse_fork()
        with store_faults("read its index", self.path.parent), self._env.begin() as txn:
            yield txn

    @contextmanager
    def write(self, what: str) -> Iterator[Txn]:
        """One durable change; an exception from the block takes it back."""
        self._refuse_fork()
        with store_faults(what, self.path.parent), self._write_lock, self._env.begin(write=True) as txn:
            yield txn

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise StoreError(f"store {self.path.parent}: opened before fork, in process {self._pid}")

    def rows(self, table: str, *, txn: Txn | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value of a table, in key order, of one snapshot."""
        if table not in self._tables:
            return
        if txn is not None:
            yield from txn.cursor(db=self._tables[table])
            return
        with self.read() as snapshot:
            yield from snapshot.cursor(db=self._tables[table])

    def range(self, table: str, start: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The rows from `start` on whose keys begin with `prefix`, of one snapshot."""
        if table not in self._tables:
            return
        with self.read() as txn:
            cursor = txn.cursor(db=self._tables[table])
            if cursor.set_range(start):
                for key, value in cursor:
                    if not key.startswith(prefix):
                        return
                    yield key, value

    def first_key(self, table: str, start: bytes, txn: Txn) -> bytes | None:
        """The first key from `start` on."""
        if table not in self._tables:
            return None
        cursor = txn.cursor(db=self._tables[table])
        found = cursor.set_range(start) if start else cursor.first()
        return cursor.key() if found else None

    def keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        """The keys of a table from `start` on, in order, of one snapshot."""
        if table not in self._tables:
            return
        with self.read() as txn:
            cursor = txn.cursor(db=self._tables[table])
            if cursor.set_range(start) if start else cursor.first():
                yield from cursor.iternext(keys=True, values=False)

    def get(self, table: str, key: bytes, *, txn: Txn | None = None) -> bytes | None:
        if table not in self._tables:
            return None
        if txn is not None:
            return txn.get(key, db=self._tables[table])
        with self.read() as snapshot:
            return snapshot.get(key, db=self._tables[table])

    def is_empty(self, table: str, *, txn: Txn) -> bool:
        return table not in self._tables or not txn.stat(self._tables[table])["entries"]

    def put(self, txn: Txn, table: str, key: bytes, value: bytes) -> None:
        txn.put(key, value, db=self._tables[table])

    def delete(self, txn: Txn, table: str, key: bytes) -> bool:
        return txn.delete(key, db=self._tables[table])

    def counter(self, name: bytes, *, txn: Txn | None = None) -> int:
        """One of the counters in the table `meta`; 0 before it first went up."""
        raw = self.get("meta", name, txn=txn)
        return 0 if raw is None else int(_COUNTER.unpack(raw)[0])

    def bump(self, txn: Txn, name: bytes) -> int:
        """A counter's next value, within the caller's transaction."""
        value = self.counter(name, txn=txn) + 1
        self.put(txn, "meta", name, _COUNTER.pack(value))
        return value

    def raise_counter(self, txn: Txn, name: bytes, least: int) -> None:
        """Let a counter be at least this, within the caller's transaction."""
        if self.counter(name, txn=txn) < least:
            self.put(txn, "meta", name, _COUNTER.pack(least))

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

    def version(self) -> int:
        """Another number after each change, by whichever process."""
        self._refuse_fork()
        with self._env.begin() as txn:
            return int(txn.id())

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
        return {_PACK_NUMBER.unpack(key)[0]: PackRow.unpack(value) for key, value in rows}

    def pack(self, number: int) -> PackRow | None:
        raw = self.get("packs", _PACK_NUMBER.pack(number))
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
            txn.put(_PACK_NUMBER.pack(number), row.pack_bytes(), db=self._tables["packs"])
        return True

    def delete_packs(self, numbers: Iterable[int]) -> list[int]:
        """Forget those packs in which no chunk lies, also in the moment of the change; which these are."""
        gone = []
        with self.write("drop packs") as txn:
            for number in numbers:
                raw = txn.get(_PACK_NUMBER.pack(number), db=self._tables["packs"])
                if raw is not None and PackRow.unpack(raw).live_chunks:
                    continue
                txn.delete(_PACK_NUMBER.pack(number), db=self._tables["packs"])
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
        remote = txn.get(_PACK_NUMBER.pack(number), db=self._tables["remotes"])
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
        if self.get("remotes", _PACK_NUMBER.pack(number)) is not None:
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
            raw = self._txn.get(_PACK_NUMBER.pack(number), db=self._table)
            row = PackRow() if raw is None else PackRow.unpack(raw)
        return row

    def change(self, location: Location, sign: int) -> None:
        self.rows[location.pack] = self.get(location.pack).changed(location, sign)

    def store(self) -> None:
        for number, row in self.rows.items():
            self._txn.put(_PACK_NUMBER.pack(number), row.pack_bytes(), db=self._table)


def _environment(path: Path, *, readonly: bool, lock: bool) -> lmdb.Environment:
    return lmdb.open(
        str(path),
        subdir=False,
        map_size=MAP_BYTES,
        readonly=readonly,
        create=not readonly,
        mode=0o644,
        lock=lock,
        readahead=False,
        max_dbs=len(TABLES),
        max_readers=MAX_READERS,
        max_spare_txns=8,
    )


def _forget_after_fork() -> None:
    """A child keeps the parent's environments alive (closing them would touch the parent's locks) and unused."""
    global _shared_lock
    _inherited.extend(_shared.values())
    _shared.clear()
    _shared_lock = threading.Lock()


_inherited: list[Index] = []
os.register_at_fork(after_in_child=_forget_after_fork)
