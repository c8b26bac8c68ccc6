"""A ChunkStore whose directory is the mirror of a bucket: what it has put and flushed is in the bucket."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from imaged.chunkstore.index import Index
from imaged.chunkstore.rows import Location
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.storelock import StoreLock
from imaged.errors import ChunkCorruptError, ChunkMissingError, ChunkUnreadableError, StoreError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.reach import reachable, reachable_snapshot
from imaged.s3.bucket import Bucket

_LOOKUP_COUNT = 256
log = logging.getLogger(__name__)


class MirrorStore(ChunkStore):
    """As ChunkStore; threads may share it. `ChunkStore.open` makes one for a directory with a `bucket.json`.

    A chunk that is here but that the bucket does not have yet can be read, and is no reason not to put it again: only
    its own process knows when it will be uploaded. What is asked for and not known is looked for in the bucket once,
    because another server may just have uploaded it. Reading may raise BucketUnavailableError.
    """

    bucket: Bucket

    def __init__(self, root: Path, lock: StoreLock, index: Index, *, readonly: bool, commit_s: float | None) -> None:
        index.is_mirror = True
        self._commit_s = commit_s
        super().__init__(root, lock, index, readonly=readonly, commit_s=commit_s)
        try:
            self.bucket = Bucket.attach(root, index, self.leases, readonly=readonly)
        except BaseException:
            with contextlib.suppress(StoreError):
                self._writer.close()
            self._reader.close()
            index.close()
            raise
        self.bucket.verify = self._verify
        self.bucket.on_fetched = self._note_fetched
        self.refs.shared = self.snapshots.shared = self.bucket.tables
        self.memos.shared = self.origins.shared = self.profiles.shared = self.bucket.tables

    def close(self) -> None:
        if self._closed:
            return
        try:
            if not self.readonly and self._commit_s is not None:
                self.flush()
        finally:
            self.bucket.close()
            super().close()

    # Reading

    def get(self, chunk: ChunkId) -> bytes:
        try:
            return self._get(chunk)
        except ChunkMissingError:
            self.bucket.catch_up()
            return self._get(chunk)

    def _get(self, chunk: ChunkId) -> bytes:
        try:
            return super().get(chunk)
        except ChunkUnreadableError:
            raise
        except ChunkCorruptError:
            if self.index.find(chunk) is None:
                raise
            return super().get(chunk)  # the local copy was damaged, and is whole again

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        for start in range(0, len(chunks), _LOOKUP_COUNT):
            part = chunks[start : start + _LOOKUP_COUNT]
            self.bucket.bring(self._places(part))
            yield from super().frames(part)

    def frames_bytes(self, chunks: Sequence[ChunkId]) -> int:
        """And begin to fetch them: who asks is about to send them all."""
        self.bucket.prefetch(self._places(chunks))
        return super().frames_bytes(chunks)

    def _places(self, chunks: Sequence[ChunkId]) -> list[tuple[ChunkId, Location]]:
        unknown = [chunk for chunk in chunks if not self.has(chunk)]
        if unknown:
            self.bucket.catch_up()
        found = zip(chunks, self.index.find_many(chunks), strict=True)
        return [(chunk, place) for chunk, place in found if place is not None]

    def _read(self, chunk: ChunkId, location: Location) -> Frame:
        try:
            return super()._read(chunk, location)
        except ChunkCorruptError:
            if not self.bucket.is_safe(location.pack):
                raise
        return self.bucket.frame(chunk, location)

    def read_verified(self, chunk: ChunkId, location: Location) -> Frame:
        """The frame at this place. ChunkError, BucketUnavailableError."""
        frame = self._read(chunk, location)
        try:
            frame.open()
        except ChunkCorruptError:
            return self.bucket.frame(chunk, location)
        return frame

    def _drop(self, chunk: ChunkId, location: Location) -> None:
        if self.bucket.is_safe(location.pack):
            try:
                self.bucket.frame(chunk, location)
            except ChunkCorruptError as error:
                log.error("%s", error.message)
                if not self.readonly:
                    self.bucket.tables.drop_memos()
            else:
                return
        super()._drop(chunk, location)

    def _note_fetched(self, chunks: list[ChunkId]) -> None:
        self.uses.fetched(chunks)

    # Relying

    def missing(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        lacking = self._unreliable(chunks)
        if lacking:
            self.bucket.catch_up()
            lacking = self._unreliable(lacking)
        return lacking

    def absent(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        lacking = super().absent(chunks)
        if lacking:
            self.bucket.catch_up()
            lacking = super().absent(lacking)
        return lacking

    def _unreliable(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        wanted = list(dict.fromkeys(chunks))
        lacking = set(super()._unreliable(wanted))
        for start in range(0, len(wanted), _LOOKUP_COUNT):
            part = wanted[start : start + _LOOKUP_COUNT]
            for chunk, place in zip(part, self.index.find_many(part), strict=True):
                if place is not None and not self._counts(place.pack) and self._writer.find(chunk) is None:
                    lacking.add(chunk)
        return [chunk for chunk in wanted if chunk in lacking]

    def _relies_on(self, chunk: ChunkId) -> bool:
        return not self._unreliable([chunk])

    def _counts(self, pack: int) -> bool:
        return self.bucket.is_safe(pack) or self._writer.wrote(pack)

    def _verify(self, table: str, document: dict[str, Any]) -> None:
        """Before a name is set after a time in which collections did not wait for this host. StoreError."""
        self.bucket.sync.packs.catch_up(full=True)
        record = ChunkId.parse(document["record"])
        walk = reachable if table == "refs" else reachable_snapshot
        try:
            lacking = self.missing(walk(self, record))
        except (ChunkMissingError, ChunkCorruptError) as error:
            lacking = [error.chunk]
        if lacking:
            raise StoreError(
                f"chunks of {record}, such as {lacking[0]}, were collected while the bucket was out of reach",
                hint="do it again: what is missing is then stored anew",
            )

    # Writing

    def flush(self) -> None:
        """Return when everything put before is in the bucket. BucketUnavailableError; it may be tried again."""
        if not self.readonly:
            self._writer.seal()
            self.bucket.upload()

    def _before_change(self) -> None:
        self.require_writable()
        self.flush()

    def evict_copies(self, byte_count: int) -> int | None:
        return self.bucket.evict_copies(byte_count)

    def probe(self) -> None:
        self.bucket.probe()
