"""Giving the bytes of dead frames back to the file system, while others read, and append to packs of their own.

Three things make that safe. A pack is cut, rewritten or removed only by who holds its lock, and removed only in a
transaction in which no chunk lies in it. What lies between live frames, below the committed length of the same
snapshot of the index, is never live again, so there holes can be made in any pack. And who reads looks the index up
again when a frame is not where it was (`imaged.chunkstore.store`).
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from imaged.chunkstore.appender import Appender
from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import (
    PACK_HEADER_BYTES,
    PACKS_DIRECTORY,
    PUNCH_BYTES,
    PackReader,
    PackWriter,
    disk_bytes,
    pack_numbers,
    pack_path,
    punch,
)
from imaged.chunkstore.rows import LOCATION, Location, PackRow
from imaged.errors import ChunkCorruptError, FormatError, StoreFullError
from imaged.faults import store_faults
from imaged.frame import HEADER_BYTES, Frame
from imaged.ids import ChunkId
from imaged.publish import sync_directory

LIVE_SHARE = 0.5
"""A pack of which less than this is live is rewritten."""
_AT_ONCE = 64
"""Packs held and rewritten at a time."""
log = logging.getLogger(__name__)


class Compacted(NamedTuple):
    """Numbers of packs. `damaged` hold live chunks that do not verify and were left as they are."""

    rewritten: list[int]
    damaged: list[int]


def cut_tails(root: Path, index: Index) -> None:
    """Give back what killed writers appended and never committed."""
    with store_faults("cut a pack", root):
        for number, row in index.packs().items():
            pack = None if row.sealed else PackWriter.lock(root, number)
            if pack is not None:
                with closing(pack):
                    now = index.pack(number)  # its writer may have committed before it let go
                    if now is not None:
                        pack.cut(now.committed_bytes)


def remove_empty(root: Path, index: Index) -> int:
    """Packs without a live chunk, and files that a killed collection had already taken out of the index; how many."""
    rows = index.packs()
    empty = [number for number, row in rows.items() if not row.live_chunks]
    orphans = [number for number in pack_numbers(root) if number not in rows]
    removed = 0
    for number in [*empty, *orphans]:
        pack = PackWriter.lock(root, number)
        if pack is not None:
            with closing(pack):
                removed += _remove(root, index, pack)
        elif not pack_path(root, number).exists():
            removed += len(index.delete_packs([number]))
    return removed


def _remove(root: Path, index: Index, pack: PackWriter) -> bool:
    """A pack that the caller has locked; whether nothing lay in it."""
    if not index.delete_packs([pack.number]):
        return False
    with store_faults("remove a pack", root):
        pack.empty()
        pack_path(root, pack.number).unlink(missing_ok=True)
        sync_directory(root / PACKS_DIRECTORY)
    return True


def compact(root: Path, index: Index, *, share: float = LIVE_SHARE) -> Compacted:
    """Rewrite packs of which less than this share is live and that nobody appends to, those with least to copy first,
    as far as the disk has room."""
    done = Compacted([], [])
    sparse = {number: row for number, row in index.packs().items() if _is_sparse(row, share)}
    waiting = sorted(sparse, key=lambda number: sparse[number].live_bytes)
    reader, appender = PackReader(root), Appender(root, index, exclude=frozenset(sparse))
    try:
        for start in range(0, len(waiting), _AT_ONCE):
            with ExitStack() as locks:
                packs: dict[int, PackWriter] = {}
                for number in waiting[start : start + _AT_ONCE]:
                    pack = PackWriter.lock(root, number)
                    if pack is not None:
                        packs[number] = locks.enter_context(closing(pack))
                places = _places(index, packs)
                for number, pack in packs.items():
                    rewritten = _rewrite(root, index, pack, places[number], reader, appender)
                    (done.rewritten if rewritten else done.damaged).append(number)
    except StoreFullError as error:
        log.warning("packs stay as they are: %s", error.message)
    finally:
        appender.close()
        reader.close()
    return done


def _is_sparse(row: PackRow, share: float) -> bool:
    return row.live_bytes < share * (row.committed_bytes - PackRow().committed_bytes)


def _rewrite(
    root: Path,
    index: Index,
    pack: PackWriter,
    places: list[tuple[ChunkId, Location]],
    reader: PackReader,
    appender: Appender,
) -> bool:
    """Copy what is live and remove the pack; False, and it stays, when something in it is damaged."""
    places.sort(key=lambda place: place[1].offset)
    if not _is_readable(index, reader, places):
        return False
    with store_faults("punch a pack", root):
        for hole in _holes(((place.offset, place.stored_bytes) for _, place in places), pack.length):
            pack.punch(*hole)
    for chunk, location in places:
        if index.find(chunk) == location:
            appender.append([_frame(reader, chunk, location)])
    appender.commit(move=True)
    reader.forget(pack.number)
    return _remove(root, index, pack)


def punch_dead(root: Path, index: Index, *, only: Collection[int] | None = None, exclude: Collection[int] = ()) -> None:
    """Make holes where the dead frames are: then their space is free at once, and without a change of the index."""
    spans: dict[int, array[int]] = {}
    ends: dict[int, int] = {}
    with index.read() as txn:
        for number, row in index.packs(txn=txn).items():
            if number in exclude or (only is not None and number not in only):
                continue
            if disk_bytes(root, number) - PACK_HEADER_BYTES - row.live_bytes < PUNCH_BYTES:
                continue
            spans[number], ends[number] = array("Q"), row.committed_bytes
        for _, raw in index.rows("chunks", txn=txn) if spans else ():
            number, offset, _, payload_bytes, _ = LOCATION.unpack(raw)
            flat = spans.get(number)
            if flat is not None:
                flat.append(offset << 32 | HEADER_BYTES + payload_bytes)  # in one number: they take the most memory
    for number, flat in spans.items():
        live = ((place >> 32, place & 0xFFFFFFFF) for place in sorted(flat))
        with store_faults("punch a pack", root):
            try:
                fd = os.open(pack_path(root, number), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                for hole in _holes(live, ends[number]):
                    punch(fd, *hole)
            finally:
                os.close(fd)


def _holes(live: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """What lies between the live frames of a pack, which are (offset, length) in the order of the file."""
    start = PACK_HEADER_BYTES
    for offset, length in live:
        yield start, offset
        start = offset + length
    yield start, end


def _places(index: Index, packs: Collection[int]) -> dict[int, list[tuple[ChunkId, Location]]]:
    places: dict[int, list[tuple[ChunkId, Location]]] = {number: [] for number in packs}
    for chunk, location in index.chunks() if places else ():
        if location.pack in places:
            places[location.pack].append((chunk, location))
    return places


def _is_readable(index: Index, reader: PackReader, places: list[tuple[ChunkId, Location]]) -> bool:
    """Whether every live frame of a pack verifies; a pack where one does not is left for fsck and the user."""
    for chunk, location in places:
        try:
            _frame(reader, chunk, location).open()
        except (ChunkCorruptError, FormatError, OSError) as error:
            if index.find(chunk) != location:  # dropped, or put elsewhere, meanwhile
                continue
            log.warning("pack %d at %d: %s", location.pack, location.offset, error)
            return False
    return True


def _frame(reader: PackReader, chunk: ChunkId, location: Location) -> Frame:
    frame = Frame.parse(reader.read(location.pack, location.offset, location.stored_bytes))
    if frame.id != chunk:
        raise FormatError("frame", expected=f"chunk {chunk}", found=str(frame.id))
    return frame
