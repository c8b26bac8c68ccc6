"""Pull a snapshot from a chunk server: lazily (what a restore begins with, one request) or completely."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from imaged import snapshots
from imaged.blockimage import BlockImage, open_blob
from imaged.chunks import ChunkReader
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.errors import NameTakenError, PvisorError, UpstreamError
from imaged.fetching.boot import admit_all
from imaged.fetching.fetch import Fetcher, FetchingReader, Tally
from imaged.fetching.remote import RemoteSnapshot
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.names import snapshot_name
from imaged.profile import Profile
from imaged.progress import NoProgress, Progress
from imaged.reach import reachable_snapshot
from imaged.record import ImageRecord
from imaged.slices import slices
from imaged.snapshot import STATE_LIMIT_BYTES, SnapshotRecord
from imaged.snapshots import Snapshot
from imaged.transfer.pull import fetch_all, later, lease

_GROUP = 64
"""Chunks that are asked for at once."""
_SHORT_ID = 8
"""Digits that the start of an id has at least, as in `imaged.snapshots`."""


@dataclass(frozen=True, slots=True)
class PulledSnapshot:
    """The snapshot's id, its record, and the name that the pull gives it; `published` as of `Pulled`."""

    id: ChunkId
    record: SnapshotRecord
    name: str
    published: Future[None] | None = field(default=None, compare=False)


def pull_snapshot(
    fetcher: Fetcher,
    upstream: HttpUpstream,
    name: str,
    *,
    lazy: bool,
    progress: Progress | None = None,
    tally: Tally | None = None,
    last: str = "",
) -> PulledSnapshot:
    """Resolve `name` (or an id) at the server and fetch the snapshot into the fetcher's store.

    Lazily: records, device state, the image's metadata, and the roots of memory, disk and files, all in one answer; the
    rest comes when it is read. Returns when these bytes are here; they become durable and the name is set in the
    background, `fetcher.drain(pulled.published)` waits for that. Otherwise every chunk is in the store, and the name
    set, on return.
    `last` is the server that is believed to have all of what this one has in part, as a peer has.
    NotFoundError, UpstreamError, StoreError, ChunkMissingError when the server lacks a part of its own snapshot;
    NameTakenError when the name stands for another snapshot that only this host has.
    """
    tally = tally or Tally()
    with ExitStack() as leased:
        lease(fetcher, f"pulling snapshot {name}", leased, lazy=lazy)
        found, profile, origin = _boot(fetcher, upstream, name, tally, last)
        _replaceable(fetcher, found)
        reader = fetcher.reader(found.record.memory, tally)
        image = _begin(reader, found.record)
        published = None
        if lazy:
            published = later(fetcher, leased, lambda: _publish(fetcher, found, image, profile, origin, origin))
        else:
            chunks = _all_chunks(fetcher, reader, found.id, found.record, image)
            fetch_all(fetcher, upstream, chunks, found.stored_bytes, reader, progress or NoProgress())
            _publish(fetcher, found, image, profile, "", origin)
    return PulledSnapshot(found.id, found.record, found.name, published)


def complete_snapshot(
    fetcher: Fetcher, snapshot: Snapshot, *, progress: Progress | None = None, tally: Tally | None = None
) -> None:
    """Have all chunks of a snapshot of this host in the fetcher's store: what it shares with a parent or an image that
    was pulled lazily, and nobody has read. No server has the snapshot itself, so the fetcher has those of its parts.

    UpstreamError, StoreError, ChunkMissingError.
    """
    store, progress, record = fetcher.store, progress or NoProgress(), snapshot.record
    with store.lease(f"completing snapshot {snapshot.label}"):
        reader = fetcher.reader(record.memory, tally or Tally())
        image = ImageRecord.parse(reader.get(record.image))
        chunks = _all_chunks(fetcher, reader, snapshot.id, record, image)
        missing = store.missing(chunks)
        progress.start(f"fetching {len(missing)} of {len(chunks)} chunks", None)
        for some in slices(missing, _GROUP):
            for data in reader.get_many(some).values():
                store.put(data)
                progress.advance(len(data))
        store.flush()
        store.snapshots.complete(snapshot.id)
        store.refs.complete(record.image)


def _all_chunks(
    fetcher: Fetcher, reader: FetchingReader, id: ChunkId, record: SnapshotRecord, image: ImageRecord
) -> list[ChunkId]:
    """Every chunk of a snapshot; their leaves are fetched for that."""
    fetcher.drain()
    for root in (*record.block_images, image.metadata, image.data):
        BlockImage.open(reader, root).preload()
    return list(reachable_snapshot(reader, id))


