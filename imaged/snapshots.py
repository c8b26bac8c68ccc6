"""Snapshots of a store: found by what a user types, listed with their lineage, published and removed."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.errors import (
    ChunkCorruptError,
    ChunkError,
    ChunkMissingError,
    ChunkUnreadableError,
    FormatError,
    NameTakenError,
    NotFoundError,
)
from imaged.ids import ChunkId
from imaged.names import snapshot_name
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord

log = logging.getLogger(__name__)
_BEGINS_ID = re.compile(r"[0-9a-f]{8,64}")
_HINT = "`pvisor snapshot ls` lists snapshots, with --remote the server's; `pvisor snapshot pull` fetches one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot of a store; one that was asked for by id and has no name has no `name` and no `ref` either."""

    name: str | None
    id: ChunkId
    record: SnapshotRecord
    ref: SnapshotRef | None

    @property
    def label(self) -> str:
        """What to call it: its name, else its id."""
        return self.name or str(self.id)


def resolve(store: ChunkStore, text: str) -> tuple[str, SnapshotRef]:
    """The name and ref that a user means by a name, an id, or the start of an id.

    The record is not read, so a damaged snapshot can be named too. NotFoundError; a name comes before an id.
    """
    if not ChunkId.is_id(text):
        ref = store.snapshots.get(snapshot_name(text))
        if ref is not None:
            return text, ref
    matches: list[tuple[str, SnapshotRef]] = []
    if _BEGINS_ID.fullmatch(text) is not None:
        matches = [(name, ref) for name, ref in store.snapshots.items() if str(ref.record).startswith(text)]
    if not matches:
        raise NotFoundError(f"no snapshot {text}", hint=_HINT)
    if len({ref.record for _, ref in matches}) > 1:
        names = ", ".join(name for name, _ in matches[:5])
        raise NotFoundError(f"snapshot id {text} is ambiguous: {names}", hint="give more of its digits")
    return matches[0]


def load(store: ChunkStore, name: str, ref: SnapshotRef) -> Snapshot:
    """The snapshot of a ref. ChunkMissingError, ChunkCorruptError, FormatError when its record is lost or damaged."""
    return Snapshot(name=name, id=ref.record, record=_read(store, ref.record, name), ref=ref)


def _read(store: ChunkStore, snapshot: ChunkId, label: str) -> SnapshotRecord:
    hint = f"`pvisor snapshot pull {label}` fetches it from a server that has it"
    try:
        return SnapshotRecord.parse(store.get(snapshot))
    except ChunkMissingError as error:
        raise ChunkMissingError(snapshot, f"the record of snapshot {label} is not in the store", hint=hint) from error
    except ChunkUnreadableError:
        raise
    except ChunkCorruptError as error:
        message = f"the record of snapshot {label} is damaged here ({error.message})"
        raise ChunkCorruptError(snapshot, message, hint=error.hint or hint) from error


def find(store: ChunkStore, text: str) -> Snapshot:
    """What `resolve` says, with its record; by its whole id also one that has no name. NotFoundError.

    ChunkError, FormatError when the record is damaged.
    """
    try:
        return load(store, *resolve(store, text))
    except NotFoundError:
        if not ChunkId.is_id(text):
            raise
        chunk = ChunkId.parse(text)
        if not store.has(chunk):
            raise
        return Snapshot(name=None, id=chunk, record=_read(store, chunk, text), ref=None)


def knows(store: ChunkStore, text: str) -> bool:
    """Whether the text means a snapshot of this store, be it whole, damaged, or one of several. InvalidNameError."""
    if ChunkId.is_id(text):
        if store.has(ChunkId.parse(text)):
            return True
    elif store.snapshots.get(snapshot_name(text)) is not None:
        return True
    return _BEGINS_ID.fullmatch(text) is not None and any(
        str(ref.record).startswith(text) for _, ref in store.snapshots.items()
    )


def listing(store: ChunkStore) -> list[Snapshot]:
    """Every named snapshot, by name; one whose record is lost or damaged is left out, and logged. ChunkUnreadableError
    when the disk does not give one now."""
    found = []
    for name, ref in store.snapshots.items():
        try:
            found.append(load(store, name, ref))
        except ChunkUnreadableError:
            raise
        except (ChunkError, FormatError) as error:
            log.error("snapshot %s is not listed: %s", name, error.message)
    return found


def publish(store: ChunkStore, name: str | None, record: SnapshotRecord) -> ChunkId:
    """Make a snapshot of this host durable, and then its name: the id.

    Everything it names is in the store already, or at the server that its parent or its image comes from. A name that
    is taken moves to it. StoreError, and the name stands for what it did before.
    """
    checked = snapshot_name(name) if name is not None else None
    ref = _put(store, record)
    if checked is None:
        store.flush()
    else:
        store.snapshots.set(checked, ref)  # it flushes first
    return ref.record


