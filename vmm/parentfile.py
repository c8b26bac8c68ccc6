"""What the file of a guest's parent has, as far as the page cache knows it: pages that are equal need not be stored.

A page becomes a guest's own when the guest writes to it, and for that the kernel has read what was there: so it is in
the page cache, unless memory was short since. Comparing with that takes no decompression. What is not there counts as
different: to have it fetched from a disk or a server would take longer than to store the page again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from vmm.gather import PIECES_LIMIT, gather

_PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # not in Python's mmap module
_SAME_RUN, _OTHER_RUN = re.compile(rb"\x01+"), re.compile(rb"\x00+")
_NEAR_BYTES = 1 << 20
"""Pieces no further apart are asked about at once: asking takes 12 us, and 50 ns for each page in between."""
_LIBC = ctypes.CDLL(None)


class ParentFile:
    """A parent's file, open. For one thread."""

    def __init__(self, mapped: mmap.mmap | None) -> None:
        self._mapped = mapped
        self._address = 0 if mapped is None else ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    @classmethod
    @contextmanager
    def open(cls, path: Path | None) -> Iterator[Self]:
        """Without a path, or when the file can not be opened (its daemon is gone), everything is different."""
        mapped = None if path is None else _mapped(path)
        try:
            yield cls(mapped)
        finally:
            if mapped is not None:
                mapped.close()

    def different(self, pieces: Sequence[tuple[int, int]], data: bytes | bytearray) -> Iterator[tuple[int, memoryview]]:
        """The runs of pages that are not known to be in the file: offset and bytes.

        `data` are the bytes of the pieces one after the other. Each (offset, length in bytes) begins at a page and is
        whole pages, but for the last of all.
        """
        same, view = self._same(pieces, data), memoryview(data)
        place = 0
        for offset, length in pieces:
            first = place // _PAGE_BYTES
            for run in _OTHER_RUN.finditer(same, first, first - (-length // _PAGE_BYTES)):
                start, end = run.start() * _PAGE_BYTES, min(run.end() * _PAGE_BYTES, place + length)
                yield offset + start - place, view[start:end]
            place += length

    def _same(self, pieces: Sequence[tuple[int, int]], data: bytes | bytearray) -> bytearray:
        """1 for each page of the data that is cached and equal, else 0."""
        same = self._cached(pieces, -(-len(data) // _PAGE_BYTES))
        runs = [
            (place // _PAGE_BYTES + run.start(), place // _PAGE_BYTES + run.end(), offset + run.start() * _PAGE_BYTES)
            for offset, place, length in _placed(pieces)
            for run in _SAME_RUN.finditer(same[place // _PAGE_BYTES : -(-(place + length) // _PAGE_BYTES)])
        ]
        for number in range(0, len(runs), PIECES_LIMIT):
            some = runs[number : number + PIECES_LIMIT]
            wanted = [(self._address + offset, (end - first) * _PAGE_BYTES) for first, end, offset in some]
            try:
                held = gather(os.getpid(), wanted)
            except OSError:
                held = bytearray()
            place = 0
            for first, end, _ in some:
                for page in range(first, end):
                    start = page * _PAGE_BYTES
                    mine = data[start : start + _PAGE_BYTES]
                    # What was let go of since, and is not to be had again, is not equal.
                    same[page] = held[place : place + len(mine)] == mine
                    place += _PAGE_BYTES
        return same

    def _cached(self, pieces: Sequence[tuple[int, int]], page_count: int) -> bytearray:
        """A byte for each page of the data, 1 when the file's is in the page cache.

        RWF_NOWAIT would tell too, but not of FUSE files.
        """
        cached = bytearray(page_count)
        if self._mapped is None:
            return cached
        near: list[tuple[int, int, int]] = []
        for one in _placed(pieces):
            if near and one[0] - near[-1][0] - near[-1][2] > _NEAR_BYTES:
                self._ask(near, cached)
                near = []
            near.append(one)
        if near:
            self._ask(near, cached)
        return cached

    def _ask(self, near: Sequence[tuple[int, int, int]], cached: bytearray) -> None:
        """For pieces (offset, place in the data, length) that are near one another."""
        assert self._mapped is not None
        start, end = near[0][0], near[-1][0] + near[-1][2]
        found = ctypes.create_string_buffer(-(-(end - start) // _PAGE_BYTES))
        if end > len(self._mapped):
            return
        if _LIBC.mincore(ctypes.c_void_p(self._address + start), ctypes.c_size_t(end - start), found):
            return
        raw = found.raw
        for offset, place, length in near:
            first, count = (offset - start) // _PAGE_BYTES, -(-length // _PAGE_BYTES)
            cached[place // _PAGE_BYTES : place // _PAGE_BYTES + count] = raw[first : first + count]


def _placed(pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(offset, place in the data, length) of each."""
    place = 0
    for offset, length in pieces:
        yield offset, place, length
        place += length


def _mapped(path: Path) -> mmap.mmap | None:
    """The whole file, to ask about it and to have it copied from: nothing touches it. None when that can not be."""
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE  # ctypes wants it writable
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(fd, 0, flags=flags, prot=access)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
