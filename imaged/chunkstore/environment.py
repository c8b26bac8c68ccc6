"""The LMDB file of a store: tables of rows, and counters; one durable transaction a change."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeAlias

import lmdb

from imaged.chunkstore.indexfile import MAX_READERS, allocate_lock_file, refuse_lost_index, refuse_truncated
from imaged.errors import StoreError
from imaged.faults import store_faults
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
_COUNTER = struct.Struct(">Q")
COLLECTIONS = b"collections"
"""Counter: goes up as a collection begins and once more when it has condemned; the epoch of leases."""
NAMES = b"names"
"""Counter: goes up in each transaction after which something new may be kept alive by a name, or no longer is."""
LAST_PACK = b"last_pack"
"""Counter: the greatest number of a pack that was removed."""
Txn: TypeAlias = "lmdb.Transaction[bytes]"

_shared: dict[Path, Environment] = {}
_shared_lock = threading.Lock()


class Environment:
    """An open LMDB file. Threads share it, and so do all stores of one process at one path; a forked child may not."""

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
                    refuse_truncated(path)
                opened = cls._open(path, readonly=readonly)
            _shared[path] = opened
            return opened

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

    def version(self) -> int:
        """Another number after each change, by whichever process."""
        self._refuse_fork()
        with self._env.begin() as txn:
            return int(txn.id())


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


_inherited: list[Environment] = []
os.register_at_fork(after_in_child=_forget_after_fork)
