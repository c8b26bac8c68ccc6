"""Send an image of the local store to a chunk server: only the chunks that the server lacks."""

from __future__ import annotations

from collections.abc import Iterator

from imaged.catalog import Entry
from imaged.errors import ChunkMissingError
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.progress import Progress
from imaged.reach import reachable
from imaged.store import ChunkStore
from imaged.upstream import HttpUpstream

_UPLOAD_BYTES = 8 << 20


def push_image(store: ChunkStore, upstream: HttpUpstream, entry: Entry, progress: Progress) -> None:
    """Upload and name the image at the server. ChunkMissingError, UpstreamError; a repeated push sends the rest."""
    missing = upstream.missing(list(reachable(store, entry.ref.record)))
    sizes = {chunk: size for chunk in missing if (size := store.sizes(chunk)) is not None}
    progress.start(f"pushing {len(missing)} chunks", sum(stored for _, stored in sizes.values()))
    for frames in _batches(store, missing):
        upstream.upload(frames)
        progress.advance(sum(frame.stored_bytes for frame in frames))
    upstream.publish(entry.name, entry.ref.record)


def _batches(store: ChunkStore, chunks: list[ChunkId]) -> Iterator[list[Frame]]:
    """Frames in requests of about 8 MiB."""
    batch: list[Frame] = []
    size_bytes = 0
    for frame in store.frames(chunks):
        if frame.header.codec is Codec.MISSING:
            raise ChunkMissingError(frame.id, hint="the image is not complete here; `pvisor pull` fetches all of it")
        batch.append(frame)
        size_bytes += frame.stored_bytes
        if size_bytes >= _UPLOAD_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
