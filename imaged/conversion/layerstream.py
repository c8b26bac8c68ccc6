"""One layer on its way in: download, then decompression with the diff_id, each in a thread, joined by bounded pipes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from imaged.errors import DigestMismatchError, LayerError
from imaged.ids import OciDigest
from imaged.oci.decompress import decompress
from imaged.oci.image import LayerSource

PIPE_BYTES = 8 << 20
READ_BYTES = 1 << 20
_JOIN_S = 5.0


class _CancelledError(Exception):
    """The reader of a pipe has gone; its writer ends quietly."""


class Pipe:
    """Bytes from one thread to another, PIPE_BYTES of them at most; an error of the writer is raised to the reader."""

    def __init__(self, limit_bytes: int = PIPE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._rest = memoryview(b"")
        self._ended = self._cancelled = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def write(self, data: bytes) -> None:
        """Hand over; waits while the pipe is full."""
        with self._changed:
            self._changed.wait_for(lambda: self._held_bytes < self._limit_bytes or self._cancelled)
            if self._cancelled:
                raise _CancelledError
            self._pieces.append(data)
            self._held_bytes += len(data)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """No more bytes follow; `error` says why when that is not the end of the stream."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def cancel(self) -> None:
        """The reader reads no more."""
        with self._changed:
            self._cancelled = True
            self._pieces.clear()
            self._changed.notify_all()

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes, at least one before the end of the stream; raises what the writer ended with."""
        if not self._rest:
            piece = self._take()
            if len(piece) <= size:
                return piece
            self._rest = memoryview(piece)
        data, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return data

    def _take(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces) or self._ended or self._cancelled)
            if self._cancelled:
                raise _CancelledError
            if self._pieces:
                piece = self._pieces.pop(0)
                self._held_bytes -= len(piece)
                self._changed.notify_all()
                return piece
            if self._error is not None:
                raise self._error
            return b""


class LayerStream:
    """The uncompressed tar of a layer, read by one thread. Begins to download when made; a context manager.

    `read` raises what downloading and decompressing raise, and DigestMismatchError instead of the end when the bytes
    are not those of the diff_id. `stored_bytes` have been downloaded so far.
    """

    def __init__(self, source: LayerSource, *, name: str) -> None:
        self.source = source
        self.stored_bytes = 0
        self._name = name
        self._stored, self._plain = Pipe(), Pipe()
        self._threads = [
            threading.Thread(target=self._run, args=(work, pipe), name=f"{what} {name}", daemon=True)
            for what, work, pipe in (
                ("download", self._download, self._stored),
                ("decompress", self._decompress, self._plain),
            )
        ]

        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop both threads, wherever they are."""
        self._plain.cancel()
        self._stored.cancel()
        for thread in self._threads:
            # A download that waits for its server ends by itself at the server's timeout.
            thread.join(_JOIN_S)

    def read(self, size: int, /) -> bytes:
        return self._plain.read(size)

    def _run(self, work: Callable[[], None], pipe: Pipe) -> None:
        """Whatever a stage raises is for the reader of its pipe."""
        try:
            work()
        except BaseException as error:
            pipe.end(error)
        else:
            pipe.end()

    def _download(self) -> None:
        with self.source.open() as stream:
            while data := stream.read(READ_BYTES):
                self.stored_bytes += len(data)
                self._stored.write(data)

    def _decompress(self) -> None:
        expected = OciDigest.parse(self.source.diff_id)
        digest = hashlib.new(expected.algorithm)
        try:
            stream = decompress(self._stored)
            while data := stream.read(READ_BYTES):
                self._plain.write(data)
                digest.update(data)
        except LayerError as error:
            raise LayerError(error.reason, layer=self._name, entry=error.entry, hint=error.hint) from error
        found = f"{expected.algorithm}:{digest.hexdigest()}"
        if found != str(expected):
            raise DigestMismatchError(
                f"layer {self._name} has diff_id {found}, not {expected} as the image configuration says",
                hint="the source is damaged or was changed: fetch or push the image again",
            )
