"""Keeping images and snapshots by a lease while somebody else may just be taking their names away."""

from __future__ import annotations

from collections.abc import Sequence

from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkError, FormatError
from imaged.ids import ChunkId
from imaged.reach import reachable, reachable_snapshot


def unsafe(store: ChunkStore, records: Sequence[ChunkId]) -> list[ChunkId]:
    """Of records that a lease keeps from just now on, those that a collection may be about to take in spite of that.

    One that has a name now is safe: whoever collects looks at names before it looks at leases, so it sees one of the
    two. One that has none is safe when all of it is here, and may be relied on, under a lease that is released after
    this look: the next collection sees what the first lease keeps.

    Not for records that were kept before and found safe: a collection that has seen it may condemn their chunks and
    pardons them, and in between they look as if they were about to go.
    """
    named = {ref.record for _, ref in store.refs.items()} | {ref.record for _, ref in store.snapshots.items()}
    unnamed = [record for record in records if record not in named]
    if not unnamed:
        return []
    with store.lease(f"looking at {len(unnamed)} records"):
        return [record for record in unnamed if not _is_whole(store, record)]


def _is_whole(store: ChunkStore, record: ChunkId) -> bool:
    for walk in (reachable, reachable_snapshot):
        try:
            return not store.missing(list(walk(store, record)))
        except FormatError:  # then it is the other, or neither
            continue
        except ChunkError:
            return False
    return False
