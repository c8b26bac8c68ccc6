"""Opening an image, on the daemon's side: find it or pull it, and put its metadata where a mount can use it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from fuse.files import BlockFiles
from fuse.metadata import MetadataFiles
from fuse.node import OpenImage
from imaged import catalog
from imaged.blockimage import read_blob
from imaged.config import Config
from imaged.errors import ChunkCorruptError, ChunkMissingError, FormatError, NotFoundError
from imaged.fetch import Fetcher, Tally
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.pull import pull_image
from imaged.record import ImageRecord

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """An image that is known."""

    id: ChunkId
    name: str
    record: ImageRecord


class Opener:
    """Threads may share it; requests for one name take turns, so that it is pulled once."""

    def __init__(self, config: Config, fetcher: Fetcher, files: BlockFiles) -> None:
        self._config = config
        self._fetcher = fetcher
        self._files = files
        self._lock = threading.Lock()
        self._pulled: dict[str, _Found] = {}
        self._turns: dict[str, tuple[threading.Lock, int]] = {}
        self._metadata = MetadataFiles(config.metadata)

    def close(self) -> None:
        """Nothing is opened any more."""
        self._metadata.close()

    def open(self, name: str, *, server: str | None) -> OpenImage:
        """By name, unique end of a name, or image id; what is not here comes from `server` or the daemon's own.

        NotFoundError, UpstreamError, StoreError, ChunkError, FormatError.
        """
        with self._turn(name):
            tally = Tally()
            found = self._find(name) or self._pull(name, server or self._config.server, tally)
            use = self._files.use(found.id, found.name)
            use.tally.count(**tally.to_dict())
            reader = self._fetcher.reader(found.record.metadata, use.tally)
            path = self._metadata.file(str(found.record.metadata), lambda: read_blob(reader, found.record.metadata))
            self._files.assign(found.record.data, use.tally)
        return OpenImage(
            id=str(found.id),
            name=found.name,
            config=found.record.config,
            platform=found.record.platform,
            metadata_path=path,
            data_id=str(found.record.data),
            data_path=self._config.blocks / str(found.record.data),
        )

    def _find(self, name: str) -> _Found | None:
        """In the local store; None when it is not there, or its record is lost."""
        try:
            entry = catalog.find(self._fetcher.store, name)
        except (NotFoundError, ChunkMissingError, ChunkCorruptError) as error:
            log.info("%s", error.message)
            return self._pulled.get(name) or (self._find_record(name) if ChunkId.is_id(name) else None)
        return _Found(entry.ref.record, entry.name, entry.record)

    def _find_record(self, text: str) -> _Found | None:
        """An image that lost its name, or never had one, can still be opened by its id."""
        image = ChunkId.parse(text)
        try:
            record = ImageRecord.parse(self._fetcher.store.get(image))
        except (ChunkMissingError, ChunkCorruptError, FormatError):
            return None
        return _Found(image, text, record)

    def _pull(self, name: str, url: str | None, tally: Tally) -> _Found:
        if not url:
            return self._find_or_explain(name)
        pulled = pull_image(self._fetcher, self._fetcher.upstream(url), name, lazy=True, tally=tally)
        full_name = name if ChunkId.is_id(name) else str(ImageName.parse(name))
        found = _Found(pulled.id, full_name, pulled.record)
        # A lazy pull sets the name in the background; until then the name is known here only.
        self._pulled[name] = found
        self._fetcher.keeper.after(lambda: self._published(name))
        return found

    def _find_or_explain(self, name: str) -> _Found:
        """Without a server: the store's own reason why the name means nothing here, or several things."""
        try:
            entry = catalog.find(self._fetcher.store, name)
        except NotFoundError as error:
            more = "set --server or PVISOR_SERVER to get it from a server"
            raise NotFoundError(error.message, hint=f"{error.hint}; {more}" if error.hint else more) from error
        return _Found(entry.ref.record, entry.name, entry.record)

    def _published(self, name: str) -> None:
        self._pulled.pop(name, None)

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        with self._lock:
            turn, waiting = self._turns.get(name, (threading.Lock(), 0))
            self._turns[name] = (turn, waiting + 1)
        try:
            with turn:
                yield
        finally:
            with self._lock:
                turn, waiting = self._turns.pop(name)
                if waiting > 1:
                    self._turns[name] = (turn, waiting - 1)
