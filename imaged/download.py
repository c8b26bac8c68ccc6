"""One batch of chunks from several servers: failover, retries with backoff, and a second chance for corrupt ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from imaged.errors import ChunkCorruptError, ChunkMissingError, PvisorError, UpstreamError
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId
from imaged.upstream import HttpUpstream, RetryPolicy, UpstreamRetryError

log = logging.getLogger(__name__)


class Download:
    """For one thread, run once. Afterwards `wanted` are the chunks that did not come, and `error` says why."""

    def __init__(self, chunks: Iterable[ChunkId], retry: RetryPolicy) -> None:
        self.wanted = dict.fromkeys(chunks)
        self.requests = 0
        self._retry = retry
        self._corrupt: dict[ChunkId, ChunkCorruptError] = {}
        self._failure: UpstreamError | None = None
        self._retry_after_s = 0.0
        self._may_pass = False

    def run(
        self, servers: Sequence[HttpUpstream], arrived: Callable[[Frame, bytes], None], *, patient: bool = True
    ) -> bool:
        """Ask the servers in order, again and again while a failure may pass and time is left.

        `arrived` is called with each verified chunk at once. False when the servers did not answer in time; `patient`
        is how long that is: the whole time of the policy, or a single round.
        """
        started, attempt = time.monotonic(), 0
        while True:
            self._failure, self._may_pass, self._retry_after_s = None, False, 0.0
            for server in servers:
                self._ask(server, arrived)
                if not self.wanted:
                    return True
            if not self._may_pass:
                return True
            attempt += 1
            wait_s = self._retry.wait_s(attempt, self._retry_after_s)
            if not patient or time.monotonic() - started + wait_s > self._retry.total_s:
                return False
            time.sleep(wait_s)

    def error(self, chunk: ChunkId) -> PvisorError:
        """Why this chunk did not come. A server that did not answer may have it, so it is not called missing."""
        if chunk in self._corrupt:
            return self._corrupt[chunk]
        if self._failure is not None:
            return UpstreamError(f"chunk {chunk}: {self._failure.message}", hint=self._failure.hint)
        where = "neither in the local store nor at a chunk server" if self.requests else "not in the store"
        return ChunkMissingError(chunk, where)

    def _ask(self, server: HttpUpstream, arrived: Callable[[Frame, bytes], None]) -> None:
        """One request, and one more for what came corrupt."""
        suspects = self._receive(server, server.fetch(list(self.wanted)), arrived)
        if suspects:
            self._receive(server, server.refetch(suspects), arrived)

    def _receive(
        self, server: HttpUpstream, frames: Iterator[Frame], arrived: Callable[[Frame, bytes], None]
    ) -> list[ChunkId]:
        """The ids that came corrupt."""
        suspects: list[ChunkId] = []
        self.requests += 1
        try:
            for frame in frames:
                if frame.header.codec is Codec.MISSING:
                    continue
                try:
                    data = frame.open()
                except ChunkCorruptError as error:
                    log.warning("%s sent a corrupt chunk: %s", server.url, error.message)
                    self._corrupt[frame.id] = error
                    suspects.append(frame.id)
                    continue
                del self.wanted[frame.id]
                arrived(frame, data)
        except UpstreamRetryError as error:
            self._failure, self._may_pass = error, True
            self._retry_after_s = max(self._retry_after_s, error.retry_after_s)
        except PvisorError as error:
            self._failure = UpstreamError(error.message, hint=error.hint)
        return suspects
