"""Opening a snapshot, on the daemon's side: its files ready, and the memory that is touched first on its way."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from fuse.errors import NodeError
from fuse.files import BlockFile, BlockFiles
from fuse.keeping import Keeping
from fuse.node import OpenImage, OpenSnapshot
from fuse.opener import Opener
from fuse.readiness import Readiness
from fuse.workingset import Range, WorkingSet
from imaged import snapshots
from imaged.blockimage import BlockImage, open_blob, read_blob
from imaged.changes import changes
from imaged.config import Config
from imaged.errors import ChunkError, FormatError, StoreError, UpstreamError
from imaged.fetching.fetch import Fetcher
from imaged.fetching.workers import Workers
from imaged.ids import ChunkId
from imaged.snapshot import STATE_LIMIT_BYTES, SnapshotRecord
from imaged.snapshots import Snapshot

log = logging.getLogger(__name__)
_KEPT = 256
_LOOKS = 16
"""Memories that are verified at the same time, of those that are all on this host."""
_SOON_S = 2.0


class SnapshotOpener:
    """Threads may share it.

    The first machine that goes on from a snapshot which has no profile is recorded. A snapshot of a machine that was
    itself restored has one from the beginning: what its parent touched, and what it changed since.
    """

    def __init__(
        self,
        config: Config,
        fetcher: Fetcher,
        files: BlockFiles,
        opener: Opener,
        keeping: Keeping | None = None,
    ) -> None:
        self._config, self._fetcher, self._files, self._opener = config, fetcher, files, opener
        self._keeping = keeping or Keeping(fetcher, files)
        self._lock = threading.Lock()
        self._sets: OrderedDict[ChunkId, WorkingSet] = OrderedDict()
        self._looks: OrderedDict[ChunkId, Readiness] = OrderedDict()
        self._whole: set[ChunkId] = set()
        self._workers = Workers(_LOOKS, "readiness")

    def close(self) -> None:
        self._workers.close()

    def open(self, name: str, *, server: str | None) -> OpenSnapshot:
        """By name, id, or the start of an id; a snapshot must be in the local store, its chunks need not.

        NotFoundError, NodeError.
        """
        found = self._find(name)
        with _named(found):
            return self._open(found, self._opener.open_resting(str(found.record.image), server=server))

    def open_here(self, name: str) -> OpenSnapshot | None:
        """As `open` when that needs no server, else None."""
        found = self._find(name)
        with _named(found):
            if not self._is_here(found.record):
                return None
            image = self._opener.open_resting_here(str(found.record.image))
            return None if image is None else self._open(found, image)

    def check(self, name: str) -> None:
        """Return when the memory that a machine touches first was had and verified. NodeError names the chunk."""
        found = self._find(name)
        with _named(found):
            if not self._look(found).wait():
                raise NodeError(
                    f"snapshot {found.label}: its memory did not come", hint="try again, or look at its server"
                )

    def check_here(self, name: str) -> bool:
        """As `check`; False when it takes so long that a server must be slow."""
        found = self._find(name)
        with _named(found):
            return self._look(found).wait(_SOON_S)

    def _find(self, name: str) -> Snapshot:
        return snapshots.find(self._fetcher.store, name)

    def _is_here(self, record: SnapshotRecord) -> bool:
        """Whether what is read in `_open` is on this host."""
        store = self._fetcher.store
        if store.missing(record.block_images):
            return False
        try:
            state = open_blob(store, record.state, limit_bytes=STATE_LIMIT_BYTES)
            needed = [*state.leaf_ids(), *state.chunk_ids()]
            if self._fetcher.origin(record.memory) is not None:
                needed += BlockImage.open(store, record.memory).leaf_ids()
            return not store.missing(needed)
        except (ChunkError, FormatError):
            return False

    def _open(self, found: Snapshot, image: OpenImage) -> OpenSnapshot:
        record, blocks = found.record, self._config.blocks
        files = [record.memory, *((record.disk,) if record.disk is not None else ())]
        # One without a name is kept by who made it, until a machine stands on it.
        self._keeping.open(found.id, files, name=found.label, lazy=found.name is None)
        use = self._files.use(found.id, found.label, snapshot=True)
        memory = self._files.assign(record.memory, use.tally)
        disk = self._files.assign(record.disk, use.tally) if record.disk is not None else None
        record.require_sizes(memory_bytes=memory.size_bytes, disk_bytes=disk.size_bytes if disk is not None else 0)
        self._files.assign(record.state, use.tally)
        # QEMU would say of a damaged state only that it can not load it.
        read_blob(self._fetcher.reader(record.state, use.tally), record.state, limit_bytes=STATE_LIMIT_BYTES)
        self._files.map_as_memory(record.memory)
        working_set = self._working_set(found, memory)
        self._look(found)
        return OpenSnapshot(
            id=str(found.id),
            name=found.name or "",
            record=record,
            image=image,
            memory_path=blocks / str(record.memory),
            disk_path=blocks / str(record.disk) if record.disk is not None else None,
            state_path=blocks / str(record.state),
            working_set=working_set.ranges,
            pulled=self._fetcher.store.origins.get(record.memory) is not None,
        )

    # What comes first

    def _working_set(self, found: Snapshot, memory: BlockFile) -> WorkingSet:
        """Empty when it is not known yet; then the next machine is recorded."""
        with self._lock:
            held = self._sets.get(found.record.memory)
            if held is not None:
                self._sets.move_to_end(found.record.memory)
                return held
        made = self._from_profile(memory.image) or self._from_parent(found, memory.image)
        if made is None:
            self._opener.recorder.watch_memory(found.id, memory)
            return WorkingSet()
        with self._lock:
            self._sets[found.record.memory] = made
            while len(self._sets) > _KEPT:
                self._sets.popitem(last=False)
        return made

    def _from_profile(self, memory: BlockImage) -> WorkingSet | None:
        profile = self._fetcher.store.profiles.get(memory.id)
        return WorkingSet.of_profile(memory, profile.chunks) if profile is not None else None

    def _from_parent(self, found: Snapshot, memory: BlockImage) -> WorkingSet | None:
        """What the machine had touched first the last time, and what it changed since. Kept as a profile."""
        if found.record.parent is None:
            return None
        try:
            parent = SnapshotRecord.parse(self._fetcher.store.get(found.record.parent))
            before = BlockImage.open(self._fetcher.store, parent.memory)
            ranges = self._touched(before)
            if not ranges:
                return None
            new = ((place.offset, place.length) for place in changes(memory, before))
            made = WorkingSet.of_ranges(memory, [*ranges, *new])
        except (ChunkError, FormatError) as error:  # the parent may be gone
            log.info("snapshot %s: nothing is known of its parent: %s", found.label, error.message)
            return None
        self._workers.run(lambda: self._keep(found, made))
        return made

    def _touched(self, memory: BlockImage) -> tuple[Range, ...]:
        """The ranges that the machines on this memory image touched first, as far as that is known by now."""
        with self._lock:
            held = self._sets.get(memory.id)
        if held is not None:
            return held.ranges
        file = self._files.held(memory.id)
        recording = file.recording if file is not None else None
        if recording is not None and recording.reads:
            return tuple(recording.reads)
        profile = self._fetcher.store.profiles.get(memory.id)
        return WorkingSet.of_profile(memory, profile.chunks).ranges if profile is not None else ()

    def _keep(self, found: Snapshot, made: WorkingSet) -> None:
        try:
            self._fetcher.store.profiles.merge(found.record.memory, made.chunks)
        except StoreError as error:
            log.warning("profile of snapshot %s: %s", found.label, error.message)

    # Whether it is there

    def _look(self, found: Snapshot) -> Readiness:
        """The look that goes on, or was just made; else a new one, as after a read that failed."""
        memory = found.record.memory
        file = self._files.held(memory)
        with self._lock:
            if file is not None and file.failed:
                file.failed = False
                self._looks.pop(memory, None)
                self._whole.discard(memory)
            held = self._looks.get(memory)
            if held is not None and not held.is_over(time.monotonic()):
                return held
            working_set = self._sets.get(memory)
            if held is not None and held.was_whole:
                self._whole.add(memory)
        tally = self._files.use(found.id, found.label, snapshot=True).tally
        image = self._files.assign(memory, tally).image
        chunks = working_set.chunks if working_set is not None else ()
        fresh = Readiness(self._fetcher, image, chunks, tally, whole=memory not in self._whole)
        with self._lock:
            held = self._looks.get(memory)
            if held is not None and not held.is_over(time.monotonic()):
                return held
            self._looks[memory] = fresh
            self._looks.move_to_end(memory)
            while len(self._looks) > _KEPT:
                self._looks.popitem(last=False)
        start = self._workers.run if fresh.is_local else self._fetcher.behind
        start(fresh.run)
        return fresh


@contextmanager
def _named(found: Snapshot) -> Iterator[None]:
    """Errors say which snapshot it is of which a chunk is missing or damaged."""
    try:
        yield
    except (ChunkError, FormatError, UpstreamError) as error:
        hint = error.hint or "`pvisor snapshot verify` tells more"
        raise NodeError(f"snapshot {found.label}: {error.message}", hint=hint) from error
