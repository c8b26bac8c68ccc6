"""The chunk store: verified chunks in pack files, found through an LMDB index, shared by several processes."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from imaged.chunkstore.condemned import is_reliable, unreliable
from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.index import Index
from imaged.chunkstore.indexfile import refuse_lost_index
from imaged.chunkstore.lease import Lease, Leases, LeaseState
from imaged.chunkstore.offers import OfferTable
from imaged.chunkstore.pack import PACKS_DIRECTORY, PackReader
from imaged.chunkstore.packranges import PackPlanner
from imaged.chunkstore.refs import FillTable, MemoTable, OriginTable, ProfileTable, Ref, RefTable
from imaged.chunkstore.rows import LOCATION, Location, StoreUsage
from imaged.chunkstore.snapshotrefs import SnapshotTable
from imaged.chunkstore.storelock import StoreLock
from imaged.chunkstore.uses import Uses
from imaged.chunkstore.writer import COMMIT_S, Writer
from imaged.collection.owned import OwnedTable
from imaged.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    ChunkUnreadableError,
    FormatError,
    NotFoundError,
    StoreBusyError,
    StoreError,
    StoreReadOnlyError,
)
from imaged.faults import store_faults
from imaged.frame import CHUNK_LIMIT_BYTES, HEADER_BYTES, ZSTD_LEVEL, Frame, FrameHeader
from imaged.ids import ChunkId

__all__ = ["ChunkStore", "Ref", "StoreUsage"]
_LOOKUP_COUNT = 256
MIRROR_NAME = "bucket.json"
"""In a directory that mirrors a bucket (imaged/s3/mirror.py)."""
log = logging.getLogger(__name__)
_UNREADABLE_HINT = "`pvisor store fsck` says what is lost"
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Says nothing about the pack."""
_PAYLOAD_BYTES = Location._fields.index("payload_bytes")


