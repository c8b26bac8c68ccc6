"""What a ChunkStore asks of the bucket that its directory is a mirror of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, Self

from imaged.chunkstore.index import Index
from imaged.chunkstore.lease import Leases
from imaged.chunkstore.rows import Location
from imaged.errors import BucketUnavailableError, ChunkUnreadableError, StoreError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.s3.address import BucketAddress, Patience, endpoint
from imaged.s3.cache import evict_copies
from imaged.s3.client import S3Objects
from imaged.s3.keeper import Keeper
from imaged.s3.mirror import Mirror
from imaged.s3.objects import Objects
from imaged.s3.packtable import PackTable
from imaged.s3.reading import Reading, Wanted
from imaged.s3.serverlease import ServerLease
from imaged.s3.sync import Sync
from imaged.s3.tables import SharedTables
from imaged.s3.uploads import Uploads

log = logging.getLogger(__name__)


_SILENT_S = 15.0


class Connection(Objects, Protocol):
    """Objects, until it is closed; after `hurry` nothing is tried again."""

    def hurry(self) -> None: ...

    def close(self) -> None: ...


connect: Callable[[BucketAddress, Patience], Connection] = S3Objects
"""Makes what a bucket is reached by; tests put another server here."""


class Bucket:
    """Of one open store. Threads share it."""

    def __init__(
        self, root: Path, index: Index, mirror: Mirror, objects: Connection, patience: Patience, leases: Leases
    ) -> None:
        self.address, self.objects, self.patience = mirror.address, objects, patience
        index.is_mirror = True
        self._root, self._index = root, index
        self.packs = PackTable(root, index)
        self.tables = SharedTables(root, index, objects, self._guard, patience.settle_s)
        self.sync = Sync(root, index, objects, self.packs, self.tables)
        self.lease = ServerLease(root, index, objects, mirror.server, patience.lease_s)
        self.uploads = Uploads(root, index, objects, self.packs)
        self._reading = Reading(root, objects, self.packs, self._fetched)
        self._keeper: Keeper | None = None
        self._leases = leases
        self._lapses = 0
        self.on_fetched: Callable[[list[ChunkId]], None] | None = None
        """Told which chunks have come into the local packs."""
        self.verify: Callable[[str, dict[str, Any]], None] | None = None
        """Raises when something below the row of a name is not in the bucket."""

    @classmethod
    def attach(cls, root: Path, index: Index, leases: Leases, *, readonly: bool) -> Self:
        """To the bucket of this mirror, up to date. BucketUnavailableError, BucketError, StoreError."""
        mirror, patience = Mirror.read(root), Patience.resolve()
        objects = connect(mirror.address, patience)
        bucket = cls(root, index, mirror, objects, patience, leases)
        try:
            bucket.start(readonly=readonly)
        except BaseException:
            bucket.close()
            raise
        return bucket

    def start(self, *, readonly: bool) -> None:
        if readonly:
            if not self.lease.left_s() or self.sync.age_s() > self.patience.lease_s:
                self.sync.everything()
            return
        self._keeper = Keeper(self._root, self.sync, self.uploads, self.lease, self._leases, self.patience)
        self._keeper.start()
        self._lapses = self.lease.lapses

    def close(self) -> None:
        """Nothing is uploaded here: what was not flushed is when the store is opened again."""
        self.objects.hurry()
        if self._keeper is not None:
            self._keeper.close()
        self._reading.close()
        self.objects.close()

    # Writing

    def is_safe(self, pack: int) -> bool:
        """Whether the bucket has this pack: others, too, may rely on what is in it."""
        return self.packs.is_safe(pack)

    def upload(self) -> None:
        """Return when all sealed packs are in the bucket. BucketUnavailableError, StoreError."""
        self.uploads.run()

    def renew(self) -> None:
        """Make the lease last from now, saying what is true now."""
        if self._keeper is not None:
            self._keeper.renew()

    def renew_if_changed(self) -> None:
        if self._keeper is not None:
            self._keeper.renew_if_changed()

    def _guard(self, table: str, document: dict[str, Any] | None) -> None:
        """Before a name changes, and after: the collections of others must have waited for what it relies on."""
        if self._keeper is None:
            raise StoreError(f"{self.address} is open for reading only")
        self._keeper.require()
        if self.lapsed and document is not None and self.verify is not None:
            self.verify(table, document)

    @property
    def lapsed(self) -> bool:
        """Whether collections may have gone on without us since this store was opened."""
        return self.lease.lapses != self._lapses

    # Reading

    def bring(self, wanted: Iterable[Wanted]) -> None:
        """As `Reading.bring`."""
        self._reading.bring(wanted)

    def frame(self, chunk: ChunkId, location: Location) -> Frame:
        """As `Reading.frame`; a pack that is gone is looked for before that is said."""
        try:
            return self._reading.frame(chunk, location)
        except ChunkUnreadableError:
            self.sync.packs.catch_up(full=True)
            raise

    def prefetch(self, wanted: Iterable[Wanted]) -> None:
        """As `bring`, without waiting, and without saying what went wrong."""
        self._reading.prefetch(wanted)

    def catch_up(self) -> None:
        """Know what other servers have uploaded until now. BucketUnavailableError, StoreError: what could not be asked
        for is not missing."""
        self.sync.packs.catch_up()

    def evict_copies(self, byte_count: int) -> int:
        """Free so many bytes of the local packs, as far as the bucket has what goes; how many."""
        return evict_copies(self._root, self._index, self.packs, self._reading, byte_count)

    def _fetched(self, chunks: list[ChunkId]) -> None:
        if self.on_fetched is not None:
            self.on_fetched(chunks)

    def probe(self) -> None:
        """BucketUnavailableError when the S3 server has not answered for a while. Waits for nothing."""
        silence_s = self.sync.silence_s()
        if silence_s > max(_SILENT_S, 4 * self.patience.poll_s):
            raise BucketUnavailableError(
                f"{self.address}: the S3 server has not answered for {silence_s:.0f} s",
                hint=f"see whether {endpoint() or 'AWS'} answers",
            )