def publish_over(store: ChunkStore, name: str, record: SnapshotRecord, *, over: ChunkId | None) -> ChunkId:
    """As `publish`, when the name is free or stands for the snapshot `over`. NameTakenError; then it has no name."""
    ref = _put(store, record)
    if not store.snapshots.replace(snapshot_name(name), ref, over=over):
        raise NameTakenError(f"there is another snapshot {name!r} already", hint="`pvisor snapshot ls` lists them")
    return ref.record


def _put(store: ChunkStore, record: SnapshotRecord) -> SnapshotRef:
    origin = note_origins(store, record)
    return SnapshotRef(record=store.put(record.pack()), created_at=int(time.time()), origin=origin)


def snapshot_origin(store: ChunkStore, snapshot: Snapshot) -> str:
    """The server that gives what is not here of a snapshot, "" when all is. Of one without a name the tables of its
    block images tell."""
    if snapshot.ref is not None:
        return snapshot.ref.origin
    return store.origins.get(snapshot.record.memory) or _origin_of_image(store, snapshot.record.image)


def note_origins(store: ChunkStore, record: SnapshotRecord) -> str:
    """Remember which server has the chunks of a new snapshot that are not on this host: its URL, "" when all are here.

    A machine that was restored, or started, from what was pulled lazily still shares leaves that nobody has read.
    """
    parent = _origin_of_parent(store, record.parent) if record.parent is not None else ""
    if parent:
        for block_image in record.block_images:
            store.origins.set(block_image, parent)
    return parent or _origin_of_image(store, record.image)


def _origin_of_parent(store: ChunkStore, parent: ChunkId) -> str:
    """The server that has what this host lacks of a parent, "" when it is all here, or is gone."""
    refs = [ref for _, ref in store.snapshots.items() if ref.record == parent]
    record = _record(store, parent)
    if record is None or any(not ref.origin for ref in refs):
        return ""
    return store.origins.get(record.memory) or ""


def _origin_of_image(store: ChunkStore, image: ChunkId) -> str:
    """As `_origin_of_parent`, of an image."""
    if any(not ref.origin for _, ref in store.refs.items() if ref.record == image):
        return ""
    try:
        return store.origins.get(ImageRecord.parse(store.get(image)).data) or ""
    except (ChunkError, FormatError):
        return ""


def remove(store: ChunkStore, text: str) -> str:
    """Take a name away and return it; `pvisor store gc` then frees what nothing else keeps. NotFoundError."""
    try:
        name, _ = resolve(store, text)
    except FormatError:  # a damaged row, or one in the way of an id: a whole name still goes
        name = snapshot_name(text)
    if not store.snapshots.delete(name):
        raise NotFoundError(f"snapshot {name} was removed just now")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """One snapshot in a store's lineage, `depth` generations below the first that is known.

    `names` are all of its names: none for one that only virtual machines, or nothing any more, stand on. Of one that
    is gone, or can not be read, `record` is None: children tell of it.
    """

    id: ChunkId
    names: tuple[str, ...]
    record: SnapshotRecord | None
    depth: int


def lineage(store: ChunkStore) -> list[Ancestor]:
    """Every named snapshot and what it descends from, parents before their children, older children first."""
    names: dict[ChunkId, list[str]] = {}
    for name, ref in store.snapshots.items():
        names.setdefault(ref.record, []).append(name)
    records: dict[ChunkId, SnapshotRecord | None] = {}
    waiting = list(names)
    while waiting:
        snapshot = waiting.pop()
        if snapshot in records:
            continue
        record = records[snapshot] = _record(store, snapshot)
        if record is not None and record.parent is not None:
            waiting.append(record.parent)
    children: dict[ChunkId | None, list[ChunkId]] = {}
    for snapshot in sorted(records, key=lambda one: _age_key(records[one], one), reverse=True):
        known = records[snapshot]
        children.setdefault(known.parent if known is not None else None, []).append(snapshot)
    found: list[Ancestor] = []
    stack = [(snapshot, 0) for snapshot in children.get(None, ())]
    while stack:
        snapshot, depth = stack.pop()
        own = tuple(names.get(snapshot, ()))
        found.append(Ancestor(id=snapshot, names=own, record=records[snapshot], depth=depth))
        stack += [(child, depth + 1) for child in children.get(snapshot, ())]
    return found


def ancestors(store: ChunkStore, record: SnapshotRecord) -> Iterator[ChunkId]:
    """What it descends from, youngest first, as far as the records are here."""
    parent = record.parent
    while parent is not None:  # it ends: an id can not be made to name itself
        yield parent
        known = _record(store, parent)
        parent = known.parent if known is not None else None


def _age_key(record: SnapshotRecord | None, snapshot: ChunkId) -> tuple[int, ChunkId]:
    return (record.created_ns if record is not None else 0), snapshot


def _record(store: ChunkStore, snapshot: ChunkId) -> SnapshotRecord | None:
    try:
        return SnapshotRecord.parse(store.get(snapshot))
    except (ChunkError, FormatError):
        return None