def _boot(
    fetcher: Fetcher, upstream: HttpUpstream, name: str, tally: Tally, last: str
) -> tuple[RemoteSnapshot, Profile | None, str]:
    """The snapshot as the server has it, its profile, and who has all of it; what it begins with is then in the
    fetcher, but for what broke off."""
    known = _known(fetcher, name)
    tally.count(requests=1)
    with upstream.boot_snapshot(name, known=known.id if known is not None else None) as stream:
        if stream is None:
            assert known is not None  # `HttpUpstream.boot_snapshot` says so
            origin = last or upstream.url
            _remember(fetcher, known.record.block_images, origin)
            return known, None, origin
        found = _named(stream.found, name, upstream.url)
        origin = last if last and not found.complete else upstream.url
        _remember(fetcher, found.record.block_images, origin)
        fetcher.admit(stream.record_frame, tally)
        admit_all(fetcher, stream.first, upstream.url, f"snapshot {name}", tally)
        return found, stream.profile, origin


def _begin(reader: FetchingReader, record: SnapshotRecord) -> ImageRecord:
    """Fetch what the boot answer did not bring, nothing as a rule; the image's record."""
    disk = () if record.disk is None else (record.disk,)
    reader.get_many([record.state, record.memory, *disk, record.image])
    image = ImageRecord.parse(reader.get(record.image))
    reader.get_many([image.metadata, image.data])
    reader.get_many(_of_blobs(reader, record, image))
    return image


def _of_blobs(reader: ChunkReader, record: SnapshotRecord, image: ImageRecord) -> list[ChunkId]:
    """The chunks of what is read whole."""
    state = open_blob(reader, record.state, limit_bytes=STATE_LIMIT_BYTES)
    return [*state.chunk_ids(), *open_blob(reader, image.metadata).chunk_ids()]


def _known(fetcher: Fetcher, name: str) -> RemoteSnapshot | None:
    """What this name stands for in the local store, when what it begins with is all here."""
    store = fetcher.store
    try:
        snapshot = snapshots.load(store, *snapshots.resolve(store, name))
        image = ImageRecord.parse(store.get(snapshot.record.image))
        blobs = _of_blobs(store, snapshot.record, image)
        if store.missing([*snapshot.record.block_images, *blobs, image.data]):
            return None
    except PvisorError:
        return None
    ref = snapshot.ref
    assert ref is not None and snapshot.name is not None  # it was found by a ref
    return RemoteSnapshot(
        name=snapshot.name,
        id=snapshot.id,
        record=snapshot.record,
        chunks=ref.chunks or 0,
        stored_bytes=ref.stored_bytes or 0,
        created_at=ref.created_at,
    )


def _named(found: RemoteSnapshot, asked: str, url: str) -> RemoteSnapshot:
    """The snapshot, when its name is the one asked for or its id begins so: a server must not choose which name of
    this host its snapshot takes. UpstreamError."""
    by_id = len(asked) >= _SHORT_ID and str(found.id).startswith(asked)
    if by_id or (found.name == asked and not ChunkId.is_id(asked)):
        return replace(found, name=snapshot_name(found.name))
    raise UpstreamError(
        f"chunk server {url}: asked for snapshot {asked}, it answers with {found.name!r}, id {found.id}",
        hint="check who runs the server",
    )


def _remember(fetcher: Fetcher, block_images: tuple[ChunkId, ...], url: str) -> None:
    for block_image in block_images:
        fetcher.remember_origin(block_image, url)


def _publish(
    fetcher: Fetcher,
    found: RemoteSnapshot,
    image: ImageRecord,
    profile: Profile | None,
    origin: str,
    url: str,
) -> None:
    """Durable first, named after. `origin` goes into the ref: "" when every chunk is here. A lazy pull leaves a
    complete snapshot complete."""
    store = fetcher.store
    for block_image in (*found.record.block_images, image.metadata, image.data):
        store.origins.set(block_image, url)
    if profile is not None:
        store.profiles.offer(found.record.memory, profile)
    store.flush()
    if not origin:
        store.snapshots.complete(found.id)
        store.refs.complete(found.record.image)
    ref = SnapshotRef(
        record=found.id,
        created_at=found.created_at,
        origin=origin,
        chunks=found.chunks or None,
        stored_bytes=found.stored_bytes or None,
        server=url,
    )
    held = _replaceable(fetcher, found)
    if held is not None and held.record == found.id and not held.origin:
        ref = replace(held, server=url)
    if ref != held and not store.snapshots.replace(found.name, ref, over=held.record if held is not None else None):
        raise _taken(found.name)


def _replaceable(fetcher: Fetcher, found: RemoteSnapshot) -> SnapshotRef | None:
    """What the name stands for here; it may move from there to what was found. NameTakenError."""
    held = fetcher.store.snapshots.get(found.name)
    if held is not None and held.record != found.id and not held.server:
        raise _taken(found.name)
    return held


def _taken(name: str) -> NameTakenError:
    hint = f"`pvisor snapshot push {name}` to a server first, or `pvisor snapshot rm {name}`"
    return NameTakenError(f"snapshot {name!r} of this host is another one, which only this host has", hint=hint)
