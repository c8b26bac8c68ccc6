"""Frames of packs in the bucket, and the local pack files as a cache of them.

The local file of such a pack is sparse, and may not be there at all. A frame is in it when its header is: the payload
is written before the header, and whoever takes a frame away overwrites the header first. A crash of the host can leave
a header without its payload; so what is verified and wrong is fetched again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from imaged.chunkstore.pack import PACK_HEADER_BYTES, pack_path, punch
from imaged.chunkstore.rows import Location
from imaged.errors import (
    BucketUnavailableError,
    ChunkCorruptError,
    ChunkUnreadableError,
    FormatError,
    ObjectMissingError,
    StoreError,
)
from imaged.frame import HEADER_BYTES, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.s3.objects import Objects
from imaged.s3.packindex import Row
from imaged.s3.packtable import PackTable, pack_key

GAP_BYTES = 128 << 10
"""Wanted frames that lie no further apart come with one request, and all between them."""
WINDOW_BYTES = 512 << 10
"""A request for less goes on behind it as far as this: what lies there was written with it, and is likely wanted."""
RANGE_BYTES = 4 << 20
"""No request asks for more, but for a single frame."""
_THREADS = 8
_CONTENTS_KEPT = 64
log = logging.getLogger(__name__)
Wanted = tuple[ChunkId, Location]
_Coming = dict[Wanted, Future[Frame | None]]
"""None is what the bucket does not have, or has wrong."""


class Span(NamedTuple):
    """One request: part of a pack, and the frames that are taken from it."""

    pack: int
    start: int
    end: int
    rows: tuple[Row, ...]


class _Request(NamedTuple):
    """A span that is read, and who waits for what of it."""

    span: Span
    coming: _Coming


def spans(
    pack: int, wanted: Sequence[Row], contents: Sequence[Row], is_here: Callable[[Row], bool] = lambda row: False
) -> list[Span]:
    """Cover the wanted frames with few requests; `contents` is all of the pack, in order, or empty. Read-ahead ends at
    the first frame that is here."""
    found: list[Span] = []
    rows = sorted(set(wanted), key=lambda row: row.offset)
    while rows:
        taken = [rows[0]]
        for row in rows[1:]:
            if row.offset - taken[-1].end > GAP_BYTES or row.end - taken[0].offset > RANGE_BYTES:
                break
            taken.append(row)
        rows = rows[len(taken) :]
        start, end = taken[0].offset, taken[-1].end
        begin = bisect_left(contents, start, key=lambda row: row.offset)
        all_rows: list[Row] = []
        for row in itertools.islice(contents, begin, None):
            if row.end > max(end, start + WINDOW_BYTES) or (rows and row.offset >= rows[0].offset):
                break
            if row.offset >= end and is_here(row):
                break
            all_rows.append(row)
        known = {row.offset for row in all_rows}
        all_rows = sorted([*all_rows, *(row for row in taken if row.offset not in known)], key=lambda row: row.offset)
        found.append(Span(pack, start, all_rows[-1].end, tuple(all_rows)))
    return found


class Reading:
    """Fetches what local packs lack. Threads share it; concurrent wishes for one frame make one request."""

    def __init__(
        self, root: Path, objects: Objects, packs: PackTable, fetched: Callable[[list[ChunkId]], None] | None = None
    ) -> None:
        self._root, self._objects, self._packs, self._fetched = root, objects, packs, fetched
        self._lock = threading.Lock()
        self._coming: _Coming = {}
        self._contents: dict[str, tuple[Row, ...]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="s3-read")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def bring(self, wanted: Iterable[Wanted]) -> None:
        """Have these frames in the local files, as far as the bucket has them and the disk has room.

        BucketUnavailableError. What is gone or damaged there is passed over: reading it then says so.
        """
        lacking = self._lacking(wanted)
        if lacking:
            self._fetch(lacking)

    def prefetch(self, wanted: Iterable[Wanted]) -> None:
        """As `bring`, in the background, request by request; what goes wrong is found again by who reads."""
        _, requests = self._begin(self._lacking(wanted))
        for request in requests:
            self._submit(request)

    def _lacking(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        return [
            (chunk, place) for chunk, place in wanted if self._packs.is_safe(place.pack) and not self.is_here(place)
        ]

    def frame(self, chunk: ChunkId, location: Location) -> Frame:
        """A verified frame from the bucket, whatever the local file has, which has it then.

        ChunkUnreadableError when the pack is gone, ChunkCorruptError when its bytes are wrong in the bucket,
        BucketUnavailableError.
        """
        frame = self._fetch([(chunk, location)])[chunk, location]
        if frame is None:
            frame = self._alone(chunk, location)
        return frame

    def is_here(self, location: Location) -> bool:
        """Whether the local file has a frame of these lengths at this place."""
        try:
            with _open_file(pack_path(self._root, location.pack), os.O_RDONLY) as fd:
                header = FrameHeader.parse(os.pread(fd, HEADER_BYTES, location.offset))
        except (OSError, FormatError):
            return False
        return (header.size_bytes, header.payload_bytes, header.codec) == location[2:]

    def evict(self, locations: Iterable[Location]) -> int:
        """Take frames out of the local files; how many bytes they took."""
        freed = 0
        for pack, places in itertools.groupby(sorted(locations), key=lambda place: place.pack):
            if not self._packs.is_safe(pack):
                continue
            with contextlib.suppress(FileNotFoundError), _open_file(pack_path(self._root, pack), os.O_RDWR) as fd:
                start = end = -1
                for place in places:
                    if not self.is_here(place):
                        continue
                    os.pwrite(fd, bytes(HEADER_BYTES), place.offset)
                    freed += place.stored_bytes
                    if place.offset != end:
                        _punch_whole(fd, start, end)
                        start = place.offset
                    end = place.offset + place.stored_bytes
                _punch_whole(fd, start, end)
        return freed

    def _fetch(self, wanted: Sequence[Wanted]) -> dict[Wanted, Frame | None]:
        coming, requests = self._begin(wanted)
        for request in requests[1:]:
            self._submit(request)
        if requests:
            self._run(requests[0])
        try:
            return {one: future.result() for one, future in coming.items()}
        except StoreError as error:  # each who waits raises one of its own
            raise type(error)(error.message, hint=error.hint) from error

    def _begin(self, wanted: Sequence[Wanted]) -> tuple[_Coming, list[_Request]]:
        """Each frame, as it will come, and the requests for those that nobody fetched yet: all of them must be run."""
        mine: _Coming = {}
        coming = self._claim(wanted, mine)
        requests = []
        try:
            for span in self._plan(list(mine)):
                rows = [(row.chunk, Location(span.pack, *row[1:])) for row in span.rows]
                ahead: _Coming = {}
                self._claim(rows, ahead)
                requests.append(_Request(span, ahead | {one: mine.pop(one) for one in rows if one in mine}))
        except BaseException as error:
            for futures in (mine, *(request.coming for request in requests)):
                self._fail(futures, error)
            raise
        self._end(mine, {})  # what the contents of its pack do not have there
        return coming, requests

    def _claim(self, wanted: Sequence[Wanted], mine: _Coming) -> _Coming:
        """Each frame, as it will come; those that nobody fetched yet are `mine` now."""
        with self._lock:
            for one in wanted:
                if one not in self._coming:
                    self._coming[one] = mine[one] = Future()
            return {one: self._coming[one] for one in wanted}

    def _submit(self, request: _Request) -> None:
        """To the pool. What runs there waits for nothing but the bucket, so that all who wait for it go on."""
        try:
            task = self._pool.submit(self._run, request)
        except RuntimeError:  # closing
            self._cancel(request)
        else:
            task.add_done_callback(lambda task: self._cancel(request) if task.cancelled() else None)

    def _run(self, request: _Request) -> None:
        try:
            got = self._read(request.span)
        except BaseException as error:
            self._fail(request.coming, error)
            if not isinstance(error, StoreError):
                raise
        else:
            self._end(request.coming, got)

    def _end(self, futures: _Coming, got: dict[Wanted, Frame]) -> None:
        self._forget(futures)
        for one, future in futures.items():
            future.set_result(got.get(one))

    def _cancel(self, request: _Request) -> None:
        self._fail(request.coming, StoreError("the store is being closed"))

    def _fail(self, futures: _Coming, error: BaseException) -> None:
        self._forget(futures)
        for future in futures.values():
            future.set_exception(
                error if isinstance(error, StoreError) else StoreError(f"reading from the bucket ended: {error!r}")
            )

    def _forget(self, futures: _Coming) -> None:
        with self._lock:
            for one in futures:
                del self._coming[one]

    def _plan(self, wanted: Sequence[Wanted]) -> list[Span]:
        plan: list[Span] = []
        for pack, group in itertools.groupby(sorted(wanted, key=lambda one: one[1]), key=lambda one: one[1].pack):
            rows = [Row(chunk, *place[1:]) for chunk, place in group]
            plan += spans(pack, rows, self._rows(pack), partial(self._has_row, pack))
        return plan

    def _read(self, span: Span) -> dict[Wanted, Frame]:
        """Fetch a part, verify its frames, keep those that are right."""
        remote = self._packs.find(span.pack)
        if remote is None:
            return {}
        try:
            data = memoryview(self._objects.read(pack_key(remote.id), span.start, span.end - span.start))
        except ObjectMissingError as error:
            log.info("%s", error.message)
            return {}
        found: dict[Wanted, Frame] = {}
        for row in span.rows:
            try:
                frame = Frame.parse(data[row.offset - span.start : row.end - span.start])
                if frame.id != row.chunk:
                    raise FormatError("frame", expected=f"chunk {row.chunk}", found=str(frame.id))
                frame.open()
            except (FormatError, ChunkCorruptError) as error:
                log.warning("pack %s at %d, in the bucket: %s", remote.id, row.offset, error.message)
                continue
            found[row.chunk, Location(span.pack, *row[1:])] = frame
        self._keep(span.pack, found)
        return found

    def _alone(self, chunk: ChunkId, location: Location) -> Frame:
        """Why a frame did not come, by asking for nothing but it."""
        remote = self._packs.find(location.pack)
        where = f"pack {location.pack}" if remote is None else f"pack {remote.id} in the bucket"
        try:
            if remote is None:
                raise ObjectMissingError(f"{where}: it is gone")
            raw = self._objects.read(pack_key(remote.id), location.offset, location.stored_bytes)
        except ObjectMissingError as error:
            raise ChunkUnreadableError(chunk, error.message, hint="`pvisor store fsck` says what is lost") from None
        except BucketUnavailableError:
            raise
        try:
            frame = Frame.parse(raw)
            if frame.id != chunk:
                raise FormatError("frame", expected=f"chunk {chunk}", found=str(frame.id))
            frame.open()
        except (FormatError, ChunkCorruptError) as error:
            raise ChunkCorruptError(chunk, f"damaged in {where} at {location.offset} ({error.message})") from error
        self._keep(location.pack, {(chunk, location): frame})
        return frame

    def _keep(self, pack: int, frames: dict[Wanted, Frame]) -> None:
        """Into the local file: a cache, so that a full disk only makes the next read slower."""
        try:
            with _open_file(pack_path(self._root, pack), os.O_RDWR | os.O_CREAT) as fd:
                for (_, place), frame in frames.items():
                    os.pwrite(fd, frame.payload, place.offset + HEADER_BYTES)
                    os.pwrite(fd, frame.header.pack(), place.offset)
        except OSError as error:
            log.warning("pack %d is not kept here: %s", pack, error.strerror)
            return
        if self._fetched is not None:
            self._fetched([chunk for chunk, _ in frames])

    def _has_row(self, pack: int, row: Row) -> bool:
        return self.is_here(Location(pack, *row[1:]))

    def _rows(self, pack: int) -> Sequence[Row]:
        remote = self._packs.find(pack)
        if remote is None:
            return ()
        found = self._contents.get(remote.id)
        if found is None:
            contents = self._packs.contents(remote.id)
            if contents is None:
                return ()
            with self._lock:
                found = self._contents[remote.id] = contents.rows
                while len(self._contents) > _CONTENTS_KEPT:
                    del self._contents[next(iter(self._contents))]
        return found


def _punch_whole(fd: int, start: int, end: int) -> None:
    if start >= PACK_HEADER_BYTES:
        with contextlib.suppress(OSError):
            punch(fd, start, end)


@contextlib.contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
