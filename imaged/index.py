"""The LMDB index of a store: the truth about which chunks exist and where their frames lie.

Tables: chunks (id -> Location), packs (number -> PackRow), and small ones (imaged/refs.py, snapshotrefs.py, offers.py).
A change is one durable transaction, made after the packs it speaks of are durable; so a killed process loses what it
had not committed and nothing else. docs/formats/pack.md describes the values.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import lmdb

from imaged.errors import StoreError
from imaged.faults import REBUILD_HINT, store_faults
from imaged.frame import HEADER_BYTES, Codec
from imaged.ids import ChunkId
from imaged.pack import PACK_HEADER_BYTES, disk_bytes, is_written, pack_bytes, pack_numbers, pack_path
from imaged.publish import sync_directory

INDEX_NAME = "index.mdb"
MAP_BYTES = 64 << 30
FORMAT = b"1"
TABLES = ("meta", "chunks", "packs", "refs", "memos", "origins", "profiles", "fills", "offers", "snapshots")
_LATER_TABLES = frozenset({"profiles", "fills", "offers", "snapshots"})
"""Stores of format 1 may lack these until someone opens them for writing; they are then empty."""
_LOCATION = struct.Struct("<IQIIB")
_PACK_NUMBER = struct.Struct(">I")
_PACK_ROW = struct.Struct("<QBIQQ")
_MAX_READERS = 1024
LOCK_SUFFIX = "-lock"
_META = struct.Struct("<16xI20xI92xQQ")
"""Of LMDB's meta page: magic, page size, number of the last page, transaction."""
_META_MAGIC = 0xBEEFC0DE
_META_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LOCK_FILE_BYTES = 4096 + 64 * _MAX_READERS
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
        pack, offset, size_bytes, payload_bytes, codec = _LOCATION.unpack(raw)
        return cls(pack, offset, size_bytes, payload_bytes, Codec(codec))

    def pack_bytes(self) -> bytes:
        return _LOCATION.pack(self.pack, self.offset, self.size_bytes, self.payload_bytes, self.codec)


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
                    _refuse_truncated(path)
                index = cls._open(path, readonly=readonly)
            _shared[path] = index
            return index

    @classmethod
    def _open(cls, path: Path, *, readonly: bool) -> Self:
        fresh = not path.exists()
        if (fresh or path.stat().st_size == 0) and path.name == INDEX_NAME:
            refuse_lost_index(path.parent)
        try:
            _allocate_lock_file(path)
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

    def get(self, table: str, key: bytes, *, txn: Txn | None = None) -> bytes | None:
        if table not in self._tables:
            return None
        if txn is not None:
            return txn.get(key, db=self._tables[table])
        with self.read() as snapshot:
            return snapshot.get(key, db=self._tables[table])

    def put(self, txn: Txn, table: str, key: bytes, value: bytes) -> None:
        txn.put(key, value, db=self._tables[table])

    def delete(self, txn: Txn, table: str, key: bytes) -> bool:
        return txn.delete(key, db=self._tables[table])

    def find(self, chunk: ChunkId) -> Location | None:
        raw = self.get("chunks", chunk)
        return None if raw is None else Location.unpack(raw)

    def find_many(self, chunks: Sequence[ChunkId]) -> list[Location | None]:
        """The location of each, from one snapshot."""
        table = self._tables["chunks"]
        with self.read() as txn:
            found = [txn.get(chunk, db=table) for chunk in chunks]
        return [None if raw is None else Location.unpack(raw) for raw in found]

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

    def put_pack(self, number: int, row: PackRow) -> None:
        with self.write("note a pack") as txn:
            txn.put(_PACK_NUMBER.pack(number), row.pack_bytes(), db=self._tables["packs"])

    def delete_packs(self, numbers: Iterable[int]) -> None:
        with self.write("drop packs") as txn:
            for number in numbers:
                txn.delete(_PACK_NUMBER.pack(number), db=self._tables["packs"])

    def commit(
        self, entries: Iterable[tuple[ChunkId, Location]], lengths: dict[int, tuple[int, bool]], *, move: bool = False
    ) -> None:
        """Durable frames become chunks; `lengths` are the packs' new (committed length, sealed).

        A chunk that another process committed first keeps its place and this frame is dead. With `move` it is the other
        way round: a chunk that is there gets the new place, and one that is not there stays away.
        """
        table = self._tables["chunks"]
        with self.write("commit chunks") as txn:
            rows = _PackRows(txn, self._tables["packs"])
            for chunk, location in entries:
                if move:
                    old = txn.get(chunk, db=table)
                    if old is None:
                        continue
                    rows.change(Location.unpack(old), -1)
                    txn.put(chunk, location.pack_bytes(), db=table)
                elif not txn.put(chunk, location.pack_bytes(), overwrite=False, db=table):
                    continue
                rows.change(location, 1)
            for number, (committed_bytes, sealed) in lengths.items():
                rows.rows[number] = rows.get(number)._replace(committed_bytes=committed_bytes, sealed=sealed)
            rows.store()

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
                    rows.change(location, -1)
                    dropped += 1
            rows.store()
            if dropped and forget_memos:
                txn.drop(self._tables["memos"], delete=False)
        return dropped

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
        max_readers=_MAX_READERS,
        max_spare_txns=8,
    )


def _allocate_lock_file(path: Path) -> None:
    """LMDB makes its lock file sparse and writes to it through a mapping: on a full disk that ends us with SIGBUS."""
    fd = os.open(f"{path}{LOCK_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


def refuse_lost_index(root: Path) -> None:
    """StoreError when there are full packs: an empty index would let the next writer cut them away."""
    full = sum(1 for number in pack_numbers(root) if pack_path(root, number).stat().st_size > PACK_HEADER_BYTES)
    if full:
        raise StoreError(f"store {root}: the index is gone, {full} packs with chunks are there", hint=REBUILD_HINT)


def _refuse_truncated(path: Path) -> None:
    """StoreError when the file ends before pages that count.

    LMDB does not write pages that one transaction took and gave back, so that a sound index may be short as well: only
    reading all of it, in a process that may die of it, tells.
    """
    try:
        with path.open("rb") as file:
            expected = _pages_bytes(file.read(2 * _META_PAGE_BYTES))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return
    if size >= expected:
        return
    from imaged.salvage import salvage  # it opens indexes itself

    try:
        salvage(path)
    except StoreError as error:
        message = f"store {path.parent}: the index is truncated: {size} bytes, its pages take {expected}"
        raise StoreError(message, hint=REBUILD_HINT) from error
    try:
        # Spare the next ones the reading. This never shortens a file that grows meanwhile.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, expected - 1, 1)
        finally:
            os.close(fd)
    except OSError as error:
        log.info("index %s stays short: %s", path, error.strerror)


def _pages_bytes(head: bytes) -> int:
    """What all pages take by the newer of LMDB's two meta pages; 0 when there is none, which LMDB itself refuses."""
    newest = (-1, 0)
    for start in (0, _META_PAGE_BYTES):
        if len(head) < start + _META.size:
            break
        magic, page_bytes, last_page, transaction = _META.unpack_from(head, start)
        if magic == _META_MAGIC:
            newest = max(newest, (transaction, (last_page + 1) * page_bytes))
    return newest[1]


def _forget_after_fork() -> None:
    """A child keeps the parent's environments alive (closing them would touch the parent's locks) and unused."""
    global _shared_lock
    _inherited.extend(_shared.values())
    _shared.clear()
    _shared_lock = threading.Lock()


_inherited: list[Index] = []
os.register_at_fork(after_in_child=_forget_after_fork)
