"""Chunks that a collection found unreachable: still readable, but on the way out. The table `condemned` of the index.

A row is a chunk id and its stamp, the value of the counter `collections` when the chunk was condemned. Who goes to rely
on a chunk, which is to name it without having put it, asks `unreliable` with the epoch of a lease that it holds: a
chunk whose stamp is below that is as good as gone. `remove` forgets only chunks with stamps below the epoch of every
lease, so that a chunk on which somebody relies stays. imaged/chunkstore/lease.py has the whole argument.

What condemns and removes (a collection, the eviction of a cache) is alone with
`imaged.chunkstore.storelock.CollectionLock`:

    stamp = begin(index)                  epochs of leases that begin from here on are at least this
    condemn(index, chunks, stamp)
    finish(index)                         and from here on greater: such leases do not rely on what was condemned
    before = least_epoch(leases.live())   read after that
    ...                                   look again what is reachable, `pardon` that
    remove(index, chunks, before=before)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from imaged.chunkstore.environment import COLLECTIONS, NAMES, Txn
from imaged.chunkstore.index import Index
from imaged.errors import StoreError
from imaged.ids import ChunkId

_STAMP = struct.Struct(">Q")
_TABLE = "condemned"


class NamesChangedError(Exception):
    """A name changed since the caller looked which chunks are reachable."""


def begin(index: Index) -> int:
    """The stamp of a new collection."""
    with index.write("begin a collection") as txn:
        return index.bump(txn, COLLECTIONS)


def finish(index: Index) -> None:
    """Nothing more gets the last stamp."""
    begin(index)


def condemn(index: Index, chunks: Iterable[ChunkId], stamp: int) -> int:
    """Condemn those that are here, in one transaction; how many were not condemned before. Those keep their stamps.

    StoreError when another collection has begun since: a late row with an old stamp would be taken for one that every
    lease has seen.
    """
    value = _STAMP.pack(stamp)
    fresh = 0
    with index.write("condemn chunks") as txn:
        if index.counter(COLLECTIONS, txn=txn) != stamp:
            raise StoreError(f"collection {stamp} was overtaken by another one", hint="try again")
        for chunk in chunks:
            if index.get("chunks", chunk, txn=txn) is not None and stamp_of(index, chunk, txn=txn) is None:
                index.put(txn, _TABLE, chunk, value)
                fresh += 1
    return fresh


def pardon(index: Index, chunks: Iterable[ChunkId]) -> int:
    """These are reachable after all; how many were condemned."""
    with index.write("pardon chunks") as txn:
        return sum(index.delete(txn, _TABLE, chunk) for chunk in chunks)


def remove(index: Index, chunks: Sequence[ChunkId], *, before: int | None, names: int | None = None) -> int:
    """Forget those of these chunks that are condemned with a stamp below `before` (None: any), in one transaction; how
    many chunks that were.

    NamesChangedError, and nothing is forgotten, when the counter of changes to names is not `names` any more.
    """
    with index.write("remove chunks") as txn:
        if names is not None and index.counter(NAMES, txn=txn) != names:
            raise NamesChangedError
        doomed = []
        for chunk in chunks:
            stamp = stamp_of(index, chunk, txn=txn)
            if stamp is not None and (before is None or stamp < before):
                doomed.append(chunk)
        return index.remove(txn, doomed)


def stamp_of(index: Index, chunk: ChunkId, *, txn: Txn | None = None) -> int | None:
    """With which number a chunk was condemned; None when it is not."""
    raw = index.get(_TABLE, chunk, txn=txn)
    return None if raw is None else int(_STAMP.unpack(raw)[0])


def is_reliable(index: Index, chunk: ChunkId, epoch: int | None) -> bool:
    """As `unreliable`, of one chunk."""
    with index.read() as txn:
        if index.get("chunks", chunk, txn=txn) is None:
            return False
        stamp = stamp_of(index, chunk, txn=txn)
        return stamp is None or (epoch is not None and stamp >= epoch)


def unreliable(index: Index, chunks: Sequence[ChunkId], epoch: int | None) -> list[ChunkId]:
    """Those that are not here, or condemned before `epoch`, which is of a lease that the caller holds (None: it holds
    none, and no condemned one counts). In order, from one snapshot."""
    found = []
    with index.read() as txn:
        spared = index.is_empty(_TABLE, txn=txn)
        for chunk in chunks:
            if index.get("chunks", chunk, txn=txn) is None:
                found.append(chunk)
            elif not spared:
                stamp = stamp_of(index, chunk, txn=txn)
                if stamp is not None and (epoch is None or stamp < epoch):
                    found.append(chunk)
    return found


def rows(index: Index) -> Iterator[tuple[ChunkId, int]]:
    """Every condemned chunk and its stamp, by id, of one snapshot."""
    for key, value in index.rows(_TABLE):
        yield ChunkId(key), int(_STAMP.unpack(value)[0])
