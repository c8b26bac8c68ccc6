"""Send an image or a snapshot of the local store to a chunk server: only the chunks that the server lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from imaged import snapshots
from imaged.blockimage import BlockImage, get_many
from imaged.catalog import Entry
from imaged.changes import changes
from imaged.chunks import ChunkReader
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkMissingError, NameTakenError, NotFoundError
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.profile import ENTRY_LIMIT
from imaged.progress import Progress
from imaged.reach import reachable, reachable_snapshot
from imaged.snapshot import SnapshotRecord
from imaged.snapshots import Snapshot
from imaged.transfer.remotelease import publish_complete

_UPLOAD_BYTES = 8 << 20
_GROUP = 64


def push_image(store: ChunkStore, upstream: HttpUpstream, entry: Entry, progress: Progress) -> int:
    """Upload and name the image at the server; how many chunks went. ChunkMissingError, UpstreamError; a repeated push
    sends the rest."""
    hint = "the image is not complete here; `pvisor pull` fetches all of it"

    def send(server: HttpUpstream, missing: Sequence[ChunkId]) -> None:
        _send(store, server, missing, progress, hint=hint)

    with store.keeping(f"pushing {entry.name}", [entry.ref.record]):
        chunks = list(reachable(store, entry.ref.record))
        return publish_complete(
            upstream,
            chunks,
            send,
            lambda server: server.publish(entry.name, entry.ref.record, entry.ref.signatures),
            holder=f"pushing {entry.name}",
        )


def push_snapshot(
    store: ChunkStore,
    reader: ChunkReader,
    upstream: HttpUpstream,
    snapshot: Snapshot,
    progress: Progress,
    *,
    replace: bool = False,
) -> int:
    """As `push_image`, with the image that the snapshot stands on and the profile of its memory; how many chunks went.

    `reader` gives what is not in the store (`imaged.transfer.acquire.snapshot_reader`): of that only what the server
    lacks is fetched. NotFoundError for a snapshot without a name. NameTakenError when the server's snapshot of this
    name is not one that this descends from, unless it is to `replace` any.
    """
    if snapshot.name is None:
        hint = "a server keeps snapshots by name: `pvisor vm park VM --as NAME` gives one"
        raise NotFoundError(f"snapshot {snapshot.id} has no name", hint=hint)
    name = snapshot.name
    replaces: ChunkId | Literal["*"] | None = "*" if replace else _replaced(store, upstream, snapshot)

    def send(server: HttpUpstream, missing: Sequence[ChunkId]) -> None:
        absent = store.absent(missing)
        for start in range(0, len(absent), _GROUP):
            for data in get_many(reader, absent[start : start + _GROUP]).values():
                store.put(data)
        _send(store, server, missing, progress, hint=f"`pvisor snapshot verify {name}` says what is lost")

    # What is only fetched to be sent on has no name here.
    with store.lease(f"pushing snapshot {name}", [snapshot.id]):
        sent = publish_complete(
            upstream,
            list(reachable_snapshot(reader, snapshot.id)),
            send,
            lambda server: server.publish_snapshot(name, snapshot.id, replaces=replaces),
            holder=f"pushing snapshot {name}",
        )
    if snapshot.ref is not None:
        store.snapshots.replace(snapshot.name, dataclasses.replace(snapshot.ref, server=upstream.url), over=snapshot.id)
    touched = _touched(store, reader, snapshot.record)
    if touched and upstream.profile(snapshot.id) is None:
        upstream.merge_profile(snapshot.id, touched)
    return sent


def _replaced(store: ChunkStore, upstream: HttpUpstream, snapshot: Snapshot) -> ChunkId | None:
    """What the server's name may move from, None when it is free there. NameTakenError, before anything is sent."""
    assert snapshot.name is not None  # the caller looked
    try:
        held = upstream.snapshot(snapshot.name).id
    except NotFoundError:
        return None
    if held == snapshot.id or held in snapshots.ancestors(store, snapshot.record):
        return held
    hint = f"`pvisor snapshot push --force {snapshot.name}` replaces it"
    raise NameTakenError(f"the server has another snapshot {snapshot.name!r}, id {held}", hint=hint)


def _touched(store: ChunkStore, reader: ChunkReader, record: SnapshotRecord) -> list[ChunkId]:
    """What a machine touches first when it goes on from here: by the profile of this memory, else by that of the
    parent's and what changed since. Empty when neither is known; the server leaves out what is not of this memory."""
    profile = store.profiles.get(record.memory)
    if profile is not None:
        return list(profile.chunks)
    if record.parent is None or not store.has(record.parent):
        return []
    before = SnapshotRecord.parse(store.get(record.parent)).memory
    profile = store.profiles.get(before)
    if profile is None:
        return []
    new = changes(BlockImage.open(reader, record.memory), BlockImage.open(reader, before))
    named = (chunk for place in new for chunk in (place.leaf, place.chunk))
    return list(dict.fromkeys([*profile.chunks, *named]))[:ENTRY_LIMIT]


def _send(
    store: ChunkStore, upstream: HttpUpstream, chunks: Sequence[ChunkId], progress: Progress, *, hint: str
) -> None:
    """Upload these. ChunkMissingError with this hint for one that is not here."""
    sizes = [size for chunk in chunks if (size := store.sizes(chunk)) is not None]
    progress.start(f"pushing {len(chunks)} chunks", sum(stored for _, stored in sizes))
    for frames in _batches(store, chunks, hint):
        upstream.upload(frames)
        progress.advance(sum(frame.stored_bytes for frame in frames))


def _batches(store: ChunkStore, chunks: Sequence[ChunkId], hint: str) -> Iterator[list[Frame]]:
    """Frames in requests of about 8 MiB."""
    batch: list[Frame] = []
    size_bytes = 0
    for frame in store.frames(chunks):
        if frame.header.codec is Codec.MISSING:
            raise ChunkMissingError(frame.id, hint=hint)
        batch.append(frame)
        size_bytes += frame.stored_bytes
        if size_bytes >= _UPLOAD_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
