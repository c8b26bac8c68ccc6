"""Pull an image from a chunk server: lazily (what a mount needs, one request) or whole."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from imaged.blockimage import BlockImage
from imaged.errors import ChunkCorruptError, InvalidNameError, PvisorError, UpstreamError
from imaged.fetch import Fetcher, FetchingReader, Tally
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.progress import NoProgress, Progress
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.refs import Ref
from imaged.upstream import HttpUpstream, RemoteImage

log = logging.getLogger(__name__)
_GROUP = 64
_SHORT_ID = 8
"""Digits that the start of an image id has at least, as in `imaged.catalog`."""


class Pulled(NamedTuple):
    """The image's id, its record, and the full name that the pull gives it ("" when it has none)."""

    id: ChunkId
    record: ImageRecord
    name: str


def pull_image(
    fetcher: Fetcher,
    upstream: HttpUpstream,
    name: str,
    *,
    lazy: bool,
    progress: Progress | None = None,
    tally: Tally | None = None,
) -> Pulled:
    """Resolve `name` (or an image id) at the server and fetch it into the fetcher's store.

    Lazily: record, roots, metadata and the first leaves, all in one answer; the data comes when it is read. Returns
    when these bytes are here; they become durable and the name is set in the background, `fetcher.drain()` waits for
    that. Otherwise every chunk is in the store, and the name set, on return. NotFoundError, UpstreamError, StoreError,
    ChunkMissingError when the server lacks a part of its own image.
    """
    tally = tally or Tally()
    progress = progress or NoProgress()
    image = _boot(fetcher, upstream, name, tally)
    for block_image in (image.record.metadata, image.record.data):
        fetcher.remember_origin(block_image, upstream.url)
    reader = fetcher.reader(image.record.metadata, tally)
    _complete_metadata(reader, image.record)
    if lazy:
        fetcher.keeper.after(lambda: _publish(fetcher, image, upstream.url))
    else:
        fetcher.drain()
        _fetch_whole(fetcher, upstream, image, reader, progress)
        _publish(fetcher, image, "", upstream.url)
    return Pulled(image.id, image.record, image.name)


def _boot(fetcher: Fetcher, upstream: HttpUpstream, name: str, tally: Tally) -> RemoteImage:
    """The image as the server has it; its small chunks are then in the fetcher."""
    known = _known(fetcher, name)
    tally.count(requests=1)
    with upstream.boot(name, known=known.id if known is not None else None) as stream:
        if stream is None:
            assert known is not None
            return known
        image = _named(stream.image, name, upstream.url)
        fetcher.admit(stream.record_frame, tally)
        try:
            for frame in stream.frames:
                if frame.header.codec is not Codec.MISSING:
                    _admit_if_sound(fetcher, frame, tally)
        except UpstreamError as error:
            log.warning("image %s: the first answer broke off, fetching the rest singly: %s", name, error.message)
        return image


def _named(image: RemoteImage, asked: str, url: str) -> RemoteImage:
    """The image under the name that its pull sets: the one asked for, or a longer one that ends in it.

    A server must not choose which name of this host its image takes. UpstreamError when it tries, or when it gives
    another image than the id asked for.
    """
    try:
        full = str(ImageName.parse(image.name)) if image.name else ""
    except InvalidNameError as error:
        raise UpstreamError(f"chunk server {url}: image {asked}: {error.message}") from error
    wanted = str(ImageName.parse(asked))
    by_id = len(asked) >= _SHORT_ID and str(image.id).startswith(asked)
    by_name = not ChunkId.is_id(asked) and (full == wanted or full.endswith("/" + wanted))
    if not by_id and not by_name:
        raise UpstreamError(
            f"chunk server {url}: asked for image {asked}, it answers with {full or 'an unnamed image'}, id {image.id}",
            hint="ask for the full name, or check who runs the server",
        )
    return replace(image, name=full)


def _admit_if_sound(fetcher: Fetcher, frame: Frame, tally: Tally) -> None:
    """A corrupt frame is dropped here: what needs the chunk asks again, and then there are other servers to ask."""
    try:
        fetcher.admit(frame, tally)
    except ChunkCorruptError as error:
        log.warning("%s", error.message)


def _known(fetcher: Fetcher, name: str) -> RemoteImage | None:
    """The image this name has in the local store, when its metadata is all here."""
    store = fetcher.store
    try:
        local = name if ChunkId.is_id(name) else ImageName.parse(name).find(key for key, _ in store.refs.items())
        ref = store.refs.get(local)
        if ref is None:
            return None
        record = ImageRecord.parse(store.get(ref.record))
        metadata = BlockImage.open(store, record.metadata)
        if store.missing([record.data, *metadata.chunk_ids()]):
            return None
    except PvisorError:
        return None
    return RemoteImage(
        name=local,
        id=ref.record,
        record=record,
        source=ref.source,
        chunks=ref.chunks,
        stored_bytes=ref.stored_bytes,
        created_at=ref.created_at,
    )


def _complete_metadata(reader: FetchingReader, record: ImageRecord) -> None:
    """Fetch what the boot stream did not bring: nothing, as a rule."""
    metadata = BlockImage.open(reader, record.metadata)
    chunks = [record.data, *metadata.chunk_ids()]
    for start in range(0, len(chunks), _GROUP):
        reader.get_many(chunks[start : start + _GROUP])


def _fetch_whole(
    fetcher: Fetcher, upstream: HttpUpstream, image: RemoteImage, reader: FetchingReader, progress: Progress
) -> None:
    """Every chunk of the image that is not in the store, in batches; what this server can not give comes through the
    fetcher. StoreError when the store does not take one."""
    BlockImage.open(reader, image.record.data).preload()
    chunks = list(reachable(reader, image.id))
    fetcher.drain()
    missing = fetcher.store.missing(chunks)
    total_bytes = image.stored_bytes * len(missing) // len(chunks) if image.stored_bytes else None
    progress.start(f"fetching {len(missing)} of {len(chunks)} chunks", total_bytes)
    failed: list[ChunkId] = []
    position = 0
    try:
        for frame in upstream.frames(missing):
            position += 1
            reader.tally.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
            progress.advance(frame.stored_bytes)
            if not _stored(fetcher, frame):
                failed.append(frame.id)
    except UpstreamError:
        if all(server.url == upstream.url for server in fetcher.upstreams):
            raise
        failed += missing[position:]
    for start in range(0, len(failed), _GROUP):
        for data in reader.get_many(failed[start : start + _GROUP]).values():
            fetcher.store.put(data)


def _stored(fetcher: Fetcher, frame: Frame) -> bool:
    if frame.header.codec is Codec.MISSING:
        return False
    try:
        fetcher.store.put_frame(frame)
    except ChunkCorruptError as error:
        log.warning("%s", error.message)
        return False
    return True


def _publish(fetcher: Fetcher, image: RemoteImage, origin: str, pulled_from: str = "") -> None:
    """Durable first, named after: a name never points at chunks that a crash can lose.

    `origin` goes into the ref: "" when every chunk is here. A lazy pull leaves a complete image complete.
    """
    store = fetcher.store
    for block_image in (image.record.metadata, image.record.data):
        store.origins.set(block_image, origin or pulled_from)
    store.flush()
    if not image.name:
        return
    ref = Ref(
        record=image.id,
        created_at=image.created_at,
        source=image.source,
        origin=origin,
        chunks=image.chunks,
        stored_bytes=image.stored_bytes,
    )
    held = store.refs.get(image.name)
    if held is None or held.record != image.id or (held.origin and held != ref):
        store.refs.set(image.name, ref)
