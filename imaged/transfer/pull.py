"""Pull an image from a chunk server: lazily (what a mount needs, one request) or completely."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from imaged.blockimage import BlockImage, open_blob
from imaged.chunkstore.refs import Ref
from imaged.errors import ChunkCorruptError, StoreError, UpstreamError
from imaged.fetching.boot import Ahead, boot
from imaged.fetching.fetch import Fetcher, FetchingReader, Tally
from imaged.fetching.remote import RemoteImage
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.profile import Profile
from imaged.progress import NoProgress, Progress
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.signature import Signature, Trust

log = logging.getLogger(__name__)
_GROUP = 64


@dataclass(frozen=True, slots=True)
class Pulled:
    """The image's id, its record, and the full name that the pull gives it ("" when it has none), with what signs it
    under that. `published`, for `Fetcher.drain`, says of a lazy pull whether it has the name."""

    id: ChunkId
    record: ImageRecord
    name: str
    signatures: tuple[Signature, ...]
    published: Future[None] | None = field(default=None, compare=False)


def pull_image(
    fetcher: Fetcher,
    upstream: HttpUpstream,
    name: str,
    *,
    lazy: bool,
    progress: Progress | None = None,
    tally: Tally | None = None,
    ahead: Ahead | None = None,
    trust: Trust | None = None,
    last: str = "",
) -> Pulled:
    """Resolve `name` (or an image id) at the server and fetch it into the fetcher's store.

    Lazily: record, roots, metadata and leaves, all in one answer; the data comes when it is read, that of the image's
    profile when `ahead` is started. Returns when these bytes are here; they become durable and the name is set in the
    background, `fetcher.drain(pulled.published)` waits for that. Otherwise every chunk is in the store, and the name
    set, on return.
    With `trust` nothing is fetched, and no name is set, unless one of its keys has signed the image under its name.
    `last` is the server that is believed to have all of what this one has in part, as a peer has.
    NotFoundError, UpstreamError, SignatureError, StoreError, ChunkMissingError when the server lacks a part of its own
    image.
    """
    tally = tally or Tally()
    progress = progress or NoProgress()
    with ExitStack() as leased:
        lease(fetcher, f"pulling {name}", leased, lazy=lazy)
        image, profile, origin = boot(fetcher, upstream, name, tally, ahead, trust or Trust(), last=last)
        reader = fetcher.reader(image.record.metadata, tally)
        _complete_metadata(reader, image.record)
        published = None
        if lazy:
            published = later(fetcher, leased, lambda: _publish(fetcher, image, profile, origin))
        else:
            fetcher.drain()
            BlockImage.open(reader, image.record.data).preload()
            chunks = list(reachable(reader, image.id))
            fetch_all(fetcher, upstream, chunks, image.stored_bytes, reader, progress)
            _publish(fetcher, image, profile, "", origin)
    return Pulled(image.id, image.record, image.name, image.signatures, published)


def lease(fetcher: Fetcher, holder: str, stack: ExitStack, *, lazy: bool) -> None:
    """One of the store, until the stack ends. A lazy pull promises no chunk, and does without when none can be had, as
    on a full disk: then a collection in these moments only costs a second fetch."""
    try:
        stack.enter_context(fetcher.store.lease(holder))
    except StoreError as error:
        if not lazy:
            raise
        log.warning("%s without a lease: %s", holder, error.message)


def later(fetcher: Fetcher, leased: ExitStack, publish: Callable[[], None]) -> Future[None]:
    """Publish when everything fetched so far is in the store; what `leased` holds lasts until then."""
    until = leased.pop_all()

    def run() -> None:
        with until:
            publish()

    try:
        return fetcher.keeper.after(run)
    except BaseException:
        until.close()
        raise


def _complete_metadata(reader: FetchingReader, record: ImageRecord) -> None:
    """Fetch what the boot stream did not bring: nothing, as a rule."""
    metadata = open_blob(reader, record.metadata)
    chunks = [record.data, *metadata.chunk_ids()]
    for start in range(0, len(chunks), _GROUP):
        reader.get_many(chunks[start : start + _GROUP])


def fetch_all(
    fetcher: Fetcher,
    upstream: HttpUpstream,
    chunks: Sequence[ChunkId],
    stored_bytes: int,
    reader: FetchingReader,
    progress: Progress,
) -> None:
    """Have all these chunks in the store, in batches; what this server can not give comes through the reader.

    `stored_bytes` are of all of them, 0 when unknown. StoreError when the store does not take one.
    """
    fetcher.drain()
    missing = fetcher.store.missing(chunks)
    total_bytes = stored_bytes * len(missing) // len(chunks) if stored_bytes else None
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


def _publish(fetcher: Fetcher, image: RemoteImage, profile: Profile | None, origin: str, pulled_from: str = "") -> None:
    """Durable first, named after: a name never points at chunks that a crash can lose.

    `origin` goes into the ref: "" when every chunk is here. A lazy pull leaves a complete image complete.
    """
    store = fetcher.store
    for block_image in (image.record.metadata, image.record.data):
        store.origins.set(block_image, origin or pulled_from)
    if profile is not None:
        store.profiles.offer(image.record.data, profile)
    store.flush()
    if not origin:
        store.refs.complete(image.id)
    if not image.name:
        return
    ref = Ref(
        record=image.id,
        created_at=image.created_at,
        source=image.source,
        origin=origin,
        chunks=image.chunks,
        stored_bytes=image.stored_bytes,
        signatures=image.signatures,
    )
    held = store.refs.get(image.name)
    if held is None or held.record != image.id or (held.origin and held != ref):
        store.refs.set(image.name, ref)
    elif any(signature not in held.signatures for signature in image.signatures):
        store.refs.sign(image.name, image.id, image.signatures)
