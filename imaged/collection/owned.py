"""Which chunks a namespace holds: those that its tokens uploaded, converted or published, whoever else has them too.

The chunks themselves are stored once. A row `namespace NUL chunk id` says that the namespace has shown that it has
these bytes, so it may read them; without a row the chunk is not here for it. A value is <stamp u64, whole u8>: the
number of collections there had been when the namespace last relied on the row, and whether the chunk is a record of
which it holds everything.

A row goes when nothing that the namespace names needs it any more, also when others keep the chunk alive: else who
takes his own name away could see, by what is left, what others have.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from imaged.chunkstore.condemned import begin
from imaged.chunkstore.environment import COLLECTIONS, Txn
from imaged.chunkstore.index import Index
from imaged.chunkstore.lease import least_epoch
from imaged.collection.marks import Marks
from imaged.errors import FormatError
from imaged.ids import ChunkId
from imaged.reach import Marker

if TYPE_CHECKING:
    from imaged.chunkstore.store import ChunkStore

TABLE = "owned"
PROFILES = "tenantprofiles"
"""As `profiles`, of namespaces: a profile that one has recorded is not another's to see."""
_VALUE = struct.Struct("<QB")
_SWEEP_COUNT = 2000
log = logging.getLogger(__name__)


class OwnedTable:
    """The rows of one store. Threads may share it."""

    def __init__(self, index: Index, check_writable: Callable[[], None]) -> None:
        self._index, self._check_writable = index, check_writable

    def has(self, namespace: str, chunk: ChunkId) -> bool:
        return self._index.get(TABLE, row_key(namespace, chunk)) is not None

    def has_all(self, namespace: str, chunks: Sequence[ChunkId]) -> bool:
        with self._index.read() as txn:
            return all(self._index.get(TABLE, row_key(namespace, chunk), txn=txn) is not None for chunk in chunks)

    def held(self, namespace: str, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of `chunks` that the namespace holds."""
        with self._index.read() as txn:
            return {chunk for chunk in chunks if self._index.get(TABLE, row_key(namespace, chunk), txn=txn) is not None}

    def is_whole(self, namespace: str, record: ChunkId) -> bool:
        """Whether the namespace is known to hold all of an image or snapshot."""
        raw = self._index.get(TABLE, row_key(namespace, record))
        return raw is not None and bool(_VALUE.unpack(raw)[1])

    def is_held(self, chunk: ChunkId) -> bool:
        """Whether any namespace holds it."""
        return any(self.has(namespace, chunk) for namespace in self.namespaces())

    def namespaces(self) -> list[str]:
        """Those that hold anything, or have profiles."""
        return sorted({*self._prefixes(TABLE), *self._prefixes(PROFILES)})

    def _prefixes(self, table: str) -> Iterator[str]:
        """The first parts of a table's keys: one step a namespace, however much it holds."""
        start = b""
        with self._index.read() as txn:
            while (key := self._index.first_key(table, start, txn)) is not None:
                namespace, _, _ = key.partition(b"\0")
                yield namespace.decode()
                start = namespace + b"\1"

    def add(self, namespace: str, chunks: Iterable[ChunkId], *, whole: ChunkId | None = None) -> None:
        """The namespace holds these from now on, durably; and if it is given, everything below the record `whole`."""
        rows = list(chunks)
        self._check_writable()
        with self._index.write("note what a namespace holds") as txn:
            stamp = self._collections(txn)
            for chunk in rows:
                raw = self._index.get(TABLE, row_key(namespace, chunk), txn=txn)
                flag = 0 if raw is None else _VALUE.unpack(raw)[1]
                self._index.put(txn, TABLE, row_key(namespace, chunk), _VALUE.pack(stamp, flag))
            if whole is not None:
                self._index.put(txn, TABLE, row_key(namespace, whole), _VALUE.pack(stamp, 1))

    def rely(self, namespace: str, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        """As `held`, for one who will name them: a collection that has begun already does not take these rows away."""
        held, stale = set(), []
        with self._index.read() as txn:
            stamp = self._collections(txn)
            for chunk in chunks:
                raw = self._index.get(TABLE, row_key(namespace, chunk), txn=txn)
                if raw is None:
                    continue
                held.add(chunk)
                if _VALUE.unpack(raw)[0] < stamp:
                    stale.append(chunk)
        if stale:
            with self._index.write("go on holding chunks") as txn:
                stamp = self._collections(txn)
                for chunk in stale:
                    raw = self._index.get(TABLE, row_key(namespace, chunk), txn=txn)
                    if raw is None:
                        held.discard(chunk)
                    else:
                        self._index.put(
                            txn, TABLE, row_key(namespace, chunk), _VALUE.pack(stamp, _VALUE.unpack(raw)[1])
                        )
        return held

    def sweep(self, namespace: str, is_kept: Callable[[ChunkId], bool], *, before: int) -> int:
        """Drop the rows of chunks that are not kept and were last relied on before this many collections; how many.

        Those of whole records go first: a kill in between leaves none that promises what is gone.
        """
        dropped = 0
        for flag in (1, 0):
            start = row_key(namespace)
            while True:
                keys = []
                for key, value in self._index.range(TABLE, start, row_key(namespace)):
                    stamp, whole = _VALUE.unpack(value)
                    if whole == flag and stamp < before and not is_kept(ChunkId(key[-ChunkId.SIZE_BYTES :])):
                        keys.append(key)
                        if len(keys) == _SWEEP_COUNT:
                            break
                dropped += self._drop(keys, before)
                if len(keys) < _SWEEP_COUNT:
                    break
                start = keys[-1]
        stale = [key for key, _ in self._index.range(PROFILES, row_key(namespace), row_key(namespace))]
        stale = [key for key in stale if not is_kept(ChunkId(key[-ChunkId.SIZE_BYTES :]))]
        if stale:
            with self._index.write("forget profiles") as txn:
                for key in stale:
                    self._index.delete(txn, PROFILES, key)
        return dropped

    def _drop(self, keys: Sequence[bytes], before: int) -> int:
        if not keys:
            return 0
        count = 0
        with self._index.write("forget what a namespace holds") as txn:
            for key in keys:
                raw = self._index.get(TABLE, key, txn=txn)
                if raw is not None and _VALUE.unpack(raw)[0] < before:
                    count += self._index.delete(txn, TABLE, key)
        return count

    def _collections(self, txn: Txn) -> int:
        return self._index.counter(COLLECTIONS, txn=txn)


def row_key(namespace: str, chunk: bytes = b"") -> bytes:
    """The key of a row; without a chunk what all keys of the namespace begin with."""
    return namespace.encode() + b"\0" + chunk


def sweep(store: ChunkStore) -> int:
    """Drop what namespaces hold, neither name nor lease, and did not rely on since the oldest lease that may name it
    began; how many rows. For a collection, which is alone, before it forgets chunks.

    A row of what others have too goes in the same collection as the chunk would go if nobody had it.
    """
    namespaces = store.owned.namespaces()
    if not namespaces:
        return 0
    stamp = begin(store.index)  # who relies on a row from here on stamps it so
    states = store.leases.live()
    oldest = least_epoch(states)
    before = stamp if oldest is None else min(oldest, stamp)
    dropped = 0
    for namespace in namespaces:
        marks = Marks(store.index)
        marker = Marker(store, marks)
        leased = {record for state in states if state.namespace == namespace for record in state.keeps}
        for record in {*leased, *(ref.record for _, ref in store.refs.items(f"{namespace}/"))}:
            _mark(marker, record)
        for _, ref in store.snapshots.items(f"{namespace}."):
            _mark(marker, ref.record)
        dropped += store.owned.sweep(namespace, marks.__contains__, before=before)
    return dropped


def _mark(marker: Marker, record: ChunkId) -> None:
    """An image or a snapshot. One that is damaged holds nothing: nobody can read it by its name either."""
    try:
        try:
            marker.image(record)
        except FormatError:
            marker.snapshot(record)
    except FormatError as error:
        log.warning("%s: %s", record, error.message)
