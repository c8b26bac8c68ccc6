"""Compress and append on a few threads, commit in the background or on demand; nothing accepted is lost until close."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path

from imaged.chunkstore.appender import Appender
from imaged.chunkstore.index import Index
from imaged.chunkstore.rows import Location
from imaged.errors import StoreError
from imaged.frame import Frame
from imaged.ids import ChunkId

BATCH_BYTES = 256 << 10
"""Handed to a compressing thread at once: a hand-over costs about as much as compressing 20 KiB."""
QUEUED_LIMIT_BYTES = 8 << 20
COMMIT_BYTES = 64 << 20
COMMIT_S = 1.0
log = logging.getLogger(__name__)


class _Batch:
    """Chunks (id, bytes, zstd level) on their way to a pack; `frames` are those compressed but not yet appended, `anew`
    the ids of those that take the place of one that is there."""

    __slots__ = ("anew", "chunks", "frames", "size_bytes")

    def __init__(self) -> None:
        self.chunks: list[tuple[ChunkId, bytes, int]] = []
        self.frames: list[Frame] = []
        self.anew: set[ChunkId] = set()
        self.size_bytes = 0

    def compress(self) -> None:
        if self.chunks:
            self.frames = [Frame.of(data, chunk=chunk, level=level) for chunk, data, level in self.chunks]
            self.chunks = []


class Writer:
    """What a store has accepted and not yet committed. Threads share it; its own threads start with the first `add`.

    A chunk is here as bytes until it is appended, then as a location until it is committed. When the disk is full a
    batch stays here, `add` and `flush` raise StoreFullError, and each of them tries again first: so a caller
    that gave up breaks nothing for one that goes on, and memory stays bounded.

    With `commit_s` None nothing is committed but by `flush`, and `close` drops what was added since: for what is of use
    as a whole or not at all. Where each chunk is stays in memory until then, some 400 bytes a chunk.
    """

    def __init__(
        self, root: Path, index: Index, *, threads: int | None = None, commit_s: float | None = COMMIT_S
    ) -> None:
        self._queued: dict[ChunkId, bytes] = {}
        self._appender = Appender(root, index)
        self._thread_count = threads or min(4, os.cpu_count() or 1)
        self._commit_s = commit_s
        self._threads: list[threading.Thread] = []
        self._state, self._retry_lock = threading.Condition(), threading.Lock()
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._batch = _Batch()
        self._working: set[_Batch] = set()
        self._stuck: list[_Batch] = []
        self._queued_bytes = 0
        self._failure: StoreError | None = None
        self._wake = threading.Event()
        self._closing = False

    def find(self, chunk: ChunkId) -> bytes | Location | None:
        """A chunk that is not committed yet. Ask here before the index: a chunk leaves only after it is there."""
        return self._queued.get(chunk) or self._appender.pending.get(chunk)

    def add(self, chunk: ChunkId, data: bytes, level: int, *, anew: bool = False) -> None:
        """Accept a chunk that is neither pending nor in the index, to be compressed so; waits when much is queued. With
        `anew` it may be both."""
        if self._failure is not None:
            self._try_again()
        with self._state:
            while self._queued_bytes >= QUEUED_LIMIT_BYTES:
                self._state.wait(COMMIT_S)
                if self._failure is not None:
                    raise _again(self._failure)
            if anew:
                self._batch.anew.add(chunk)
            elif self.find(chunk) is not None:
                return
            self._start()
            self._queued[chunk] = data
            self._batch.chunks.append((chunk, data, level))
            self._batch.size_bytes += len(data)
            self._queued_bytes += len(data)
            if self._batch.size_bytes >= BATCH_BYTES:
                self._hand_over()

    def add_frame(self, frame: Frame, *, anew: bool = False) -> None:
        """Append a verified frame as it is, in the caller's thread. With `anew` it takes the chunk's place."""
        if self._failure is not None:
            self._try_again()
        with self._state:
            self._start()
        self._appender.append([frame], anew=[frame.id] if anew else ())
        if self._appender.uncommitted_bytes >= COMMIT_BYTES:
            self._wake.set()

    def drain(self) -> None:
        """Return when everything added before is in a pack, though maybe not durable."""
        with self._state:
            self._hand_over()
            before = set(self._working)
            while before & self._working:
                self._state.wait(COMMIT_S)
        if self._failure is not None:
            self._try_again()

    def flush(self) -> None:
        """Return when everything added before is durable and in the index."""
        self.drain()
        try:
            self._appender.commit()
        except StoreError as error:
            self._failure = error
            raise

    def seal(self) -> None:
        """As `flush`, and the packs written so far are full: nothing is added to them any more."""
        self.drain()
        self._appender.seal()
        self.flush()

    def wrote(self, pack: int) -> bool:
        """Whether this process added to that pack."""
        return pack in self._appender.numbers

    def close(self) -> None:
        """Flush, unless only the caller does, and stop; the threads end and the pack is let go in any case."""
        try:
            if self._commit_s is not None:
                self.flush()
        finally:
            with self._state:
                self._closing = True
                threads = self._threads
            self._wake.set()
            self._queue.put(None)
            for thread in threads:
                thread.join()
            self._appender.close()

    def _start(self) -> None:
        if self._closing:
            raise StoreError("the store is closed")
        if self._threads:
            return
        threads = [
            threading.Thread(target=self._compress, name=f"store-compress-{number}", daemon=True)
            for number in range(self._thread_count)
        ]
        if self._commit_s is not None:
            commit = threading.Thread(
                target=self._commit_often, args=(self._commit_s,), name="store-commit", daemon=True
            )
            threads.append(commit)
        for thread in threads:
            thread.start()
            self._threads.append(thread)  # not before: an interrupt may come, and `close` waits for these

    def _hand_over(self) -> None:
        if self._batch.chunks:
            self._working.add(self._batch)
            self._queue.put(self._batch)
            self._batch = _Batch()

    def _compress(self) -> None:
        while (batch := self._queue.get()) is not None:
            failure = None
            try:
                batch.compress()
                self._append(batch)
            except StoreError as error:
                failure = error
            except Exception as error:
                # Not an error of the disk: tell whoever puts or flushes next instead of ending this thread silently.
                log.exception("compressing a batch failed")
                failure = StoreError(f"compressing chunks failed: {error}")
            with self._state:
                self._working.discard(batch)
                if failure is not None:
                    self._failure = failure
                    self._stuck.append(batch)
                self._state.notify_all()
        self._queue.put(None)  # for the next thread

    def _append(self, batch: _Batch) -> None:
        """Append the batch's frames, in order; when they do not fit they stay in it."""
        if batch.frames:
            self._appender.append(batch.frames, anew=batch.anew)
        for frame in batch.frames:
            self._queued.pop(frame.id, None)
        batch.frames = []
        with self._state:
            self._queued_bytes -= batch.size_bytes
        if self._commit_s is None:  # somebody waits for the flush
            self._appender.begin_sync()
        if self._appender.uncommitted_bytes >= COMMIT_BYTES:
            self._wake.set()

    def _try_again(self) -> None:
        """After a failure: append what is stuck and commit, or raise the failure of this try."""
        with self._retry_lock:
            while self._stuck:
                batch = self._stuck[-1]
                batch.compress()
                self._append(batch)
                self._stuck.remove(batch)
            if self._commit_s is not None:
                self._appender.commit()
            with self._state:
                if not self._stuck:
                    self._failure = None
                self._state.notify_all()

    def _commit_often(self, every_s: float) -> None:
        while not self._closing:
            self._wake.wait(every_s)
            self._wake.clear()
            failed_before = self._failure is not None
            try:
                self.flush()
            except StoreError as error:
                # Kept in _failure for the next caller; said once, as the next second tries again.
                if not failed_before:
                    log.warning("background commit failed: %s", error.message)


def _again(error: StoreError) -> StoreError:
    """A fresh exception of the same kind: one instance raised in many threads would grow their tracebacks together."""
    return type(error)(error.message, hint=error.hint)
