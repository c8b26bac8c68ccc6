"""The store of a server that is a cache, as one request sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId

if TYPE_CHECKING:
    from imaged.serving.through import Through

_LOOKUP_COUNT = 256
_AS_BELOW = (
    "absent",
    "df",
    "evict_copies",
    "flush",
    "frames_bytes",
    "has",
    "keeping",
    "lease",
    "missing",
    "packed_cached",
    "planner",
    "probe",
    "put",
    "put_all",
    "put_frame",
    "relying",
    "require_writable",
    "sizes",
)


class ThroughStore(ChunkStore):
    """A store as a request sees it that may have what is not here fetched: reading does that, nothing else.

    Made for each request; the store below is the owner's to close.
    """

    def __init__(self, store: ChunkStore, through: Through, via: str) -> None:
        self.__dict__.update(store.__dict__)
        for name in _AS_BELOW:  # which may be of a class of its own
            self.__dict__[name] = getattr(store, name)
        self._below, self._through, self._via = store, through, via

    def close(self) -> None:
        raise NotImplementedError

    def find_image(self, name: str) -> None:
        """As `Through.find_image`."""
        self._through.find_image(name, self._via)

    def find_snapshot(self, name: str) -> None:
        """As `Through.find_snapshot`."""
        self._through.find_snapshot(name, self._via)

    def offer(self, image: ChunkId, touched: Sequence[ChunkId]) -> None:
        """As `Through.offer`."""
        if not self._via:
            self._through.offer(image, touched)

    def get(self, chunk: ChunkId) -> bytes:
        try:
            return self._below.get(chunk)
        except (ChunkMissingError, ChunkCorruptError):
            frame = self._through.bring([chunk], self._via)[chunk]
            if frame.header.codec is Codec.MISSING:
                raise
            return frame.open()

    def frame(self, chunk: ChunkId) -> Frame | None:
        found = next(self.frames([chunk]))
        return found if found.header.size_bytes else None

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        for start in range(0, len(chunks), _LOOKUP_COUNT):
            wanted = chunks[start : start + _LOOKUP_COUNT]
            here = {frame.id: frame for frame in self._below.frames(wanted) if frame.header.codec is not Codec.MISSING}
            absent = [chunk for chunk in dict.fromkeys(wanted) if chunk not in here]
            self._through.tally.count(hits=len(here))
            found = self._through.bring(absent, self._via) if absent else {}
            for chunk in wanted:
                yield here[chunk] if chunk in here else found[chunk]

    def prepare(self, chunks: Sequence[ChunkId]) -> int | None:
        absent = self._below.absent(chunks)
        if not absent:
            return self._below.frames_bytes(chunks)
        self._through.expect(absent, self._via)
        return None
