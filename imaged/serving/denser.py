"""Compress again, as hard as zstd can, the few chunks that every start of an image fetches.

A conversion compresses fast: the hardest level takes fifty times as long and saves a tenth of the bytes. For what a
startup profile names, some per cent of an image, it costs seconds once, in the background, and each cold start is
shorter by it. The chunk stays the same chunk; only its frame differs (docs/formats/frame.md).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterable
from contextlib import closing
from types import TracebackType
from typing import NamedTuple, Self

from imaged.chunkstore.appender import Appender
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkError, FormatError, PvisorError
from imaged.frame import Frame
from imaged.ids import ChunkId

LEVEL = 19
"""Of the 1.76 MB that a shell in Debian touches it makes 753 KB in 0.30 s; level 3 makes 845, 15 768 in 0.11 s."""
_WORTH = 64
"""A frame that is not at least one part in so many shorter stays as it is: its old bytes lie dead until a gc."""
_COMMIT_BYTES = 8 << 20
_QUEUED_LIMIT = 1 << 16
_REMEMBERED = 1 << 16
_NICE = 19
log = logging.getLogger(__name__)


class Densified(NamedTuple):
    """How many chunks have shorter frames, and by how many bytes altogether."""

    chunks: int
    saved_bytes: int


def densify(store: ChunkStore, chunks: Iterable[ChunkId]) -> Densified:
    """Give each of these different chunks that is here the shortest frame. Durable on return; StoreError.

    A kill leaves each chunk with one frame or the other: a new frame is on the disk before the index names it. Readers
    that hold the old place read on there; an answer whose length was announced before breaks off once, and its client
    asks again. Chunks that are damaged or gone are passed over.
    """
    count = saved_bytes = waiting_bytes = 0
    with closing(Appender(store.root, store.index)) as appender:
        for chunk in chunks:
            shorter = _shorter(store, chunk)
            if shorter is None:
                continue
            frame, less_bytes = shorter
            appender.append([frame])
            count += 1
            saved_bytes += less_bytes
            waiting_bytes += frame.stored_bytes
            if waiting_bytes >= _COMMIT_BYTES:
                appender.commit(move=True)
                waiting_bytes = 0
        appender.commit(move=True)
    if count:
        store.flush()  # into the bucket, where there is one: only what is there counts for others
    return Densified(count, saved_bytes)


def _shorter(store: ChunkStore, chunk: ChunkId) -> tuple[Frame, int] | None:
    """A frame that is worth having instead of the committed one, and the bytes it saves."""
    location = store.index.find(chunk)
    if location is None or store.owned.is_held(chunk):  # a frame that changes would tell a namespace of others
        return None
    try:
        data = store.get(chunk)
    except (ChunkError, FormatError) as error:
        log.warning("%s", error)
        return None
    frame = Frame.of(data, chunk=chunk, level=LEVEL)
    less_bytes = location.stored_bytes - frame.stored_bytes
    return (frame, less_bytes) if less_bytes * _WORTH >= location.stored_bytes else None


class Denser:
    """Densifies chunks of one store in one thread of the lowest priority. Threads may share it. A context manager."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[list[ChunkId] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tried: dict[ChunkId, None] = {}
        self._queued = 0
        self._closing = False
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def add(self, chunks: Iterable[ChunkId]) -> None:
        """Do it later; returns at once. What was tried lately is left out, and everything while much is queued. What
        failed counts as not tried."""
        with self._lock:
            fresh = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._tried]
            if not fresh or self._closing or self._queued + len(fresh) > _QUEUED_LIMIT:
                return
            self._tried.update(dict.fromkeys(fresh))
            for chunk in list(self._tried)[: max(0, len(self._tried) - _REMEMBERED)]:
                del self._tried[chunk]
            self._queued += len(fresh)
            self._idle.clear()
            self._queue.put(fresh)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="densify", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is queued; whether that came true."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Finish the chunk at work, drop the others, end the thread."""
        with self._lock:
            self._closing = True
            thread = self._thread
            self._queue.put(None)
        if thread is not None:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (chunks := self._queue.get()) is not None:
            try:
                done = densify(self._store, (chunk for chunk in chunks if not self._closing))
                log.info("%d chunks compressed again: %d bytes less", done.chunks, done.saved_bytes)
            except Exception as error:
                if isinstance(error, PvisorError):
                    log.warning("compressing %d chunks again: %s", len(chunks), error.message)
                else:
                    log.exception("compressing %d chunks again", len(chunks))
                with self._lock:
                    for chunk in chunks:
                        self._tried.pop(chunk, None)
            with self._lock:
                self._queued -= len(chunks)
                if self._queued == 0:
                    self._idle.set()
