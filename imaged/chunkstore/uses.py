"""When each chunk of a cache was last used, and whether a server gave it: the table `uses` of the index.

What is used is noted in memory and written in batches, so that a read costs a look into a dict. A kill loses what was
noted since the last batch: some chunks then seem older than they are. Uses that nobody sees are not counted: what the
kernel has in its page cache it reads without asking.

    key    chunk id
    value  >QB: time of the last use, microseconds since 1970; 1 when a server gave the chunk, else 0

Nothing is noted before `record` is called: a store without a bound has no use for it.
"""

from __future__ import annotations

import heapq
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from imaged.chunkstore.index import Index
from imaged.ids import ChunkId

_ROW = struct.Struct(">QB")
_TABLE = "uses"
_BATCH = 4096
FULL = 1 << 16
"""So many chunks in memory are worth a batch."""
_MOST = 1 << 18
"""More are not remembered, when the table can not be written."""


class Uses:
    """Threads may share it. `clock` gives nanoseconds since 1970; times go up in one process whatever it does."""

    def __init__(
        self, index: Index, check_writable: Callable[[], None], clock: Callable[[], int] = time.time_ns
    ) -> None:
        self.recording = False
        self._index, self._check_writable, self._clock = index, check_writable, clock
        self._lock, self._flush_lock = threading.Lock(), threading.Lock()
        self._last = 0
        self._seen: dict[ChunkId, int] = {}
        self._given: set[ChunkId] = set()

    def record(self) -> None:
        """Note uses from now on."""
        self.recording = True

    def touch(self, chunks: Iterable[ChunkId]) -> None:
        """These are used now, the last one last."""
        if self.recording:
            with self._lock:
                self._note(chunks)

    def fetched(self, chunks: Iterable[ChunkId]) -> None:
        """As `touch`, for chunks that a server gave, and can give again."""
        if self.recording:
            chunks = list(chunks)
            with self._lock:
                self._note(chunks)
                self._given.update(chunks)

    def _note(self, chunks: Iterable[ChunkId]) -> None:
        now = max(self._last, self._clock() // 1000)
        for chunk in chunks:
            now += 1
            self._seen[chunk] = now
        self._last = now

    @property
    def is_full(self) -> bool:
        return len(self._seen) >= FULL

    def flush(self) -> None:
        """Write what was noted. StoreError; it is kept then, as far as there is room."""
        with self._flush_lock:
            with self._lock:
                seen, given = self._seen, self._given
                self._seen, self._given = {}, set()
            try:
                if seen:
                    self._check_writable()
                self._write(seen, given)
            except BaseException:
                with self._lock:
                    self._seen = {**seen, **self._seen}
                    self._given |= given
                    for chunk in list(self._seen)[: max(0, len(self._seen) - _MOST)]:
                        del self._seen[chunk]
                        self._given.discard(chunk)
                raise

    def _write(self, seen: dict[ChunkId, int], given: set[ChunkId]) -> None:
        chunks = sorted(seen)
        for start in range(0, len(chunks), _BATCH):
            with self._index.write("note uses") as txn:
                for chunk in chunks[start : start + _BATCH]:
                    if chunk not in given and self._index.get("chunks", chunk, txn=txn) is None:
                        continue  # it has gone since
                    held = self._index.get(_TABLE, chunk, txn=txn)
                    at, was_given = _ROW.unpack(held) if held is not None else (0, 0)
                    row = _ROW.pack(max(at, seen[chunk]), was_given or chunk in given)
                    if row != held:
                        self._index.put(txn, _TABLE, chunk, row)

    def adopt(self, chunks: Iterable[ChunkId]) -> None:
        """A server can give these, which may have come before uses were noted: not used, as far as is known.

        StoreError.
        """
        chunks = sorted(chunks)
        for start in range(0, len(chunks), _BATCH):
            with self._index.write("note uses") as txn:
                for chunk in chunks[start : start + _BATCH]:
                    held = self._index.get(_TABLE, chunk, txn=txn)
                    at, was_given = _ROW.unpack(held) if held is not None else (0, 0)
                    if not was_given:
                        self._index.put(txn, _TABLE, chunk, _ROW.pack(at, 1))

    def oldest(self, count: int) -> list[ChunkId]:
        """So many of the chunks that a server gave, those whose last use is longest ago first. What was not flushed is
        not among them."""
        rows = (value[:8] + key for key, value in self._index.rows(_TABLE) if value[8])
        return [ChunkId(found[8:]) for found in heapq.nsmallest(count, rows)]

    def forget(self, chunks: Sequence[ChunkId]) -> None:
        """These are gone. StoreError."""
        for start in range(0, len(chunks), _BATCH):
            with self._index.write("forget uses") as txn:
                for chunk in chunks[start : start + _BATCH]:
                    self._index.delete(txn, _TABLE, chunk)
