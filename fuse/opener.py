"""Opening an image, on the daemon's side: find it or pull it, and put its metadata where a mount can use it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

from fuse import rundir
from fuse.files import BlockFile, BlockFiles
from fuse.keeping import Keeping
from fuse.metadata import MetadataFiles
from fuse.node import OpenImage
from fuse.recorder import Recorder
from imaged import catalog
from imaged.blockimage import open_blob, read_blob
from imaged.config import Config, server_urls
from imaged.errors import ChunkCorruptError, ChunkMissingError, FormatError, NotFoundError, UpstreamError
from imaged.fetching.boot import Ahead, follow, recall
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.tiers import first, tiers
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.record import ImageRecord
from imaged.signature import Signature, Trust
from imaged.transfer.acquire import COMMAND_RETRY
from imaged.transfer.pull import Pulled, pull_image
from imaged.turns import Turns

log = logging.getLogger(__name__)
_ANY = Trust()
"""Nothing has to be signed."""


class _Found(NamedTuple):
    """An image that is known. `lacking` when chunks of it may not be here. `full_name` is the one of which its
    `signatures` are, while the store does not have that yet."""

    id: ChunkId
    name: str
    record: ImageRecord
    lacking: bool
    full_name: str = ""
    signatures: tuple[Signature, ...] = ()
    published: Future[None] | None = None


class _Seen(IntEnum):
    """How far an image has come in this daemon; one that was never opened has no such state."""

    FOLLOWED = 1
    """The chunks of its profile are on their way, or here."""
    MOUNTED = 2
    """And somebody was to mount it."""


class Opener:
    """Threads may share it; requests for one name take turns, so that it is pulled once.

    An image that is opened for the first time in this daemon is about to start: the chunks of its profile come in the
    background, and what its first process touches is recorded, unless it is first opened to be read in another way.
    """

    def __init__(self, config: Config, fetcher: Fetcher, files: BlockFiles, keeping: Keeping | None = None) -> None:
        """`keeping` lets what is opened stay."""
        self._keeping = keeping or Keeping(fetcher, files)
        self._config = config
        self._fetcher = fetcher
        self._files = files
        self._lock = threading.Lock()
        self._pulled: dict[str, _Found] = {}
        self._turns = Turns()
        self._seen: dict[ChunkId, _Seen] = {}
        self._asked = False
        self._metadata = MetadataFiles(config.metadata, spare=rundir.metadata_path(config))
        self.recorder = Recorder(fetcher)

    def close(self) -> None:
        """Nothing is opened any more, and nothing read. What was recorded is kept."""
        self.recorder.close()
        self._metadata.close()

    def open(self, name: str, *, server: str | None, start: bool = False, trust: Trust = _ANY) -> OpenImage:
        """By name, unique end of a name, or image id; what is not here comes from `server` or the daemon's own.

        `start`: what is read next is what a process that starts there touches. A server that does not answer is given
        up soon, as in `pull`; not so when bytes of an image that is known are read.
        NotFoundError, UpstreamError, SignatureError, StoreError, ChunkError, FormatError.
        """
        with self._turns.take(name), _started() as ahead:
            found = self._find(name, trust)
            if found is not None:
                return self._open(found, ahead, start)
            tally = Tally()
            text = server or self._config.server
            found = self._pull(name, text, tally, ahead, trust) if text else self._find_or_explain(name, trust)
            return self._ready(found, tally, start)

    def open_here(self, name: str, *, start: bool = False, trust: Trust = _ANY) -> OpenImage | None:
        """As `open` when that needs no server, else None. Does not wait for those who ask one."""
        found = self._find(name, trust)
        if found is None or not self._is_here(found):
            return None
        with _started() as ahead:
            return self._open(found, ahead, start)

    def open_resting(self, name: str, *, server: str | None) -> OpenImage:
        """As `open`, for a machine that goes on with it: what a start touches is in its memory, and is not fetched."""
        found = self._find(name)
        if found is None:
            return self.open(name, server=server)
        return self._laid_out(found, Tally())[0]

    def open_resting_here(self, name: str) -> OpenImage | None:
        """As `open_resting` when that needs no server, else None."""
        found = self._find(name)
        return self._laid_out(found, Tally())[0] if found is not None and self._is_here(found) else None

    def _open(self, found: _Found, ahead: Ahead, start: bool) -> OpenImage:
        """An image that is known."""
        tally = Tally()
        if found.record.data not in self._seen:
            if found.lacking:
                follow(self._fetcher, found.id, found.record.data, tally, ahead)
            else:
                recall(self._fetcher, found.record.data, ahead)
        return self._ready(found, tally, start)

    def _is_here(self, found: _Found) -> bool:
        """Whether a mount needs nothing more of it."""
        if found.record.data in self._seen or not found.lacking:
            return True
        store = self._fetcher.store
        try:
            metadata = open_blob(store, found.record.metadata)
            return not store.missing([found.record.data, *metadata.chunk_ids()])
        except (ChunkMissingError, ChunkCorruptError, FormatError):
            return False

    def pull(self, name: str, *, server: str, trust: Trust = _ANY) -> dict[str, Any]:
        """Ask the server what the name means now, then as `open`: id and full name, and what that has cost until now.

        On return the name is set. Somebody waits at a terminal: a server that does not answer is given up soon.
        """
        with self._turns.take(name), _started() as ahead:
            tally = Tally()
            found = self._pull(name, server, tally, ahead, trust)
            self._ready(found, tally, None)
        self._fetcher.drain(found.published)
        counts = tally.to_dict()
        costs = {key: counts[key] for key in ("requests", "fetched_chunks", "fetched_bytes")}
        return {"id": str(found.id), "name": found.full_name or str(found.id), **costs}

    def _ready(self, found: _Found, tally: Tally, start: bool | None) -> OpenImage:
        """Everything that a mount needs is in place. `start` is None for one that nobody mounts yet."""
        image, file = self._laid_out(found, tally)
        data = found.record.data
        with self._lock:
            before = self._seen.get(data)
            if before is not _Seen.MOUNTED:
                self._seen[data] = _Seen.FOLLOWED if start is None else _Seen.MOUNTED
        if start is False:
            self.recorder.leave(file)
        elif start and before is not _Seen.MOUNTED:
            self.recorder.watch(found.id, file)
        return image

    def _laid_out(self, found: _Found, tally: Tally) -> tuple[OpenImage, BlockFile]:
        """With the metadata in a file, and the file of the data ready."""
        self._keeping.open(found.id, [found.record.data], name=found.name, lazy=found.lacking)
        use = self._files.use(found.id, found.name, tally)
        reader = self._fetcher.reader(found.record.metadata, use.tally)
        path = self._metadata.file(str(found.record.metadata), lambda: read_blob(reader, found.record.metadata))
        file = self._files.assign(found.record.data, use.tally)
        image = OpenImage(
            id=str(found.id),
            name=found.name,
            config=found.record.config,
            platform=found.record.platform,
            metadata_path=path,
            data_id=str(found.record.data),
            data_path=self._config.blocks / str(found.record.data),
        )
        return image, file

    def _find(self, name: str, trust: Trust = _ANY) -> _Found | None:
        """In the local store; None when it is not there, or its record is lost. SignatureError."""
        try:
            return self._find_entry(name, trust)
        except (NotFoundError, ChunkMissingError, ChunkCorruptError) as error:
            log.info("%s", error.message)
        pulled = self._pulled.get(name)
        if pulled is not None:
            trust.check(pulled.full_name, pulled.id, pulled.signatures)
            return pulled
        # One without a name has no signature here either.
        return self._find_record(name) if ChunkId.is_id(name) and not trust else None

    def _find_entry(self, name: str, trust: Trust) -> _Found:
        store = self._fetcher.store
        entry = catalog.find(store, name)
        catalog.require_signed(store, name, entry, trust)
        return _Found(entry.ref.record, entry.name, entry.record, bool(entry.ref.origin))

    def _find_record(self, text: str) -> _Found | None:
        """An image that lost its name, or never had one, can still be opened by its id."""
        image = ChunkId.parse(text)
        try:
            record = ImageRecord.parse(self._fetcher.store.get(image))
        except (ChunkMissingError, ChunkCorruptError, FormatError):
            return None
        return _Found(image, text, record, self._fetcher.origin(record.data) is not None)

    def _pull(self, name: str, server: str, tally: Tally, ahead: Ahead, trust: Trust) -> _Found:
        """The image under the name it was asked for, from the first of these servers that has it."""
        ahead.together = self._is_first()
        urls = server_urls(server)
        servers = tiers((self._fetcher.upstream(url) for url in urls), COMMAND_RETRY)
        last = urls[-1] if len(urls) > 1 else ""

        link = self._fetcher.routes.link

        def attempt(upstream: HttpUpstream) -> Pulled:
            try:
                pulled = pull_image(
                    self._fetcher, upstream, name, lazy=True, tally=tally, ahead=ahead, trust=trust, last=last
                )
            except UpstreamError:
                link(upstream).failed()
                raise
            link(upstream).has_more()
            return pulled

        # A peer that did not answer lately is not waited for again with each image.
        awake = [one for one in servers[:-1] if not link(one).is_resting]
        pulled = first([*awake, servers[-1]], attempt)
        asked = name if ChunkId.is_id(name) else str(ImageName.parse(name))
        found = _Found(pulled.id, asked, pulled.record, True, pulled.name, pulled.signatures, pulled.published)
        # A lazy pull sets the name in the background; until then the name is known here only.
        self._pulled[name] = found
        self._fetcher.keeper.after(lambda: self._published(name))
        return found

    def _is_first(self) -> bool:
        """Whether nobody else can have brought a chunk: only then is there no need to say which chunks are here."""
        with self._lock:
            first, self._asked = not self._asked, True
        return first and not self._fetcher.store.df().chunks

    def _find_or_explain(self, name: str, trust: Trust) -> _Found:
        """Without a server: the store's own reason why the name means nothing here, or several things."""
        try:
            return self._find_entry(name, trust)
        except NotFoundError as error:
            more = "set --server or PVISOR_SERVER to get it from a server"
            raise NotFoundError(error.message, hint=f"{error.hint}; {more}" if error.hint else more) from error

    def _published(self, name: str) -> None:
        self._pulled.pop(name, None)


@contextmanager
def _started() -> Iterator[Ahead]:
    """What is planned in the block starts at its end."""
    ahead = Ahead()
    try:
        yield ahead
    finally:
        ahead.start()
