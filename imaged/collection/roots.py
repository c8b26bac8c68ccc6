"""What a collection starts from: names of images and snapshots, layer memos, leases, and what its caller keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from imaged.chunkstore.environment import NAMES
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.collection.marks import Marks
from imaged.errors import FormatError, StoreError
from imaged.ids import ChunkId
from imaged.reach import Marker
from imaged.snapshots import Snapshot, snapshot_origin

Keep = Callable[[], Iterable[ChunkId]]
R = TypeVar("R")
log = logging.getLogger(__name__)


class Roots:
    """Marks all that is kept, and later what is kept since. For one thread.

    `names` is the counter of changes to names of which everything has been marked: names that are set after it was
    read move it, and what keeps without a name was read after it was.
    """

    def __init__(self, store: ChunkStore, marks: Marks, keep: Keep, keep_snapshots: Keep) -> None:
        self.names = 0
        self.rooted: set[ChunkId] = set()
        """Records and block images that are kept, present or not."""
        self._store, self._marks = store, marks
        self._keep, self._keep_snapshots = keep, keep_snapshots
        self._refs: dict[str, Ref] = {}
        self._snapshots: dict[str, SnapshotRef] = {}
        self._memos: dict[str, ChunkId] = {}
        self._layers: set[str] = set()
        self._unnamed: set[ChunkId] = set()
        self._looked = False

    def look(self) -> bool:
        """Mark what was not marked yet; whether there was anything.

        StoreError when an image or snapshot lacks chunks that no server holds: what it still needs can not be known.
        """
        marker = Marker(self._store, self._marks)
        # In this order: a name that is set after the counter was read moves it, and what moves from a name to a lease,
        # or from a lease to what the caller keeps, is there before it leaves where it was.
        self.names = self._store.index.counter(NAMES)
        found = self._mark_images(marker)
        found = self._mark_snapshots(marker) or found
        found = self._mark_memos(marker) or found
        found = self._mark_leases(marker) or found
        found = self._mark_kept(marker) or found
        found = self._mark_leases(marker) or found
        self.rooted |= marker.roots
        self._looked = True
        return found

    def forget_memos(self) -> int:
        """Take away the memos that nothing wants, or that promise what is not here; how many. For before chunks go."""
        stale = [diff_id for diff_id, _ in self._store.memos.items() if diff_id not in self._memos]
        for diff_id in stale:
            self._store.memos.delete(diff_id)
        return len(stale)

    def _mark_images(self, marker: Marker) -> bool:
        found = False
        for name, ref in self._store.refs.items():
            if self._refs.get(name) == ref:
                continue
            found = True
            try:
                record, lacking = marker.image(ref.record)
            except FormatError as error:
                hint = f"`pvisor image rm {name}` drops the name; then collect again"
                raise StoreError(f"image {name}: {error.message}", hint=hint) from error
            if lacking and not ref.origin:
                hint = f"`pvisor image verify {name}`, then convert it again; or drop it: `pvisor image rm {name}`"
                raise self._lacks(f"image {name}", lacking, hint)
            if record is not None:
                self._layers.update(record.layers)
            self._refs[name] = ref
        return found

    def _mark_snapshots(self, marker: Marker) -> bool:
        found = False
        for name, ref in self._store.snapshots.items():
            if self._snapshots.get(name) == ref:
                continue
            found = True
            hint = f"`pvisor snapshot verify {name}`, then pull it again; or drop it: `pvisor snapshot rm {name}`"
            try:
                _, lacking = marker.snapshot(ref.record)
            except FormatError as error:
                raise StoreError(f"snapshot {name}: {error.message}", hint=hint) from error
            if lacking and not ref.origin:
                raise self._lacks(f"snapshot {name}", lacking, hint)
            self._snapshots[name] = ref
        return found

    def _mark_memos(self, marker: Marker) -> bool:
        """Those of layers of images that have a name; once a collection goes on also new ones, whose image may still
        come."""
        found = False
        for diff_id, blob in list(self._store.memos.items()):
            if self._memos.get(diff_id) == blob or (not self._looked and diff_id not in self._layers):
                continue
            self._memos.pop(diff_id, None)
            try:
                if marker.layer(blob):
                    continue
            except FormatError as error:
                log.warning("layer memo %s: %s", diff_id, error.message)
                continue
            found = True
            self._memos[diff_id] = blob
        return found

    def _mark_leases(self, marker: Marker) -> bool:
        """What leases keep, as far as it is here: whoever holds one may still be fetching the rest."""
        found = False
        for lease in self._store.leases.live():
            for record in lease.keeps - self._unnamed:
                try:
                    mark_either(self._store, marker, record)
                except FormatError as error:
                    log.warning("what lease %s of %s keeps: %s", lease.id, lease.holder, error.message)
                found = True
                self._unnamed.add(record)
        return found

    def _mark_kept(self, marker: Marker) -> bool:
        """What the caller keeps without a name: not the layer memos, which only a new conversion would use."""
        store = self._store
        images = self._mark_used(
            "image",
            self._keep(),
            marker.image,
            lambda _, record: store.origins.get(record.data) is not None,
            "drop what stands on this image (`pvisor stage ls`, `pvisor vm ls`); then collect again",
        )
        snapshots = self._mark_used(
            "snapshot",
            self._keep_snapshots(),
            marker.snapshot,
            lambda id, record: bool(snapshot_origin(store, Snapshot(name=None, id=id, record=record, ref=None))),
            "remove the virtual machines that stand on it (`pvisor vm ls`); then collect again",
        )
        return images or snapshots

    def _mark_used(
        self,
        kind: str,
        ids: Iterable[ChunkId],
        mark: Callable[[ChunkId], tuple[R | None, set[ChunkId]]],
        is_elsewhere: Callable[[ChunkId, R], bool],
        hint: str,
    ) -> bool:
        """One kind of what is kept without a name; `is_elsewhere` says whether a server has what is not here."""
        unmarked = set(ids) - self._unnamed
        for one in unmarked:
            try:
                record, lacking = mark(one)
            except FormatError as error:
                raise StoreError(f"{kind} {one}, which is in use: {error.message}", hint=hint) from error
            if record is None:
                log.warning("%s %s, which is in use, is not here", kind, one)
            elif lacking and not is_elsewhere(one, record):
                raise self._lacks(f"{kind} {one}, which is in use,", lacking, hint)
            self._unnamed.add(one)
        return bool(unmarked)

    def _lacks(self, what: str, lacking: set[ChunkId], hint: str) -> StoreError:
        outcome = "nothing more" if self._looked else "nothing"
        message = f"{what} lacks {len(lacking)} chunks, such as {min(lacking)}; {outcome} was removed"
        return StoreError(message, hint=hint)


def mark_either(store: ChunkStore, marker: Marker, record: ChunkId) -> None:
    """A record of an image or of a snapshot, of which only its bytes tell which it is. FormatError when of neither."""
    try:
        marker.image(record)
    except FormatError:
        marker.snapshot(record)
