"""The most recently used chunks."""

from __future__ import annotations

from collections import OrderedDict

from imaged.ids import ChunkId


class ChunkMemory:
    """Chunks to a number of bytes; the one used longest ago goes first. Guarded by its owner's lock."""

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._chunks: OrderedDict[ChunkId, bytes] = OrderedDict()

    def __contains__(self, chunk: ChunkId) -> bool:
        return chunk in self._chunks

    def get(self, chunk: ChunkId) -> bytes | None:
        data = self._chunks.get(chunk)
        if data is not None:
            self._chunks.move_to_end(chunk)
        return data

    def peek(self, chunk: ChunkId) -> bytes | None:
        """As `get`, without being a use."""
        return self._chunks.get(chunk)

    def put(self, chunk: ChunkId, data: bytes) -> None:
        if chunk in self._chunks:
            return
        self._chunks[chunk] = data
        self.size_bytes += len(data)
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= len(self._chunks.popitem(last=False)[1])
