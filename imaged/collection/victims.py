"""Which chunks an eviction takes, and how they leave the index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from imaged.chunkstore import condemned
from imaged.chunkstore.condemned import NamesChangedError
from imaged.chunkstore.lease import least_epoch
from imaged.chunkstore.rows import Location
from imaged.chunkstore.store import ChunkStore
from imaged.collection import promised
from imaged.collection.promised import Promised
from imaged.ids import ChunkId
from imaged.slices import slices

_SWEEP_COUNT = 2000
_LOOK_UP = 512
_CHOICE = 2048


class Victims:
    """Of one store, with what is known of it from one eviction to the next. For one thread at a time."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._promised: Promised | None = None
        self._known: set[ChunkId] = set()

    def choose(self, byte_count: int) -> dict[ChunkId, Location]:
        """Of so many bytes, the skeleton of what has a name only when nothing else is left. FormatError, StoreError."""
        spared = self._survey()
        for chunks in promised.given(self._store, self._known):
            self._store.uses.adopt(chunks)
        count = _CHOICE
        while True:
            oldest = self._store.uses.oldest(count)
            chosen, last, gone = dict[ChunkId, Location](), dict[ChunkId, Location](), list[ChunkId]()
            left = byte_count
            for chunk, place in self._placed(oldest, gone):
                if chunk in spared.never:
                    continue
                if chunk in spared.last:
                    last[chunk] = place
                    continue
                chosen[chunk] = place
                left -= place.stored_bytes
                if left <= 0:
                    break
            if left <= 0 or len(oldest) < count:
                break
            count *= 4
        self._store.uses.forget(gone)
        for chunk, place in last.items():
            if left <= 0:
                break
            chosen[chunk] = place
            left -= place.stored_bytes
        return chosen

    def _survey(self) -> Promised:
        self._promised = promised.survey(self._store, self._promised)
        return self._promised

    def _placed(self, chunks: Iterable[ChunkId], gone: list[ChunkId]) -> Iterator[tuple[ChunkId, Location]]:
        for some in slices(chunks, _LOOK_UP):
            for chunk, place in zip(some, self._store.index.find_many(some), strict=True):
                if place is not None:
                    yield chunk, place
                elif not self._store.has(chunk):
                    gone.append(chunk)

    def remove(self, victims: dict[ChunkId, Location]) -> int:
        """Take them out of the index, but for those that are promised by now; how many went."""
        store, index = self._store, self._store.index
        stamp = condemned.begin(index)
        try:
            for some in slices(victims, _SWEEP_COUNT):
                condemned.condemn(index, some, stamp)
        finally:
            condemned.finish(index)
        before = least_epoch(store.leases.live())
        removed = 0
        left = list(victims)
        try:
            while left and (before is None or stamp < before):
                now = self._survey()
                left = [chunk for chunk in left if chunk not in now.never]
                try:
                    for some in list(slices(left, _SWEEP_COUNT)):
                        removed += condemned.remove(index, some, before=before, names=now.names)
                        del left[: len(some)]
                except NamesChangedError:
                    continue
        finally:
            # What stays is no less here than before.
            for some in slices(victims, _SWEEP_COUNT):
                condemned.pardon(index, some)
        return removed
