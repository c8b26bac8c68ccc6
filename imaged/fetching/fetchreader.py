"""What a block image is read through when its chunks may have to be fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from imaged.blockimage import BlockImage
from imaged.errors import ChunkMissingError
from imaged.fetching.keeper import VerifiedFrame
from imaged.fetching.neighbourhood import Neighbourhood
from imaged.fetching.tally import Tally
from imaged.frame import Codec, Frame, FrameHeader
from imaged.ids import ChunkId

if TYPE_CHECKING:
    from imaged.fetching.fetch import Fetcher

_GROUP = 256
"""Chunks resolved at a time when a caller streams many: at 64 KiB, 16 MiB in memory."""


class FetchingReader:
    """A `ChunkReader` over a fetcher: what a block image is read through. Threads may share it."""

    def __init__(self, fetcher: Fetcher, tally: Tally, *, origin: str | None = None) -> None:
        self.tally = tally
        self._fetcher = fetcher
        self._origin = origin
        self._near: Neighbourhood | None = None

    def guess_in(self, image: BlockImage) -> None:
        """From now on, take along what lies near a missed chunk in this image, where that is worth it."""
        self._near = Neighbourhood(image, self._fetcher.peek)

    def get(self, chunk: ChunkId) -> bytes:
        return self._fetcher.get(chunk, self.tally, origin=self._origin, near=self._near)

    def get_many(self, chunks: Iterable[ChunkId]) -> dict[ChunkId, bytes]:
        """All of them, in as few requests as possible."""
        return self._fetcher.get_many(chunks, self.tally, origin=self._origin, near=self._near)

    def bring(self, chunks: Sequence[ChunkId], wait_s: float) -> None:
        """Have these in memory soon, on a connection of their own; return when they are or the time is over."""
        prefetch = self._fetcher.prefetch(chunks, self.tally, origin=self._origin)
        absent = set(prefetch.wanted)
        self._fetcher.resolve([chunk for chunk in chunks if chunk not in absent], self.tally, origin=self._origin)
        prefetch.wait(wait_s)

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        """In order; a chunk that nobody has is `Frame.missing`, other failures are raised."""
        for start in range(0, len(chunks), _GROUP):
            group = chunks[start : start + _GROUP]
            results = self._fetcher.resolve(group, self.tally, origin=self._origin)
            for chunk in group:
                result = results[chunk]
                if isinstance(result, ChunkMissingError):
                    yield Frame.missing(chunk)
                elif isinstance(result, Exception):
                    raise result
                else:
                    yield VerifiedFrame(FrameHeader(chunk, Codec.RAW, len(result), len(result)), result, result)
