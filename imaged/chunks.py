"""The two small interfaces everything meets in: something that gives chunks, something that takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from imaged.frame import ZSTD_LEVEL, Frame
from imaged.ids import ChunkId


class ChunkReader(Protocol):
    """Gives chunks by id. Implementations say in their docstring whether threads may share them."""

    def get(self, chunk: ChunkId) -> bytes:
        """The verified, uncompressed bytes. ChunkMissingError, ChunkCorruptError, UpstreamError."""
        ...

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        """A frame for each id, in the order asked, unverified (`Frame.open` verifies).

        An id that is not there gives `Frame.missing(id)`; the stream goes on.
        """
        ...


class ChunkWriter(Protocol):
    """Takes chunks. What was put is readable at once and durable after `flush`."""

    def put(self, data: bytes, *, level: int = ZSTD_LEVEL) -> ChunkId:
        """Store these bytes (1 to CHUNK_LIMIT_BYTES of them) and return their id. StoreFullError.

        `level` is how hard to compress what is not here yet; the id does not depend on it.
        """
        ...

    def flush(self) -> None:
        """Return when everything put before is durable."""
        ...


class ChunkReadWriter(ChunkReader, ChunkWriter, Protocol):
    """Both: what conversion needs."""


class ChunkBatchWriter(ChunkReadWriter, Protocol):
    """One that takes many chunks at once as well: for who has small ones, of which most are new."""

    def put_all(self, pieces: Sequence[bytes]) -> list[ChunkId]:
        """As `put` of each."""
        ...
