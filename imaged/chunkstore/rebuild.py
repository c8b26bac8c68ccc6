"""Make the index of a store anew from its packs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from imaged.chunkstore.environment import COLLECTIONS, INDEX_NAME
from imaged.chunkstore.index import Index
from imaged.chunkstore.indexfile import LOCK_SUFFIX
from imaged.chunkstore.lease import Leases
from imaged.chunkstore.nametable import NameTable, R
from imaged.chunkstore.pack import (
    PACK_HEADER_BYTES,
    PACK_LIMIT_BYTES,
    PackReader,
    Scanned,
    pack_numbers,
    pack_path,
    scan,
)
from imaged.chunkstore.refs import OriginTable, RefTable
from imaged.chunkstore.rows import Location, PackRow
from imaged.chunkstore.salvage import Salvage, salvage
from imaged.chunkstore.snapshotrefs import SnapshotTable
from imaged.chunkstore.storelock import StoreLock
from imaged.errors import ChunkError, FormatError, StoreError
from imaged.faults import store_faults
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.publish import sync_directory
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord

T = TypeVar("T")
_NEW_NAME = "index.rebuild.mdb"
_COMMIT_COUNT = 4096


def rebuild_index(root: Path) -> tuple[list[str], list[str]]:
    """Index every frame that verifies; (errors, notes). StoreBusyError while another process has the store open.

    Names and origins come from the old index, or when that can not be read from `refs.json` and `snapshots.json`. Layer
    memos are dropped: they are only a cache, and one could promise a chunk that is lost. The old index stays until the
    new one is durable.
    """
    errors: list[str] = []
    notes: list[str] = []
    with StoreLock.exclusive(root):
        old = _old(root, notes, errors)
        _remove_new(root)
        index = Index.open(root / _NEW_NAME)
        try:
            for number in pack_numbers(root):
                _index_pack(index, root, number, old.packs.get(number), errors, notes)
            errors += [f"pack {n}: its file is gone" for n, row in old.packs.items() if _is_lost(root, n, row)]
            RefTable.restore(index, old.refs)
            SnapshotTable.restore(index, old.snapshots)
            OriginTable.restore(index, {**_origins(index, root, old), **old.origins})
            _restore_epoch(index, root)
        finally:
            index.close()
        with store_faults("put the new index in place", root):
            (root / _NEW_NAME).replace(root / INDEX_NAME)
            sync_directory(root)
            _remove_new(root)
            (root / (INDEX_NAME + LOCK_SUFFIX)).unlink(missing_ok=True)
            RefTable.write_copy(root, old.refs)
            SnapshotTable.write_copy(root, old.snapshots)
    return errors, notes


def _restore_epoch(index: Index, root: Path) -> None:
    """Clients elsewhere still hold leases of the old index: what is condemned from now on must not be before them."""
    epochs = [lease.epoch for lease in Leases(root, index).live() if lease.epoch is not None]
    with index.write("restore the epoch") as txn:
        index.raise_counter(txn, COLLECTIONS, max(epochs, default=0))


def _old(root: Path, notes: list[str], errors: list[str]) -> Salvage:
    if (root / INDEX_NAME).exists():
        try:
            return salvage(root / INDEX_NAME)
        except StoreError as error:
            notes.append(f"{error.message}; names are taken from {RefTable.COPY_NAME} and {SnapshotTable.COPY_NAME}")
    refs, snapshots = _copied(RefTable, root, errors), _copied(SnapshotTable, root, errors)
    return Salvage(refs=refs, snapshots=snapshots)


def _copied(table: type[NameTable[R]], root: Path, errors: list[str]) -> dict[str, R]:
    try:
        return table.read_copy(root)
    except FormatError as error:
        errors.append(f"{error.message}; all names are lost")
        return {}


def _is_lost(root: Path, number: int, row: PackRow) -> bool:
    return row.live_chunks > 0 and not pack_path(root, number).exists()


def _remove_new(root: Path) -> None:
    for name in (_NEW_NAME, _NEW_NAME + LOCK_SUFFIX):
        (root / name).unlink(missing_ok=True)


def _index_pack(
    index: Index, root: Path, number: int, old: PackRow | None, errors: list[str], notes: list[str]
) -> None:
    """Index the frames of one pack; its committed length is the end of the last that verifies."""
    length = PACK_HEADER_BYTES
    sealed = pack_path(root, number).stat().st_size >= PACK_LIMIT_BYTES or (old is not None and old.sealed)
    bad: list[Scanned] = []
    entries: list[tuple[ChunkId, Location]] = []
    for found in scan(pack_path(root, number)):
        if found.frame is None:
            bad.append(found)
            continue
        header = found.frame.header
        length = found.offset + found.length
        location = Location(number, found.offset, header.size_bytes, header.payload_bytes, header.codec)
        entries.append((header.id, location))
        if len(entries) == _COMMIT_COUNT:
            index.commit(entries, {number: (length, sealed)})
            entries = []
    index.commit(entries, {number: (length, sealed)})
    holes = [found for found in bad if found.punched]
    if holes:
        total_bytes = sum(found.length for found in holes)
        notes.append(f"pack {number}: {total_bytes} bytes in {len(holes)} places were removed by a collection")
    for found in bad:
        if found.punched:
            continue
        # Past the last good frame, and never committed as far as we know: what a killed writer left.
        is_tail = found.offset >= length and (old is None or found.offset >= old.committed_bytes)
        text = f"pack {number} at {found.offset}: {found.length} bytes hold no chunk: {found.problem}"
        (notes if is_tail else errors).append(text)


def _origins(index: Index, root: Path, old: Salvage) -> dict[ChunkId, str]:
    """Origins of the block images that the names with an origin consist of, as far as their records are here."""
    found: dict[ChunkId, str] = {}
    images = {ref.record: ref.origin for ref in old.refs.values() if ref.origin}
    with closing(PackReader(root)) as reader:
        for ref in old.snapshots.values():
            snapshot = _record(index, reader, ref.record, SnapshotRecord.parse) if ref.origin else None
            if snapshot is not None:
                found.update(dict.fromkeys(snapshot.block_images, ref.origin))
                images.setdefault(snapshot.image, ref.origin)
        for chunk, origin in images.items():
            image = _record(index, reader, chunk, ImageRecord.parse)
            if image is not None:
                found[image.metadata] = found[image.data] = origin
    return found


def _record(index: Index, reader: PackReader, chunk: ChunkId, parse: Callable[[bytes], T]) -> T | None:
    """One that is here and sound."""
    location = index.find(chunk)
    if location is None:
        return None
    try:
        return parse(Frame.parse(reader.read(location.pack, location.offset, location.stored_bytes)).open())
    except (ChunkError, FormatError):
        return None
