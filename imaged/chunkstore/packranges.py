"""Where the frames of many chunks lie in the pack files, for one who sends them from there without looking at them.

Nothing is copied: the kernel sends the ranges (sendfile). What makes that safe is that each frame's header was compared
with the index just before, and that whoever gets a frame verifies it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PackFile, PackReader
from imaged.chunkstore.rows import LOCATION
from imaged.errors import StoreError
from imaged.frame import HEADER, HEADER_BYTES, MAGIC
from imaged.ids import ChunkId

_PADDING = b"\0\0\0"
_WARM_BYTES = 1 << 20
_REMEMBERED = 256
_FRESH_S = 5.0


class NotCachedError(StoreError):
    """The disk would have to be waited for."""


@dataclass(frozen=True, slots=True)
class PackRanges:
    """Parts of pack files, each (file, start, end), in the order in which they are to be sent. The files stay open as
    long as this is alive."""

    ranges: Sequence[tuple[PackFile, int, int]]
    byte_count: int

    def ends_cached(self) -> bool:
        """Whether the page cache has the last byte of each range. OSError."""
        last = [bytearray(1)]
        try:
            return all(os.preadv(file.fd, last, end - 1, os.RWF_NOWAIT) for file, _, end in self.ranges)
        except BlockingIOError:
            return False

    def read_ahead(self) -> None:
        """Wait for the disk, here, so that who sends does not have to."""
        scratch = [bytearray(_WARM_BYTES)]
        for file, start, end in self.ranges:
            for offset in range(start, end, _WARM_BYTES):
                os.preadv(file.fd, scratch, offset)


@dataclass(frozen=True, slots=True)
class _Remembered:
    chunks: Sequence[ChunkId]
    plan: PackRanges
    version: int
    made_s: float


class PackPlanner:
    """Finds the ranges of chunks in one store's packs. Threads may share it, but for `batch`."""

    def __init__(self, index: Index, packs: PackReader) -> None:
        self._index, self._packs = index, packs
        self._remembered: dict[bytes, _Remembered] = {}

    def batch(self, ids: bytes) -> tuple[Sequence[ChunkId], PackRanges] | None:
        """As `plan`, for ids that follow one another. FormatError.

        Hosts that start the same image ask for the same batches, within seconds of one another: what was found for one
        is right for the next while the index stays as it is, and soon looked at again in case the disk did not.
        """
        version, now_s = self._index.version(), time.monotonic()
        found = self._remembered.get(ids)
        if found is not None and found.version == version and now_s < found.made_s + _FRESH_S:
            return found.chunks, found.plan
        chunks = ChunkId.several(ids)
        plan = self.plan(chunks)
        if plan is None:
            return None
        if len(self._remembered) >= _REMEMBERED:
            self._remembered.clear()
        self._remembered[ids] = _Remembered(chunks, plan, version, now_s)
        return chunks, plan

    def plan(self, chunks: Sequence[ChunkId], *, wait: bool = False) -> PackRanges | None:
        """The frames of these chunks, those that lie one after another as one range.

        None when one of them is not to be had so: it is not in the index, its pack is gone, or its header is not what
        the index says. The ordinary way of reading then finds out why. NotCachedError unless `wait`: of each header,
        and of the end of each range; what lies between them is not looked at.
        """
        ranges: list[tuple[PackFile, int, int]] = []
        cached, byte_count = True, 0
        number, file, start, end = -1, None, 0, 0
        header = bytearray(HEADER_BYTES)
        buffers, unpack, pack, preadv, flags = [header], LOCATION.unpack, HEADER.pack, os.preadv, os.RWF_NOWAIT
        fd = -1
        try:
            for chunk, raw in zip(chunks, self._index.raw_locations(chunks), strict=True):
                if raw is None:
                    return None
                where, offset, size_bytes, payload_bytes, codec = unpack(raw)
                if where != number or offset != end:
                    if file is not None:
                        ranges.append((file, start, end))
                    start = offset
                    if where != number or file is None:
                        number, file = where, self._packs.file(where)
                        fd = file.fd
                try:
                    preadv(fd, buffers, offset, flags)
                except BlockingIOError:
                    if not wait:
                        raise NotCachedError(f"pack {where} at {offset}") from None
                    cached = False
                    preadv(fd, buffers, offset)
                if header != pack(MAGIC, codec, _PADDING, size_bytes, payload_bytes, chunk):
                    return None
                end = offset + HEADER_BYTES + payload_bytes
                byte_count += HEADER_BYTES + payload_bytes
            if file is not None:
                ranges.append((file, start, end))
            planned = PackRanges(ranges, byte_count)
            cached = cached and planned.ends_cached()
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and not wait:
                raise NotCachedError("this file system does not say what is cached") from error
            return None
        if not cached:
            if not wait:
                raise NotCachedError(f"{byte_count} bytes in {len(ranges)} ranges")
            planned.read_ahead()
        return planned

    def frame(self, chunk: ChunkId, head: bytes, tail: bytes) -> bytearray | None:
        """`head`, the length of the chunk's frame in digits, `tail`, and the frame, when the page cache has it.

        None says nothing about whether the chunk is here.
        """
        raw = self._index.raw_locations((chunk,))[0]
        if raw is None:
            return None
        number, offset, size_bytes, payload_bytes, codec = LOCATION.unpack(raw)
        length = HEADER_BYTES + payload_bytes
        before = b"%b%d%b" % (head, length, tail)
        at = len(before)
        answer = bytearray(at + length)
        answer[:at] = before
        with memoryview(answer) as view:
            try:
                done = os.preadv(self._packs.file(number).fd, (view[at:],), offset, os.RWF_NOWAIT)
            except OSError:
                return None
        expected = HEADER.pack(MAGIC, codec, _PADDING, size_bytes, payload_bytes, chunk)
        return answer if done == length and answer.startswith(expected, at) else None
