"""Which of the chunks of an index are reachable, in nine bytes a chunk."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

from imaged.chunkstore.index import Index
from imaged.ids import ChunkId

_PREFIX_BYTES = 8
_AT_ONCE = 4096


class Marks:
    """The chunks that are in an index now, and of each whether it was marked. For one thread.

    Only the first eight bytes of an id are kept, in the order of the index. Two chunks that share them share their
    mark, so that at the worst a chunk is taken for marked, and stays. A chunk that comes later is never marked.
    """

    def __init__(self, index: Index) -> None:
        self._prefixes = array("Q")
        keys = index.keys("chunks")
        while some := b"".join(key[:_PREFIX_BYTES] for key in islice(keys, _AT_ONCE)):
            self._prefixes.frombytes(some)
        if sys.byteorder == "little":
            self._prefixes.byteswap()
        self._marked = bytearray(len(self._prefixes))

    def __len__(self) -> int:
        return len(self._prefixes)

    def __contains__(self, chunk: ChunkId) -> bool:
        at = self._at(chunk)
        return at >= 0 and self._marked[at] != 0

    def add(self, chunk: ChunkId) -> None:
        at = self._at(chunk)
        if at >= 0:
            self._marked[at] = 1

    def update(self, chunks: Iterable[ChunkId]) -> None:
        for chunk in chunks:
            self.add(chunk)

    def unmarked(self, index: Index, start: bytes, limit: int) -> tuple[list[ChunkId], bytes | None]:
        """At most `limit` chunks that are not marked, in order of their ids from `start` on, and where to go on: None
        at the end."""
        found: list[ChunkId] = []
        prefixes, marked, count = self._prefixes, self._marked, len(self._prefixes)
        at = bisect_left(prefixes, int.from_bytes(start[:_PREFIX_BYTES].ljust(_PREFIX_BYTES, b"\0"), "big"))
        for key in index.keys("chunks", start):
            prefix = int.from_bytes(key[:_PREFIX_BYTES], "big")
            while at < count and prefixes[at] < prefix:  # both are in order
                at += 1
            if at < count and prefixes[at] == prefix and not marked[at]:
                if len(found) == limit:
                    return found, key
                found.append(ChunkId(key))
        return found, None

    def _at(self, chunk: bytes) -> int:
        """Where its mark is, -1 for a chunk that is none of these."""
        prefix = int.from_bytes(chunk[:_PREFIX_BYTES], "big")
        at = bisect_left(self._prefixes, prefix)
        return at if at < len(self._prefixes) and self._prefixes[at] == prefix else -1
