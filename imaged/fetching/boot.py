"""The start of an image on a client: what its server answers first, and the chunks of its profile on their way.

A profile may be stale, or come from a server that lies: what is asked for because of it is what the image's own leaves
name. Nobody waits here, so nothing that goes wrong is an error: whoever reads a chunk that did not come asks for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from imaged.blockimage import open_blob
from imaged.errors import ChunkCorruptError, InvalidNameError, PvisorError, SignatureError, UpstreamError
from imaged.fetching.bootstream import BootStream
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.remote import RemoteImage
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.profile import AHEAD_BYTES, Profile
from imaged.reach import belonging
from imaged.record import ImageRecord
from imaged.signature import Trust

log = logging.getLogger(__name__)
_SHORT_ID = 8
"""Digits that the start of an image id has at least, as in `imaged.catalog`."""


class Ahead:
    """The chunks that an image's profile names, to be brought in the background once the image itself is ready.

    Made by who opens an image, planned by `boot` or `follow`, and started by who made it, in any case: it may hold a
    connection. With `together` all of them come behind the boot answer, for a host that has no chunk of any image; else
    in one batch of those that are not here. Not to be shared between threads.
    """

    def __init__(self) -> None:
        self.together = False
        self._planned: tuple[Fetcher, Callable[[], None]] | None = None

    def plan(self, fetcher: Fetcher, work: Callable[[], None]) -> None:
        self._planned = fetcher, work

    def start(self) -> None:
        """Returns at once."""
        if self._planned is not None:
            fetcher, work = self._planned
            self._planned = None
            try:
                fetcher.behind(partial(_run, work))
            except RuntimeError as error:
                log.info("no profile is followed: %s", error)


class Booted(NamedTuple):
    """The image as the server has it, the profile of it that came with it, and the server that has all of it."""

    image: RemoteImage
    profile: Profile | None
    origin: str


def boot(
    fetcher: Fetcher,
    upstream: HttpUpstream,
    name: str,
    tally: Tally,
    ahead: Ahead | None,
    trust: Trust,
    *,
    last: str = "",
) -> Booted:
    """The image as the server has it; its small chunks are then in the fetcher, and what its profile names is planned.

    `last` is the server that is believed to have all of an image which this one has in part.
    NotFoundError; UpstreamError, also for a bad record; SignatureError before anything of the image is taken.
    """
    known = _known(fetcher, name)
    here = known.name if known is not None else ""
    if known is not None and not trust.accepts(known.name, known.id, known.signatures):
        known = None  # it may have been signed since
    together = ahead is not None and ahead.together
    tally.count(requests=1)
    with contextlib.ExitStack() as answer:
        stream = answer.enter_context(upstream.boot(name, known=known, ahead=together))
        if stream is None:
            assert known is not None  # `HttpUpstream.boot` says so
            origin = last or upstream.url
            _remember(fetcher, known, origin)
            if ahead is not None:
                follow(fetcher, known.id, known.record.data, tally, ahead)
            return Booted(known, None, origin)
        image = _named(stream.found, name, upstream.url)
        if trust:
            _require_whole_name(image, name, here, upstream.url)
            trust.check(image.name, image.id, image.signatures)
        origin = last if last and not image.complete else upstream.url
        _remember(fetcher, image, origin)
        fetcher.admit(stream.record_frame, tally)
        unbroken = admit_all(fetcher, stream.first, upstream.url, f"image {name}", tally)
        data = image.record.data
        profile = stream.profile or fetcher.store.profiles.get(data)
        if profile is not None and ahead is not None:
            if together and unbroken and stream.profile is not None:
                kept = answer.pop_all()
                ahead.plan(fetcher, lambda: _receive(fetcher, data, profile, tally, stream, kept, upstream.url))
            else:
                ahead.plan(fetcher, lambda: _bring(fetcher, data, profile, tally))
        return Booted(image, stream.profile, origin)


def follow(fetcher: Fetcher, image: ChunkId, data: ChunkId, tally: Tally, ahead: Ahead) -> None:
    """Plan to bring what the profile of an image names and this host does not have.

    Of a profile that is not here either, the image's server is asked.
    """
    ahead.plan(fetcher, lambda: _follow(fetcher, image, data, tally))


def recall(fetcher: Fetcher, data: ChunkId, ahead: Ahead) -> None:
    """Plan to have in memory what the profile of an image names, which is all on this host. Asks no server."""
    ahead.plan(fetcher, lambda: _recall(fetcher, data))


def _recall(fetcher: Fetcher, data: ChunkId) -> None:
    profile = fetcher.store.profiles.get(data)
    if profile is not None:
        _load(fetcher, data, profile)


def _load(fetcher: Fetcher, data: ChunkId, profile: Profile) -> None:
    """Have in memory what the profile names of this image, with its leaves."""
    found = belonging(fetcher.store, data, profile.chunks)
    fetcher.load([*found.leaves, *found.chunks])


def _follow(fetcher: Fetcher, image: ChunkId, data: ChunkId, tally: Tally) -> None:
    profiles = fetcher.store.profiles
    profile = profiles.get(data)
    if profile is None:
        origin = fetcher.origin(data)
        if origin is None:
            return
        tally.count(requests=1)
        profile = fetcher.upstream(origin).profile(image)
        if profile is None:
            return
        profiles.offer(data, profile)
    if fetcher.store.missing(profile.chunks):
        _bring(fetcher, data, profile, tally)
    else:
        _load(fetcher, data, profile)


def _bring(fetcher: Fetcher, data: ChunkId, profile: Profile, tally: Tally) -> None:
    """Ask for what is not here, in one batch, and meanwhile have in memory what is."""
    chunks = belonging(fetcher.reader(data, tally), data, profile.chunks).chunks
    fetcher.prefetch(chunks, tally, origin=fetcher.origin(data))
    fetcher.load(chunks)


def _receive(
    fetcher: Fetcher,
    data: ChunkId,
    profile: Profile,
    tally: Tally,
    stream: BootStream[RemoteImage],
    answer: contextlib.ExitStack,
    url: str,
) -> None:
    """Take what follows in the boot answer of the server at `url`; what it does not bring is asked for."""
    with answer:
        chunks = belonging(fetcher.reader(data, tally), data, profile.chunks).chunks
        expected = frozenset(chunks)
        room = AHEAD_BYTES
        with fetcher.expect(chunks, tally, origin=fetcher.origin(data)) as incoming:
            try:
                for frame in stream.rest:
                    room -= frame.stored_bytes
                    if room < 0:
                        log.warning("image data %s: the server sends more than its profile may name", data)
                        return
                    if frame.id in expected:
                        incoming.arrived(frame, url)
            except UpstreamError as error:
                log.info("image data %s: the chunks of its profile broke off: %s", data, error.message)
    fetcher.prefetch(chunks, tally, origin=fetcher.origin(data))


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except PvisorError as error:
        log.warning("following a profile: %s", error.message)
    except Exception:
        log.exception("following a profile")


def _remember(fetcher: Fetcher, image: RemoteImage, url: str) -> None:
    for block_image in (image.record.metadata, image.record.data):
        fetcher.remember_origin(block_image, url)


def _known(fetcher: Fetcher, name: str) -> RemoteImage | None:
    """The image this name has in the local store, when its metadata is all here."""
    store = fetcher.store
    try:
        local = name if ChunkId.is_id(name) else ImageName.parse(name).find(key for key, _ in store.refs.items())
        ref = store.refs.get(local)
        if ref is None:
            return None
        record = ImageRecord.parse(store.get(ref.record))
        metadata = open_blob(store, record.metadata)
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
        signatures=ref.signatures,
    )


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


def _require_whole_name(image: RemoteImage, asked: str, here: str, url: str) -> None:
    """SignatureError when only the end of the name was given: a server would choose among the signed images with that
    end. Not so when the name is the one that this host knows by it (`here`), nor of an image asked for by its id."""
    by_id = len(asked) >= _SHORT_ID and str(image.id).startswith(asked)
    if not by_id and image.name not in (here, str(ImageName.parse(asked))):
        raise SignatureError(
            f"chunk server {url}: asked for image {asked}, it answers with {image.name}, and a signature is of a whole "
            "name",
            hint=f"ask for {image.name}, if that is what you mean",
        )


def admit_all(fetcher: Fetcher, frames: Iterator[Frame], url: str, what: str, tally: Tally) -> bool:
    """Take the first part of the boot answer of the server at `url`; whether it did not break off.

    What is corrupt or missing is asked for again by what needs it, and then there are other servers to ask.
    """
    try:
        for frame in frames:
            if frame.header.codec is not Codec.MISSING:
                try:
                    fetcher.admit(frame, tally)
                except ChunkCorruptError as error:
                    log.warning("%s: %s: %s", url, what, error.message)
    except UpstreamError as error:
        log.warning("%s: the first answer broke off, fetching the rest singly: %s", what, error.message)
        return False
    return True
