"""What a first mount of an image, or a restore of a snapshot, needs: in the order of need, to be sent as frames."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from imaged import catalog
from imaged.blockimage import BlockImage, open_blob
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkError, FormatError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.profile import AHEAD_BYTES, Profile
from imaged.reach import belonging
from imaged.record import ImageRecord
from imaged.snapshot import STATE_LIMIT_BYTES
from imaged.snapshots import Snapshot

log = logging.getLogger(__name__)
FIRST_LEAF_BYTES = 64 << 10
"""Leaves from the start of the disk for an image without a profile. A leaf is some 8 KiB and saves a round trip if the
process reads in its range: of a shell in Debian 256 KiB fetch a tenth more bytes, 32 KiB make more requests."""
_LEAF_BYTES = 8 << 10
"""What one takes as a rule: of those that are not here it is not known."""
_LISTS = 256


@dataclass(frozen=True, slots=True)
class BootView:
    """`profile` is its frame, None when there is none. `chunks` of an image are the record, the metadata image whole,
    the data image's root, and the leaves that the profile names (else the first ones); `ahead` the profile's other
    chunks."""

    profile: Frame | None
    chunks: list[ChunkId]
    ahead: list[ChunkId]


class BootViews:
    """The boot views of a store's images, the last used ones kept. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str | None, ChunkId], tuple[bytes | None, BootView]] = {}

    def get(self, store: ChunkStore, entry: catalog.Entry) -> BootView:
        """As whoever sees the store so has it. ChunkError, FormatError when the image is damaged here."""
        raw = store.profiles.raw(entry.record.data)
        key = store.namespace, entry.ref.record
        with self._lock:
            held = self._made.get(key)
        if held is not None and held[0] == raw:
            return held[1]
        view = _make(store, entry, raw)
        with self._lock:
            self._made[key] = (raw, view)
            if len(self._made) > _LISTS:
                del self._made[next(iter(self._made))]
        return view


def _make(store: ChunkStore, entry: catalog.Entry, raw: bytes | None) -> BootView:
    metadata = open_blob(store, entry.record.metadata)
    data = BlockImage.open(store, entry.record.data)
    first = [entry.ref.record, metadata.id, *metadata.leaf_ids(), *metadata.chunk_ids(), data.id]
    try:
        if raw is not None:
            found = belonging(store, data.id, Profile.parse(raw).chunks)
            chunks = list(dict.fromkeys([*first, *found.leaves]))
            return BootView(Frame.of(raw), chunks, _ahead(store, found.chunks, frozenset(chunks)))
    except (ChunkError, FormatError) as error:
        log.warning("image %s: the profile is left out: %s", entry.name, error.message)
    return BootView(None, list(dict.fromkeys([*first, *_first_leaves(store, data)])), [])


def _first_leaves(store: ChunkStore, data: BlockImage) -> list[ChunkId]:
    leaves: list[ChunkId] = []
    room = FIRST_LEAF_BYTES
    for leaf in data.leaf_ids():
        size = store.sizes(leaf)
        room -= size[1] if size is not None else _LEAF_BYTES
        if room < 0:
            break
        leaves.append(leaf)
    return leaves


def _ahead(store: ChunkStore, chunks: list[ChunkId], sent: frozenset[ChunkId]) -> list[ChunkId]:
    """Those that are here and not among `sent`, to a number of bytes."""
    ahead: list[ChunkId] = []
    room = AHEAD_BYTES
    for chunk in chunks:
        size = store.sizes(chunk)
        if size is None or chunk in sent:
            continue
        room -= size[1]
        if room < 0:
            break
        ahead.append(chunk)
    return ahead


def snapshot_view(store: ChunkStore, snapshot: Snapshot) -> BootView:
    """What a restore needs first: the record, the device state whole, the roots of memory and disk, and of the image
    its record, its metadata whole and the data's root; then the leaves that the memory's profile names. ChunkError,
    FormatError."""
    record = snapshot.record
    image = ImageRecord.parse(store.get(record.image))
    disk = () if record.disk is None else (record.disk,)
    first = [snapshot.id, record.memory, *disk, record.image, image.data]
    state = open_blob(store, record.state, limit_bytes=STATE_LIMIT_BYTES)
    for blob in (state, open_blob(store, image.metadata)):
        first += [blob.id, *blob.leaf_ids(), *blob.chunk_ids()]
    profile = None
    raw = store.profiles.raw(record.memory)
    if raw is not None:
        try:
            first += belonging(store, record.memory, Profile.parse(raw).chunks).leaves
            profile = Frame.of(raw)
        except (ChunkError, FormatError) as error:
            log.warning("snapshot %s: the profile is left out: %s", snapshot.label, error.message)
    return BootView(profile, list(dict.fromkeys(first)), [])