class ChunkStore:
    """A ChunkReadWriter on a directory. A context manager; threads may share it, a forked child may not use it.

    What was put is readable at once in this process; after `flush` (or about a second) it is durable and other
    processes see it. A killed process loses at most what it had not flushed. A chunk whose bytes turn out wrong is
    dropped from the index, so that the same chunk can be put again.

    Collections go on meanwhile. Who names what he did not put himself, or has put and not yet named, holds a `lease`
    from before until after; `put` and `missing` then count as here what stays as long as the newest lease of this
    process. `get`, `frames`, `has` and `absent` are of what can be read now.
    """

    namespace: str | None = None
    """Whose view of a store this is (imaged/chunkstore/tenant.py); None sees everything."""

    def __init__(self, root: Path, lock: StoreLock, index: Index, *, readonly: bool, commit_s: float | None) -> None:
        """Use `open`."""
        self.root, self.index, self.readonly = root, index, readonly
        self._lock, self._reader, self._writer = lock, PackReader(root), Writer(root, index, commit_s=commit_s)
        self._closed = False
        self.leases = Leases(root, index)
        self.refs = RefTable(root, index, self._before_change)
        self.snapshots = SnapshotTable(root, index, self._before_change)
        self.memos = MemoTable(index, self._before_change)
        self.origins = OriginTable(index, self._before_change)
        self.profiles = ProfileTable(index, self.require_writable)
        self.owned = OwnedTable(index, self.require_writable)
        self.fills = FillTable(index, self.require_writable)
        self.offers = OfferTable(index, self.require_writable)
        self.uses = Uses(index, self.require_writable)

    @classmethod
    def open(cls, root: Path, *, readonly: bool = False, commit_s: float | None = COMMIT_S) -> Self:
        """The store at `root`, made when there is none.

        StoreReadOnlyError and StoreFullError as the directory is, StoreBusyError when it is being rebuilt for long.
        With `readonly` nothing is written; NotFoundError when there is no store. With `commit_s` None only `flush`
        makes durable what was put, and what was put after it is dropped: nothing is left of who gives up half-way.
        """
        root = root.absolute()
        with store_faults("read its directory", root):
            mirrored = (root / MIRROR_NAME).exists()
        if mirrored:
            from imaged.s3.store import MirrorStore

            opened = MirrorStore.open_locked(root, StoreLock.shared(root), readonly=readonly, commit_s=commit_s)
            return cast(Self, opened)
        if readonly:
            with store_faults("read its directory", root):
                found = (root / INDEX_NAME).exists()
                if not found:
                    refuse_lost_index(root)
            if not found:
                raise NotFoundError(f"no chunk store at {root}", hint="convert or pull an image first")
        else:
            with store_faults("make its directory", root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)  # images may be private
                (root / PACKS_DIRECTORY).mkdir(exist_ok=True)
        return cls.open_locked(root, StoreLock.shared(root, readonly=readonly), readonly=readonly, commit_s=commit_s)

    @classmethod
    def open_locked(
        cls, root: Path, lock: StoreLock, *, readonly: bool = False, commit_s: float | None = COMMIT_S
    ) -> Self:
        """For one who holds the directory's lock already; the store releases it when it closes."""
        try:
            index = Index.open(root / INDEX_NAME, readonly=readonly and not (root / MIRROR_NAME).exists())
            return cls(root, lock, index, readonly=readonly, commit_s=commit_s)
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        """Flush and let go. Raises what the flush raises, after everything is let go."""
        if self._closed:
            return
        self._closed = True
        try:
            self._writer.close()
        finally:
            self._reader.close()
            self.index.close()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except StoreError as error:
            if value is None:
                raise
            log.warning("closing the store after another error: %s", error.message)

    def get(self, chunk: ChunkId) -> bytes:
        """The verified bytes. ChunkMissingError; ChunkCorruptError after dropping the chunk; ChunkUnreadableError."""
        pending = self._writer.find(chunk)
        if isinstance(pending, bytes):
            return pending
        location = pending or self.index.find(chunk)
        tried: list[Location] = []
        while location is not None:
            try:
                return self._read(chunk, location).open()
            except ChunkCorruptError as error:
                tried.append(location)
                place = self._place_instead(chunk, tried)
                if place not in tried:
                    location = place
                    continue
                if isinstance(error, ChunkUnreadableError):
                    raise
                self._drop(chunk, place)
                raise ChunkCorruptError(
                    chunk, f"damaged in pack {place.pack} at {place.offset} and dropped ({error.message})"
                ) from error
        raise ChunkMissingError(chunk)

    def _place_instead(self, chunk: ChunkId, tried: Sequence[Location]) -> Location | None:
        """Where a chunk lies whose frame was not where it was looked for: a collection may have moved it meanwhile, or
        taken it away (None). One of those that were tried: then it is damaged."""
        # Pending first: a chunk leaves it only after it is in the index.
        pending = self._writer.find(chunk)
        place = self.index.find(chunk)
        if isinstance(pending, Location) and (place is None or pending not in tried):
            return pending
        return place

    def frame(self, chunk: ChunkId) -> Frame | None:
        """The chunk as it is stored, its payload not verified; None when it is not here."""
        found = next(self.frames([chunk]))
        return found if found.header.size_bytes else None

    def packed_cached(self, chunk: ChunkId) -> bytes | None:
        """The bytes of the chunk's frame when the page cache has them all, for one who must not wait for a disk.

        None says nothing about whether the chunk is here. The header is as the index says, the payload not verified.
        """
        location = self.index.find(chunk)
        if location is None:
            return None
        packed = self._reader.read_cached(location.pack, location.offset, location.stored_bytes)
        header = FrameHeader(chunk, location.codec, location.size_bytes, location.payload_bytes)
        return packed if packed is not None and packed.startswith(header.pack()) else None

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        """As ChunkReader says; an id whose stored header is damaged is dropped and comes as missing."""
        for start in range(0, len(chunks), _LOOKUP_COUNT):
            wanted = chunks[start : start + _LOOKUP_COUNT]
            # Pending first: a chunk leaves it only after it is in the index.
            pending = [self._writer.find(chunk) for chunk in wanted]
            locations = self.index.find_many(wanted)
            for chunk, waiting, committed in zip(wanted, pending, locations, strict=True):
                if isinstance(waiting, bytes):
                    yield Frame.of(waiting, chunk=chunk)
                    continue
                location = waiting or committed
                yield Frame.missing(chunk) if location is None else self._frame(chunk, location)

    def planner(self) -> PackPlanner:
        """For one who sends frames from the pack files as they lie there."""
        return PackPlanner(self.index, self._reader)

    def has(self, chunk: ChunkId) -> bool:
        """Whether it can be read."""
        return self._writer.find(chunk) is not None or self.index.find(chunk) is not None

    def absent(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that can not be read, each once, in the order given."""
        wanted = [chunk for chunk in dict.fromkeys(chunks) if self._writer.find(chunk) is None]
        absent = []
        for start in range(0, len(wanted), _LOOKUP_COUNT):
            part = wanted[start : start + _LOOKUP_COUNT]
            absent += [
                chunk for chunk, found in zip(part, self.index.raw_locations(part), strict=True) if found is None
            ]
        return absent

    def missing(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that nobody may rely on, each once, in the order given: `absent` ones, and those that a collection may
        take away while the newest lease of this process lasts."""
        return self._unreliable(chunks)

    def _unreliable(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        epoch = self.leases.newest_epoch
        wanted = [chunk for chunk in dict.fromkeys(chunks) if self._writer.find(chunk) is None]
        missing = []
        for start in range(0, len(wanted), _LOOKUP_COUNT):
            missing += unreliable(self.index, wanted[start : start + _LOOKUP_COUNT], epoch)
        return missing

    def lease(self, holder: str, keeps: Sequence[ChunkId] = ()) -> Lease:
        """A lease to put, rely and name under, until it is released: a context manager. `keeps` are ids of images and
        snapshots. StoreError."""
        self.require_writable()
        return self.leases.begin(holder, keeps)

    def keeping(self, holder: str, keeps: Sequence[ChunkId] = ()) -> Lease:
        """A lease that keeps images and snapshots, for as long as they are used. StoreError."""
        self.require_writable()
        return self.leases.keeping(holder, keeps)

    def relying(self, lease: str | None, *, namespace: str | None = None) -> AbstractContextManager[LeaseState | None]:
        """Work under a client's lease, as `Leases.relying` says."""
        return self.leases.relying(lease, namespace=namespace)

    def sizes(self, chunk: ChunkId) -> tuple[int, int] | None:
        """(uncompressed bytes, bytes of its frame) or None; waits for a chunk that is just being compressed."""
        pending = self._writer.find(chunk)
        if isinstance(pending, bytes):
            self._writer.drain()
            pending = self._writer.find(chunk)
        location = pending if isinstance(pending, Location) else self.index.find(chunk)
        return None if location is None else (location.size_bytes, location.stored_bytes)

    def frames_bytes(self, chunks: Sequence[ChunkId]) -> int:
        """The length of all that `frames` gives."""
        total = 0
        for start in range(0, len(chunks), _LOOKUP_COUNT):
            part = chunks[start : start + _LOOKUP_COUNT]
            total += HEADER_BYTES * len(part)
            for chunk, raw in zip(part, self.index.raw_locations(part), strict=True):
                if raw is not None:
                    total += LOCATION.unpack(raw)[_PAYLOAD_BYTES]
                elif (size := self.sizes(chunk)) is not None:
                    total += size[1] - HEADER_BYTES
        return total

    def prepare(self, chunks: Sequence[ChunkId]) -> int | None:
        """For who will send `frames` of these: the length of all; None when only sending them will tell."""
        return self.frames_bytes(chunks)

    def put(self, data: bytes, *, level: int = ZSTD_LEVEL, anew: bool = False) -> ChunkId:
        """Store 1 to CHUNK_LIMIT_BYTES bytes; with `anew` also what is here already, and this frame then counts. An
        error of an earlier put may come from this one."""
        if not 0 < len(data) <= CHUNK_LIMIT_BYTES:
            raise FormatError("chunk", expected=f"1 to {CHUNK_LIMIT_BYTES} bytes", found=f"{len(data)}")
        self.require_writable()
        chunk = ChunkId.of(data)
        if anew or not self._relies_on(chunk):
            self._writer.add(chunk, bytes(data), level, anew=anew)
        return chunk

    def put_all(self, pieces: Sequence[bytes], *, level: int = ZSTD_LEVEL) -> list[ChunkId]:
        """As `put` of each, with one look at the index for all: a third of the time for chunks of some KiB."""
        for data in pieces:
            if not 0 < len(data) <= CHUNK_LIMIT_BYTES:
                raise FormatError("chunk", expected=f"1 to {CHUNK_LIMIT_BYTES} bytes", found=f"{len(data)}")
        self.require_writable()
        chunks = [ChunkId.of(data) for data in pieces]
        lacking = dict.fromkeys(self._unreliable(chunks))
        for chunk, data in zip(chunks, pieces, strict=True):
            if chunk in lacking:
                self._writer.add(chunk, data, level)
        return chunks

    def put_frame(self, frame: Frame, *, anew: bool = False) -> None:
        """Store a chunk that came compressed, as it is, once its bytes match its id; `anew` as in `put`.
        ChunkCorruptError, FormatError."""
        self.require_writable()
        if not frame.open():
            raise FormatError("chunk", expected=f"1 to {CHUNK_LIMIT_BYTES} bytes", found="0")
        if anew or not self._relies_on(frame.id):
            self._writer.add_frame(frame, anew=anew)

    def flush(self) -> None:
        """Return when everything put before is durable and other processes see it."""
        if not self.readonly:
            self._writer.flush()

    def evict_copies(self, byte_count: int) -> int | None:
        """Free so many bytes of copies of what a bucket has, those used longest ago; how many. None: there are none."""
        del byte_count
        return None

    def probe(self) -> None:
        """Whether what the store stands on answers. StoreError."""
        self.df()

    def df(self) -> StoreUsage:
        """What is committed; tails of packs that are not count as dead, unless a writer holds the pack."""
        return self.index.usage()

    def _before_change(self) -> None:
        self.require_writable()
        self._writer.flush()

    def _relies_on(self, chunk: ChunkId) -> bool:
        """Whether `missing` does not name it."""
        if self._writer.find(chunk) is not None:
            return True
        return is_reliable(self.index, chunk, self.leases.newest_epoch)

    def require_writable(self) -> None:
        """StoreReadOnlyError for a store that was opened for reading only."""
        if self.readonly:
            raise StoreReadOnlyError(f"store {self.root} is open for reading only")

    def _read(self, chunk: ChunkId, location: Location) -> Frame:
        """The frame at `location`, its header checked against the index. ChunkCorruptError, ChunkUnreadableError;
        StoreBusyError when this process has no room to read it."""
        length = HEADER_BYTES + location.payload_bytes
        try:
            raw = self._reader.read(location.pack, location.offset, length)
        except FileNotFoundError:
            raise ChunkUnreadableError(chunk, f"pack {location.pack} is gone", hint=_UNREADABLE_HINT) from None
        except OSError as error:
            message = f"pack {location.pack} can not be read: {error.strerror}"
            if error.errno in _NO_ROOM:
                raise StoreBusyError(message, hint="later, or with less at once") from error
            raise ChunkUnreadableError(chunk, message, hint=_UNREADABLE_HINT) from error
        try:
            header = FrameHeader.parse(raw[:HEADER_BYTES])
        except FormatError as error:
            raise ChunkCorruptError(chunk, error.message) from error
        expected = (chunk, location.size_bytes, location.payload_bytes, location.codec)
        if (header.id, header.size_bytes, header.payload_bytes, header.codec) != expected or len(raw) != length:
            raise ChunkCorruptError(chunk, "the frame differs from what the index says")
        return Frame(header, raw[HEADER_BYTES:])

    def _frame(self, chunk: ChunkId, location: Location) -> Frame:
        tried: list[Location] = []
        while True:
            try:
                return self._read(chunk, location)
            except ChunkCorruptError as error:
                tried.append(location)
                place = self._place_instead(chunk, tried)
                if place is None:
                    return Frame.missing(chunk)
                if place not in tried:
                    location = place
                    continue
                log.warning("%s", error.message)
                if not isinstance(error, ChunkUnreadableError):
                    self._drop(chunk, place)
                return Frame.missing(chunk)

    def _drop(self, chunk: ChunkId, location: Location) -> None:
        if self.readonly or self.index.readonly:
            return
        if self._writer.find(chunk) is location:
            self._writer.flush()
        self.index.drop([(chunk, location)], forget_memos=True)
