"""One batch of chunks from several servers: failover, retries with backoff, and a second chance for corrupt ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from imaged.errors import ChunkCorruptError, ChunkMissingError, PvisorError, UpstreamError
from imaged.fetching.httpcall import Call
from imaged.fetching.retry import RetryPolicy, UpstreamRetryError, UpstreamWrongError
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId

log = logging.getLogger(__name__)
Arrived = Callable[[Frame, bytes], None]


class Outcome(NamedTuple):
    """What one request brought: of so many chunks so many. `failed`: it was refused or broke off. `lied`: bytes that do
    not match what they came as, also when they were asked for once more. `given_up`: somebody ended it."""

    asked: int
    came: int
    failed: bool = False
    lied: bool = False
    given_up: bool = False


class Download:
    """Run once, by one thread; others may watch it and end it.

    Afterwards `wanted` are the chunks that did not come, and `error` says why.

    `asked` is called before each request, `heard` and `judged` after it; `settled` says whether a chunk has come
    another way meanwhile. With `fresh`, requests go over new connections, because those that are there may be dead.
    """

    def __init__(
        self,
        chunks: Iterable[ChunkId],
        retry: RetryPolicy,
        *,
        asked: Callable[[], None] = lambda: None,
        heard: Callable[[HttpUpstream, Call], None] = lambda server, call: None,
        judged: Callable[[HttpUpstream, Outcome], None] = lambda server, outcome: None,
        settled: Callable[[ChunkId], bool] = lambda chunk: False,
        fresh: bool = False,
    ) -> None:
        self.wanted = dict.fromkeys(chunks)
        self.server: HttpUpstream | None = None
        self._retry = retry
        self._asked, self._heard, self._judged = asked, heard, judged
        self._settled, self._fresh = settled, fresh
        self._call: Call | None = None
        self._cancelled = threading.Event()
        self._urls: dict[str, None] = {}
        """Of the servers that were asked."""
        self._corrupt: dict[ChunkId, ChunkCorruptError] = {}
        self._failure: UpstreamError | None = None
        self._retry_after_s = 0.0
        self._may_pass = False

    # For other threads

    @property
    def heard_s(self) -> float | None:
        """When the request under way last got a byte, or was sent; None while there is none (between attempts)."""
        call = self._call
        return call.heard_s if call is not None else None

    def hurry(self) -> None:
        """End the request under way: as if its connection had broken, the next server or attempt comes."""
        call = self._call
        if call is not None:
            call.cancel()

    def cancel(self) -> None:
        """End the whole download soon."""
        self._cancelled.set()
        self.hurry()

    # For the one who runs it

    def run(self, servers: Sequence[HttpUpstream], arrived: Arrived, *, patient: bool = True) -> bool:
        """Ask the servers in order, again and again while a failure may pass and time is left.

        `arrived` is called with each verified chunk at once. False when the servers did not answer in time; `patient`
        is how long that is: the whole time of the policy, or a single round.
        """
        started, attempt = time.monotonic(), 0
        while True:
            self._failure, self._may_pass, self._retry_after_s = None, False, 0.0
            for server in servers:
                self._ask(server, arrived)
                if not self.wanted or self._cancelled.is_set():
                    return True
            if not self._may_pass:
                return True
            attempt += 1
            wait_s = self._retry.wait_s(attempt, self._retry_after_s)
            if not patient or time.monotonic() - started + wait_s > self._retry.total_s:
                return False
            if self._cancelled.wait(wait_s):
                return True

    def error(self, chunk: ChunkId) -> PvisorError:
        """Why this chunk did not come. A server that did not answer may have it, so it is not called missing."""
        if chunk in self._corrupt:
            return self._corrupt[chunk]
        if self._failure is not None:
            return UpstreamError(f"chunk {chunk}: {self._failure.message}", hint=self._failure.hint)
        if not self._urls:
            return ChunkMissingError(chunk)
        return ChunkMissingError(
            chunk,
            f"neither in the local store nor at {', '.join(self._urls)}",
            hint="a peer or a cache may have only a part: name a server that has all of it last, in --server or "
            "PVISOR_SERVER",
        )

    def _ask(self, server: HttpUpstream, arrived: Arrived) -> None:
        """One request, and one more for what came corrupt."""
        self.wanted = {chunk: None for chunk in self.wanted if not self._settled(chunk)}
        if not self.wanted:
            return
        suspects = self._receive(server, server.fetch, list(self.wanted), arrived)
        if suspects and (still := self._receive(server, server.refetch, suspects, arrived)):
            log.error("%s lies: %d chunks do not match their ids, such as %s", server.url, len(still), still[0])
            self._judged(server, Outcome(len(suspects), len(suspects) - len(still), lied=True))

    def _receive(
        self,
        server: HttpUpstream,
        ask: Callable[[Sequence[ChunkId], Call], Iterator[Frame]],
        chunks: list[ChunkId],
        arrived: Arrived,
    ) -> list[ChunkId]:
        """The ids that came corrupt."""
        suspects: list[ChunkId] = []
        came, failed, lied = 0, False, False
        self._urls[server.url] = None
        self._asked()
        call = Call(fresh=self._fresh)
        self.server, self._call = server, call
        if self._cancelled.is_set():
            call.cancel()
        try:
            for frame in ask(chunks, call):
                if frame.header.codec is Codec.MISSING:
                    continue
                came += 1
                try:
                    data = frame.open()
                except ChunkCorruptError as error:
                    log.warning("%s sent a corrupt chunk: %s", server.url, error.message)
                    self._corrupt[frame.id] = error
                    suspects.append(frame.id)
                    continue
                self.wanted.pop(frame.id, None)
                arrived(frame, data)
        except UpstreamRetryError as error:
            failed, lied = True, isinstance(error, UpstreamWrongError)
            if lied:
                log.error("%s", error.message)
            self._failure, self._may_pass = error, True
            self._retry_after_s = max(self._retry_after_s, error.retry_after_s)
        except PvisorError as error:
            failed, self._failure = True, UpstreamError(error.message, hint=error.hint)
        except Exception as error:
            # Whatever it was, it does not say that the chunk is missing.
            log.exception("%s: a request failed", server.url)
            failed = True
            self._failure = UpstreamError(f"chunk server {server.url}: {error!r}")
        finally:
            self._call = None
            self._heard(server, call)
            outcome = Outcome(len(chunks), came, failed and not call.cancelled, lied, call.cancelled)
            self._judged(server, outcome)
        return suspects
