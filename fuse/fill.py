"""Fills: fetching in the background what an image still lacks, until it is complete and needs no server.

Nobody waits for a fill, and nobody must notice one. It promises no chunk, so that who reads one that is on its way asks
for it at once. What it brings goes into the store and not into memory, which is for what processes use. Its requests
are small and come one after another, at the pace that was wished for; it makes none while anything else is fetched.

The wish is kept in the store until it is fulfilled: a daemon that starts goes on with what the one before it left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from imaged.blockimage import BlockImage
from imaged.errors import PvisorError, StoreError, UpstreamError
from imaged.fetching.download import Download
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.retry import RetryPolicy
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.slices import slices

log = logging.getLogger(__name__)
DEFAULT_BYTES_PER_S = 8 << 20
"""A fifteenth of a gigabit link and a twentieth of a core here: 500 MB are complete in a minute, and a hundred workers
that fill at once leave a 10 Gbit/s server some room."""
_GROUP = 8
"""Chunks a request: a read that comes meanwhile shares the link with some 200 KiB."""
_QUIET_S = 0.2
"""Whoever missed a chunk so lately is likely to miss another."""
_LONGEST_YIELD_S = 1.0
"""One request in so long is made however busy the host is: it is then a fill of some 200 KiB a second."""
_NAP_S = 0.005
"""Given up before each chunk that comes while somebody waits for one: the interpreter and the link are theirs."""
_BACKOFF = RetryPolicy(first_wait_s=1.0, longest_wait_s=60.0)
_TELL_S = 600.0
_END_S = 10.0
_LOOK_UP = 4096
_ROUNDS = 3


class State(StrEnum):
    WAITING = "waiting"
    FILLING = "filling"
    RETRYING = "retrying"
    STOPPED = "stopped"
    COMPLETE = "complete"


@dataclass(slots=True, eq=False, kw_only=True)
class Fill:
    """One image. `error` is why it is retried or stopped, `due_s` when its turn may come, `tell_s` when the log may say
    again that it is retried. `wishes` counts how often it was asked for.

    `chunks` are all of the image, 0 until they are known; `present_chunks` those of them that are here.
    """

    image: ChunkId
    name: str
    state: State = State.WAITING
    error: str = ""
    chunks: int = 0
    present_chunks: int = 0
    failures: int = 0
    wishes: int = 1
    due_s: float = 0.0
    tell_s: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def to_json(self) -> dict[str, Any]:
        counts = self.tally.to_dict()
        return {
            "name": self.name,
            "state": str(self.state),
            "chunks": self.chunks,
            "present_chunks": self.present_chunks,
            **{key: counts[key] for key in ("requests", "fetched_chunks", "fetched_bytes")},
            "error": self.error if self.state in (State.RETRYING, State.STOPPED) else "",
        }


class _GoneError(Exception):
    """The daemon ends, or nobody wishes for this fill any more."""


class Pace:
    """At most so many bytes a second, as an average."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def take(self, byte_count: int, stop: threading.Event) -> None:
        """Account for these bytes; return when the next may be asked for, or `stop` is set."""
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s) + byte_count / self._bytes_per_s
        stop.wait(self._free_s - now_s)


