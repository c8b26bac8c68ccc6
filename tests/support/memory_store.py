"""A ChunkReadWriter in a dict, for tests of what stands above the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imaged.errors import ChunkMissingError
from imaged.frame import ZSTD_LEVEL, Frame
from imaged.ids import ChunkId


class MemoryStore:
    def __init__(self) -> None:
        self.chunks: dict[ChunkId, bytes] = {}
        self.flushes = 0

    def get(self, chunk: ChunkId) -> bytes:
        try:
            return self.chunks[chunk]
        except KeyError:
            raise ChunkMissingError(chunk) from None

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        for chunk in chunks:
            data = self.chunks.get(chunk)
            yield Frame.missing(chunk) if data is None else Frame.of(data, chunk=chunk)

    def put(self, data: bytes, *, level: int = ZSTD_LEVEL) -> ChunkId:
        chunk = ChunkId.of(data)
        self.chunks[chunk] = bytes(data)
        return chunk

    def put_all(self, pieces: Sequence[bytes]) -> list[ChunkId]:
        return [self.put(data) for data in pieces]

    def flush(self) -> None:
        self.flushes += 1
