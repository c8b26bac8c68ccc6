"""Garbage collection: mark from the names, forget the rest in the index, then give their bytes back to the disk.

It has the store to itself. A kill at any point leaves a sound store: a chunk leaves the index before its bytes go, a
moved one is durable in its new pack before the old one goes, and a layer memo goes before the chunks it promises.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from imaged.appender import Appender
from imaged.errors import ChunkCorruptError, FormatError, NotFoundError, StoreError
from imaged.faults import store_faults
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.index import Index, Location, PackRow
from imaged.pack import (
    PACK_HEADER_BYTES,
    PACKS_DIRECTORY,
    PUNCH_BYTES,
    PackReader,
    PackWriter,
    disk_bytes,
    pack_numbers,
    pack_path,
)
from imaged.publish import sync_directory
from imaged.reach import Marker
from imaged.snapshots import Snapshot, snapshot_origin
from imaged.store import ChunkStore
from imaged.storelock import StoreLock

LIVE_SHARE = 0.5
"""A pack of which less than this is live is rewritten."""
_SWEEP_COUNT = 2000
"""Chunks dropped in one transaction: small ones need little free space, and gc runs when there is little."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What a collection did.

    `freed_bytes` went back to the file system, `dead_bytes` still lie between live chunks: parts of blocks, or all of
    them where the file system makes no holes; they go when their pack is rewritten. `damaged_packs` hold live chunks
    that do not verify and were left as they are.
    """

    kept_chunks: int
    removed_chunks: int
    freed_bytes: int
    dead_bytes: int
    removed_packs: int
    rewritten_packs: int
    forgotten_layers: int
    damaged_packs: tuple[int, ...] = ()


def _nothing() -> Iterable[ChunkId]:
    return ()


def collect(
    root: Path,
    *,
    keep: Callable[[], Iterable[ChunkId]] = _nothing,
    keep_snapshots: Callable[[], Iterable[ChunkId]] = _nothing,
) -> CollectReport:
    """Remove what neither a name nor `keep`, more ids of image records, nor `keep_snapshots`, of snapshot records,
    keeps alive. Both are called once the collection has the store to itself: what they tell stays true until its end.

    NotFoundError when there is no store. StoreBusyError while another process has the store open. StoreError, and
    nothing is removed, when an image or snapshot lacks chunks that no server holds: what it still needs can not be
    known. One that is to be kept and has no record is passed over. A snapshot does not keep its parent.
    """
    root = root.absolute()
    if not (root / PACKS_DIRECTORY).is_dir():
        raise NotFoundError(
            f"no chunk store at {root}", hint="a server's store is the directory given to serve --store"
        )
    lock = StoreLock.exclusive(root)
    with ChunkStore.open_locked(root, lock) as store:
        before = _disk_bytes(root)
        marker, layers = _mark(store)
        _mark_kept(store, marker, keep())
        _mark_snapshots(store, marker, keep_snapshots())
        _cut_tails(root, store.index)
        forgotten = _forget(store, marker, layers)
        removed = _sweep(store.index, marker.kept)
        removed_packs = _remove_empty(root, store.index)
        rewritten, damaged = _compact(root, store.index)
        _give_back(root, store.index, exclude=damaged)
        usage = store.df()
        return CollectReport(
            kept_chunks=usage.chunks,
            removed_chunks=removed,
            freed_bytes=max(before - _disk_bytes(root), 0),
            dead_bytes=usage.dead_bytes,
            removed_packs=removed_packs,
            rewritten_packs=len(rewritten),
            forgotten_layers=forgotten,
            damaged_packs=tuple(damaged),
        )


def _disk_bytes(root: Path) -> int:
    return sum(disk_bytes(root, number) for number in pack_numbers(root))


def _mark(store: ChunkStore) -> tuple[Marker, set[str]]:
    """Everything the names keep, and the diff_ids whose memos are complete."""
    marker = Marker(store)
    wanted: set[str] = set()
    for name, ref in store.refs.items():
        try:
            record, lacking = marker.image(ref.record)
        except FormatError as error:
            raise StoreError(
                f"image {name}: {error.message}", hint=f"`pvisor image rm {name}` drops the name; then collect again"
            ) from error
        if lacking and not ref.origin:
            hint = f"`pvisor image verify {name}`, then convert it again; or drop it: `pvisor image rm {name}`"
            raise _lacks(f"image {name}", lacking, hint)
        if record is not None:
            wanted.update(record.layers)
    whole = set()
    for diff_id, blob in list(store.memos.items()):
        if diff_id not in wanted:
            continue
        try:
            if not marker.layer(blob):
                whole.add(diff_id)
        except FormatError as error:
            log.warning("layer memo %s: %s", diff_id, error.message)
    return marker, whole


def _mark_kept(store: ChunkStore, marker: Marker, images: Iterable[ChunkId]) -> None:
    """Everything that images without a name keep: not their layer memos, which only a new conversion would use."""
    for image in images:
        hint = "drop what stands on this image (`pvisor stage ls`, `pvisor vm ls`); then collect again"
        try:
            record, lacking = marker.image(image)
        except FormatError as error:
            raise StoreError(f"image {image}, which is in use: {error.message}", hint=hint) from error
        if record is None:
            log.warning("image %s, which is in use, is not here", image)
        elif lacking and store.origins.get(record.data) is None:
            raise _lacks(f"image {image}, which is in use,", lacking, hint)


def _mark_snapshots(store: ChunkStore, marker: Marker, used: Iterable[ChunkId]) -> None:
    """Everything that the names of snapshots keep, and snapshots that virtual machines stand on."""
    for name, ref in store.snapshots.items():
        hint = f"`pvisor snapshot verify {name}`, then pull it again; or drop it: `pvisor snapshot rm {name}`"
        try:
            _, lacking = marker.snapshot(ref.record)
        except FormatError as error:
            raise StoreError(f"snapshot {name}: {error.message}", hint=hint) from error
        if lacking and not ref.origin:
            raise _lacks(f"snapshot {name}", lacking, hint)
    for snapshot in used:
        hint = "remove the virtual machines that stand on it (`pvisor vm ls`); then collect again"
        try:
            record, lacking = marker.snapshot(snapshot)
        except FormatError as error:
            raise StoreError(f"snapshot {snapshot}, which is in use: {error.message}", hint=hint) from error
        if record is None:
            log.warning("snapshot %s, which is in use, is not here", snapshot)
        elif lacking and not snapshot_origin(store, Snapshot(name=None, id=snapshot, record=record, ref=None)):
            raise _lacks(f"snapshot {snapshot}, which is in use,", lacking, hint)


def _lacks(what: str, lacking: set[ChunkId], hint: str) -> StoreError:
    message = f"{what} lacks {len(lacking)} chunks, such as {min(lacking)}; nothing was removed"
    return StoreError(message, hint=hint)


def _forget(store: ChunkStore, marker: Marker, layers: set[str]) -> int:
    """Drop memos of other layers, and origins, profiles, fills and offers of images that are gone; how many memos."""
    stale = [diff_id for diff_id, _ in store.memos.items() if diff_id not in layers]
    for diff_id in stale:
        store.memos.delete(diff_id)
    for image in [image for image, _ in store.origins.items() if image not in marker.kept]:
        store.origins.delete(image)
    for image in [image for image in store.profiles.ids() if image not in marker.kept]:
        store.profiles.delete(image)
    for image in [image for image in store.fills.ids() if image not in marker.kept]:
        store.fills.delete(image)
    for image in [image for image in store.offers.ids() if image not in marker.kept]:
        store.offers.delete(image)
    return len(stale)


def _sweep(index: Index, kept: set[ChunkId]) -> int:
    removed = 0
    start = b""
    while True:
        dead: list[tuple[ChunkId, Location]] = []
        for chunk, location in index.chunks(start):
            if chunk not in kept:
                dead.append((chunk, location))
                if len(dead) == _SWEEP_COUNT:
                    break
        if dead:
            removed += index.drop(dead, forget_memos=False)
        if len(dead) < _SWEEP_COUNT:
            return removed
        start = dead[-1][0]


def _remove_empty(root: Path, index: Index) -> int:
    """Packs without a live chunk, and files that a killed collection had already taken out of the index."""
    rows = index.packs()
    empty = [number for number, row in rows.items() if not row.live_chunks]
    _remove(root, index, empty)
    orphans = [number for number in pack_numbers(root) if number not in rows]
    _remove(root, index, orphans)
    return len(empty) + len(orphans)


def _remove(root: Path, index: Index, numbers: Iterable[int]) -> None:
    numbers = list(numbers)
    if not numbers:
        return
    index.delete_packs(numbers)
    with store_faults("remove packs", root):
        for number in numbers:
            pack_path(root, number).unlink(missing_ok=True)
        sync_directory(root / PACKS_DIRECTORY)


def _cut_tails(root: Path, index: Index) -> None:
    """Give back what killed writers appended and never committed."""
    with store_faults("cut a pack", root):
        for number, row in index.packs().items():
            pack = None if row.sealed else PackWriter.lock(root, number)
            if pack is not None:
                with closing(pack):
                    pack.cut(row.committed_bytes)


def _is_sparse(row: PackRow) -> bool:
    return row.live_bytes < LIVE_SHARE * (row.committed_bytes - PackRow().committed_bytes)


def _compact(root: Path, index: Index) -> tuple[list[int], list[int]]:
    """Rewrite packs with a low live share, those with least to copy first; (rewritten, damaged)."""
    rows = {number: row for number, row in index.packs().items() if _is_sparse(row)}
    places: dict[int, list[tuple[ChunkId, Location]]] = {number: [] for number in rows}
    for chunk, location in index.chunks() if rows else ():
        if location.pack in places:
            places[location.pack].append((chunk, location))
    rewritten, damaged = [], []
    reader, appender = PackReader(root), Appender(root, index, exclude=rows)
    try:
        for number in sorted(rows, key=lambda number: rows[number].live_bytes):
            if not _is_readable(reader, places[number]):
                damaged.append(number)
                continue
            places[number].sort(key=lambda place: place[1].offset)
            _punch(root, number, [(place.offset, place.stored_bytes) for _, place in places[number]])
            for chunk, location in places[number]:
                appender.append(_frame(reader, chunk, location))
            appender.commit(move=True)
            reader.forget(number)
            _remove(root, index, [number])
            rewritten.append(number)
    finally:
        appender.close()
        reader.close()
    return rewritten, damaged


def _give_back(root: Path, index: Index, *, exclude: Iterable[int]) -> None:
    """Make holes where the dead frames are in packs that stay as they are: then their space is free at once."""
    spans: dict[int, array[int]] = {}
    for number, row in index.packs().items():
        if disk_bytes(root, number) - PACK_HEADER_BYTES - row.live_bytes >= PUNCH_BYTES:
            spans[number] = array("Q")
    for number in exclude:
        spans.pop(number, None)
    for _, location in index.chunks() if spans else ():
        if location.pack in spans:
            spans[location.pack].extend((location.offset, location.stored_bytes))
    for number, flat in spans.items():
        _punch(root, number, sorted(zip(flat[::2], flat[1::2], strict=True)))


def _punch(root: Path, number: int, live: Iterable[tuple[int, int]]) -> None:
    """Give back what lies between the live frames, which are (offset, length) in the order of the file."""
    pack = PackWriter.lock(root, number)
    if pack is None:
        return
    with store_faults("punch a pack", root), closing(pack):
        start = PACK_HEADER_BYTES
        for offset, length in live:
            pack.punch(start, offset)
            start = offset + length
        pack.punch(start, pack.length)


def _is_readable(reader: PackReader, places: list[tuple[ChunkId, Location]]) -> bool:
    """Whether every live frame of a pack verifies; a pack where one does not is left for fsck and the user."""
    for chunk, location in places:
        try:
            _frame(reader, chunk, location).open()
        except (ChunkCorruptError, FormatError, OSError) as error:
            log.warning("pack %d at %d: %s", location.pack, location.offset, error)
            return False
    return True


def _frame(reader: PackReader, chunk: ChunkId, location: Location) -> Frame:
    frame = Frame.parse(reader.read(location.pack, location.offset, location.stored_bytes))
    if frame.id != chunk:
        raise FormatError("frame", expected=f"chunk {chunk}", found=str(frame.id))
    return frame