class Filler:
    """Fills images one after another, on one thread that starts with the first. Threads may share it."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher, self._store = fetcher, fetcher.store
        self._fills: dict[ChunkId, Fill] = {}
        self._changed = threading.Condition()
        self._stop, self._hasten = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._download: Download | None = None
        self._bytes_per_s, self._pace = 0, Pace(1.0)

    def resume(self) -> None:
        """Go on with what was wished for before this daemon started, once those who start it had their turn."""
        for image in self._store.fills.ids():
            self._add(image, time.monotonic() + _LONGEST_YIELD_S)

    def want(self, image: ChunkId, bytes_per_s: int | None = None) -> None:
        """Fetch all that this image lacks; on return that is settled, whatever happens to this process. StoreError.

        `bytes_per_s` bounds what comes over the wire, as an average.
        """
        self._store.fills.set(image, bytes_per_s or DEFAULT_BYTES_PER_S)
        self._add(image, 0.0)
        self._hasten.set()

    def status(self) -> dict[str, dict[str, Any]]:
        """By image id: what was wished for since the daemon started, or before, and how far it is."""
        with self._changed:
            fills = list(self._fills.values())
        return {str(fill.image): fill.to_json() for fill in fills}

    def close(self) -> None:
        """Stop soon. What has come stays, and so does what is wished for."""
        self._stop.set()
        self._hasten.set()
        with self._changed:
            self._changed.notify_all()
            thread, download = self._thread, self._download
        if download is not None:
            download.cancel()
        if thread is not None:
            thread.join(_END_S)

    def _add(self, image: ChunkId, due_s: float) -> None:
        names = [name for name, ref in self._store.refs.items() if ref.record == image]
        with self._changed:
            held = self._fills.get(image)
            if held is not None and held.state is State.FILLING:
                held.wishes += 1
            else:
                self._fills[image] = Fill(image=image, name=names[0] if names else str(image), due_s=due_s)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="fill", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # On the thread

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                # Nothing in this block may raise: it would end the thread.
                waiting = [one for one in self._fills.values() if one.state in (State.WAITING, State.RETRYING)]
                fill = min(waiting, key=lambda one: one.due_s, default=None)
                wait_s = fill.due_s - time.monotonic() if fill is not None else None
                if fill is None or (wait_s is not None and wait_s > 0):
                    if not self._stop.is_set():
                        self._changed.wait(wait_s)
                    continue
                fill.state = State.FILLING
            try:
                self._turn(fill)
            except Exception as error:
                log.exception("fill of %s stopped", fill.name)
                fill.error, fill.state = repr(error), State.STOPPED

    def _turn(self, fill: Fill) -> None:
        """As far as it gets."""
        came = fill.tally.fetched_chunks
        try:
            try:
                self._complete(fill)
            except _GoneError:
                self._gone(fill)
        except StoreError as error:
            log.error("fill of %s stopped: %s", fill.name, error.message)
            fill.error, fill.state = error.message, State.STOPPED
        except PvisorError as error:
            fill.failures = 1 if fill.tally.fetched_chunks > came else fill.failures + 1
            now_s = time.monotonic()
            if now_s >= fill.tell_s:
                fill.tell_s = now_s + _TELL_S
                log.warning("fill of %s: %s; trying again", fill.name, error.message)
            fill.due_s = now_s + _BACKOFF.wait_s(min(fill.failures, 16))
            fill.error, fill.state = error.message, State.RETRYING

    def _gone(self, fill: Fill) -> None:
        """Nobody wishes for it any more, or only this daemon ends. StoreError."""
        wishes = fill.wishes
        wanted = self._store.fills.get(fill.image) is not None
        with self._changed:
            if wanted or fill.wishes > wishes:
                fill.state = State.WAITING
            elif self._fills.get(fill.image) is fill:
                del self._fills[fill.image]

    def _complete(self, fill: Fill) -> None:
        """Bring the roots, then the leaves, then what these name. PvisorError, _GoneError."""
        record = ImageRecord.parse(self._store.get(fill.image))
        self._bring(fill, record, [record.metadata, record.data])
        for root in (record.metadata, record.data):
            self._bring(fill, record, BlockImage.open(self._store, root).leaf_ids())
        chunks, absent = 0, list[ChunkId]()
        for some in slices(reachable(self._store, fill.image), _LOOK_UP):
            chunks += len(some)
            absent += self._store.missing(some)
        fill.chunks, fill.present_chunks = chunks, chunks - len(absent)
        for _ in range(_ROUNDS):
            self._bring(fill, record, absent)
            absent = self._completed(fill)
            if not absent:
                break
        else:
            raise StoreError(f"the store does not keep all of it: {len(absent)} chunks went again")
        fill.present_chunks, fill.error, fill.state = chunks, "", State.COMPLETE
        log.info("image %s is complete: %d chunks", fill.name, fill.chunks)

    def _completed(self, fill: Fill) -> list[ChunkId]:
        """Say that the image is complete, under a lease; else what is missing after all. The hours before, somebody may
        have evicted, or found damaged, what was here."""
        with self._store.lease(f"completing {fill.name}"):
            absent = [
                chunk
                for some in slices(reachable(self._store, fill.image), _LOOK_UP)
                for chunk in self._store.missing(some)
            ]
            if not absent:
                self._store.flush()
                self._store.refs.complete(fill.image)
        return absent

    def _bring(self, fill: Fill, record: ImageRecord, chunks: Iterable[ChunkId]) -> None:
        """Those that are not here. What a server that answers does not have is left to the end."""
        lacking: PvisorError | None = None
        for some in slices(chunks, _GROUP):
            absent = self._store.missing(some)
            fill.present_chunks += len(some) - len(absent)
            if absent:
                self._wait_for_quiet()
                pace = self._pace_of(fill)
                before_bytes = fill.tally.fetched_bytes
                lacking = self._fetch(fill, record, absent) or lacking
                pace.take(fill.tally.fetched_bytes - before_bytes, self._hasten)
                self._hasten.clear()
        if lacking is not None:
            raise lacking

    def _wait_for_quiet(self) -> None:
        """While others fetch, for as long as a fill waits for them."""
        deadline_s = time.monotonic() + _LONGEST_YIELD_S
        while (now_s := time.monotonic()) < deadline_s:
            wait_s = _QUIET_S - self._fetcher.quiet_s()
            if wait_s <= 0 or self._stop.wait(min(wait_s, deadline_s - now_s)):
                return

    def _pace_of(self, fill: Fill) -> Pace:
        """As the wish says now. _GoneError when there is none any more."""
        bytes_per_s = self._store.fills.get(fill.image)
        if bytes_per_s is None or self._stop.is_set():
            raise _GoneError
        if bytes_per_s != self._bytes_per_s:
            self._bytes_per_s, self._pace = bytes_per_s, Pace(float(bytes_per_s))
        return self._pace

    def _fetch(self, fill: Fill, record: ImageRecord, chunks: list[ChunkId]) -> PvisorError | None:
        """One request. UpstreamError when no server answers, StoreError; why the first did not come, if it did not."""
        refused: list[StoreError] = []

        def asked() -> None:
            fill.tally.count(requests=1)

        def arrived(frame: Frame, data: bytes) -> None:
            fill.tally.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
            if not self._fetcher.quiet_s():
                self._stop.wait(_NAP_S)
            try:
                self._fetcher.stow(frame, data)
            except StoreError as error:
                refused.append(error)
                download.cancel()
            else:
                fill.present_chunks += 1

        servers = self._fetcher.routes.order(self._fetcher.origin(record.data) or "")
        judged = self._fetcher.routes.judge
        download = self._download = Download(chunks, _BACKOFF, asked=asked, judged=judged, settled=self._store.has)
        if self._stop.is_set():
            raise _GoneError
        download.run(servers, arrived, patient=False)
        if self._stop.is_set():
            raise _GoneError
        if refused:
            raise refused[0]
        left = self._store.missing(download.wanted)
        if not left:
            fill.error = ""
            return None
        error = download.error(left[0])
        if isinstance(error, UpstreamError):
            raise error
        return error
