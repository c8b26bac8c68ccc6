"""Appends frames to this process's active pack and commits them: pack first, index second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path

from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PACK_HEADER_BYTES, PACK_LIMIT_BYTES, PackWriter, pack_numbers, pack_path
from imaged.chunkstore.rows import FOREIGN_PACKS, Location, PackRow
from imaged.errors import StoreError
from imaged.faults import store_faults
from imaged.frame import Frame
from imaged.ids import ChunkId

Entry = tuple[ChunkId, Location]
MIRROR_PACK_BYTES = 64 << 20
"""A pack this long is sealed in the mirror of a bucket: it is uploaded while the next one fills."""
log = logging.getLogger(__name__)


class Appender:
    """Threads may share it. Frames are readable at their location at once, and count only after `commit`.

    `pending` says where appended chunks are; they leave it after they are in the index, never before.
    """

    def __init__(self, root: Path, index: Index, *, exclude: Collection[int] = ()) -> None:
        """`exclude` are packs that must not be appended to."""
        self.pending: dict[ChunkId, Location] = {}
        self.numbers: set[int] = set()
        """The packs that were appended to."""
        self._limit_bytes = MIRROR_PACK_BYTES if index.is_mirror else PACK_LIMIT_BYTES
        self._root, self._index, self._exclude = root, index, frozenset(exclude)
        self._append_lock, self._commit_lock = threading.Lock(), threading.Lock()
        self._active: PackWriter | None = None
        self._full: list[PackWriter] = []
        self._entries: list[Entry] = []
        self._anew: set[Location] = set()
        self._uncommitted_bytes = 0
        self._broken: StoreError | None = None

    @property
    def uncommitted_bytes(self) -> int:
        return self._uncommitted_bytes

    def append(self, frames: Sequence[Frame], *, anew: Collection[ChunkId] = ()) -> list[Location]:
        """StoreFullError and others; then the pack is as it was before. Chunks in `anew` get this place even if they
        have one."""
        with self._append_lock, store_faults("append to a pack", self._root):
            if self._broken is not None:
                raise StoreError(self._broken.message, hint=self._broken.hint)
            if self._active is not None and self._active.length >= self._limit_bytes:
                self._full.append(self._active)
                self._active = None
            if self._active is None:
                self._active = acquire(self._root, self._index, exclude=self._exclude)
                self.numbers.add(self._active.number)
            locations = []
            for offset, header in zip(self._active.append(frames), [frame.header for frame in frames], strict=True):
                location = Location(self._active.number, offset, header.size_bytes, header.payload_bytes, header.codec)
                self.pending[header.id] = location
                self._entries.append((header.id, location))
                if header.id in anew:
                    self._anew.add(location)
                self._uncommitted_bytes += location.stored_bytes
                locations.append(location)
        return locations

    def begin_sync(self) -> None:
        """As `PackWriter.begin_sync`, of the pack at work."""
        with self._append_lock:
            if self._active is not None:
                self._active.begin_sync()

    def commit(self, *, move: bool = False) -> None:
        """Everything appended before is durable and in the index. When it fails it may be tried again."""
        with self._commit_lock:
            with self._append_lock:
                if self._broken is not None:
                    raise StoreError(self._broken.message, hint=self._broken.hint)
                entries, full, active = list(self._entries), list(self._full), self._active
                lengths = {pack.number: (pack.length, True) for pack in full}
                if active is not None:
                    lengths[active.number] = (active.length, active.length >= self._limit_bytes)
            if not entries and not full:
                return
            self._sync([*full, active] if active is not None else full)
            anew = self._anew.intersection(location for _, location in entries) if self._anew else set()
            self._index.commit(entries, lengths, move=move, anew=anew)
            with self._append_lock:
                del self._entries[: len(entries)]
                self._anew.difference_update(anew)
                del self._full[: len(full)]
                for chunk, location in entries:
                    self._uncommitted_bytes -= location.stored_bytes
                    if self.pending.get(chunk) is location:
                        del self.pending[chunk]
            for pack in full:
                pack.close()

    def seal(self) -> None:
        """The next `commit` ends the pack at work: what is appended after this goes into another."""
        with self._append_lock:
            if self._active is not None and self._active.length > PACK_HEADER_BYTES:
                self._full.append(self._active)
                self._active = None

    def _sync(self, packs: list[PackWriter]) -> None:
        try:
            with store_faults("make packs durable", self._root):
                for pack in packs:
                    pack.sync()
        except StoreError as error:
            # The kernel reports a lost write once and then forgets it: a second sync would lie.
            self._broken = error
            raise

    def close(self) -> None:
        """Let go of the packs without committing; what is not committed gives its space back."""
        with self._commit_lock, self._append_lock:
            for pack in [*self._full, *([self._active] if self._active is not None else [])]:
                with closing(pack):
                    self._cut(pack)
            self._full.clear()
            self._active = None

    def _cut(self, pack: PackWriter) -> None:
        """Drop a tail that nobody will commit: on a full disk it would keep everybody else from working."""
        try:
            with store_faults("cut a pack", self._root):
                row = self._index.pack(pack.number)
                if row is not None:
                    pack.cut(row.committed_bytes)
        except StoreError as error:
            # The next writer of this pack, or gc, cuts it.
            log.warning("pack %d keeps its uncommitted tail: %s", pack.number, error.message)


def acquire(root: Path, index: Index, *, exclude: Collection[int] = ()) -> PackWriter:
    """A pack to append to: one that no living writer holds, cut to its committed length, else a new one."""
    rows = index.packs()
    for number, row in rows.items():
        if row.sealed or number in exclude:
            continue
        pack = PackWriter.lock(root, number)
        if pack is None:
            continue
        # Its last writer may have gone on between our look at the index and the lock.
        now = index.pack(number)
        if now is None or now.sealed or now.committed_bytes >= PACK_LIMIT_BYTES or pack.length < now.committed_bytes:
            pack.close()
            continue
        pack.cut(now.committed_bytes)
        return pack
    while True:
        used = (number for number in [*index.packs(), *pack_numbers(root)] if number < FOREIGN_PACKS)
        number = max([*used, index.last_pack()]) + 1
        while (created := PackWriter.create(root, number)) is None:
            number += 1
        try:
            noted = index.put_pack(number, PackRow())
        except BaseException:
            pack_path(root, number).unlink(missing_ok=True)
            created.close()
            raise
        if noted:
            return created
        # A collection removed a pack of this number just now, and readers may have that one open.
        pack_path(root, number).unlink(missing_ok=True)
        created.close()
