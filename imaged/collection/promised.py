"""What a cache may not give away, and what it should not, as the names of its store say.

*Promised* are the chunks of names without an origin, which nobody else may have, of images that are being filled, and
of layer memos, which a conversion takes for whole. *Records* of named images and snapshots say what they are. The
*skeleton* of a lazy image, which is its metadata, roots and leaves, is small and read first: it goes after everything
else.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imaged.blockformat import Root
from imaged.blockimage import open_blob
from imaged.chunkstore.environment import NAMES
from imaged.chunkstore.nametable import NameTable, R
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkError, FormatError
from imaged.ids import ChunkId
from imaged.reach import Marker
from imaged.record import ImageRecord
from imaged.snapshot import STATE_LIMIT_BYTES, SnapshotRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promised:
    """`names` is the counter of changes to names when this was true, and `filled` what was being filled."""

    names: int
    filled: frozenset[ChunkId]
    never: frozenset[ChunkId]
    last: frozenset[ChunkId]


def survey(store: ChunkStore, before: Promised | None = None) -> Promised:
    """What the names keep now, which is what they kept `before` when they are the same. FormatError when one is
    damaged: what it keeps is not known; StoreError."""
    names, filled = store.index.counter(NAMES), frozenset(store.fills.ids())
    if before is not None and (before.names, before.filled) == (names, filled):
        return before
    marker = Marker(store)
    never: set[ChunkId] = set()
    last: set[ChunkId] = set()
    for ref in _rows(store.refs):
        never.add(ref.record)
        if not ref.origin or ref.record in filled:
            marker.image(ref.record)
        else:
            last.update(_skeleton_of_image(store, ref.record))
    for image in filled:
        marker.image(image)
    for held in _rows(store.snapshots):
        never.add(held.record)
        if held.origin:
            last.update(_skeleton_of_snapshot(store, held.record))
        else:
            marker.snapshot(held.record)
    for diff_id, blob in store.memos.items():
        try:
            marker.layer(blob)
        except FormatError as error:
            log.warning("layer memo %s: %s", diff_id, error.message)
    return Promised(names, filled, frozenset(never | marker.kept), frozenset(last))


def given(store: ChunkStore, known: set[ChunkId]) -> Iterator[set[ChunkId]]:
    """The present chunks of each image and snapshot that came from a server which has all of it, but for those records
    in `known`. A record is added to it when the next one is asked for: who could not do with its chunks what he wanted
    gets them again."""
    for ref in _rows(store.refs):
        if ref.origin and ref.record not in known:
            yield _present(store, Marker.image, ref.record)
            known.add(ref.record)
    for held in _rows(store.snapshots):
        # One that was made here is at no server, though its origin has what it shares with its parent.
        if held.origin and held.server == held.origin and held.record not in known:
            yield _present(store, Marker.snapshot, held.record)
            known.add(held.record)


def _rows(names: NameTable[R]) -> list[R]:
    return [row for _, row in names.items()]


def _present(store: ChunkStore, mark: Callable[[Marker, ChunkId], object], record: ChunkId) -> set[ChunkId]:
    marker = Marker(store)
    try:
        mark(marker, record)
    except FormatError as error:
        log.warning("%s", error.message)
    return marker.kept


def _skeleton_of_image(store: ChunkStore, record: ChunkId) -> list[ChunkId]:
    try:
        document = ImageRecord.parse(store.get(record))
    except (ChunkError, FormatError):
        return []
    return [*_blob(store, document.metadata), *_map(store, document.data)]


def _skeleton_of_snapshot(store: ChunkStore, snapshot: ChunkId) -> list[ChunkId]:
    try:
        document = SnapshotRecord.parse(store.get(snapshot))
    except (ChunkError, FormatError):
        return []
    found = [document.image, *_blob(store, document.state, limit_bytes=STATE_LIMIT_BYTES)]
    for root in document.block_images:
        found += _map(store, root)
    return found + _skeleton_of_image(store, document.image)


def _map(store: ChunkStore, root: ChunkId) -> list[ChunkId]:
    """The root and the leaves of a block image, as far as that is known."""
    try:
        return [root, *(leaf for leaf in Root.parse(store.get(root)).leaves if leaf is not None)]
    except (ChunkError, FormatError):
        return [root]


def _blob(store: ChunkStore, root: ChunkId, **limit: int) -> list[ChunkId]:
    """With its chunks."""
    found = _map(store, root)
    with contextlib.suppress(ChunkError, FormatError):
        found += open_blob(store, root, **limit).chunk_ids()
    return found
