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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Self

_PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # not in Python's mmap module
_CACHED_RUN = re.compile(rb"\x01+")
_LIBC = ctypes.CDLL(None)


class ParentFile:
    """A parent's file, open. For one thread."""

    def __init__(self, fd: int, mapped: mmap.mmap | None) -> None:
        self._fd, self._mapped = fd, mapped
        self._address = 0 if mapped is None else ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    @classmethod
    @contextmanager
    def open(cls, path: Path | None) -> Iterator[Self]:
        """Without a path, or when the file can not be opened (its daemon is gone), everything is different."""
        try:
            fd = -1 if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            fd = -1
        mapped = _mapped(fd) if fd >= 0 else None
        try:
            yield cls(fd, mapped)
        finally:
            if mapped is not None:
                mapped.close()
            if fd >= 0:
                os.close(fd)

    def different(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The runs of pages of `data`, which begins at a page, that are not known to be in the file at `offset`."""
        same = self._same(offset, data)
        if not any(same):
            yield offset, data
            return
        for is_same, pages in groupby(range(len(same)), key=same.__getitem__):
            if not is_same:
                numbers = list(pages)
                start, end = numbers[0] * _PAGE_BYTES, (numbers[-1] + 1) * _PAGE_BYTES
                yield offset + start, data[start:end]

    def _same(self, offset: int, data: bytes) -> bytearray:
        """1 for each page that is cached and equal, else 0."""
        same = bytearray(-(-len(data) // _PAGE_BYTES))
        for run in _CACHED_RUN.finditer(self._cached(offset, len(data))):
            start, end = run.start() * _PAGE_BYTES, run.end() * _PAGE_BYTES
            try:
                held = os.pread(self._fd, min(end, len(data)) - start, offset + start)
            except OSError:  # let go of since, and not to be had again
                continue
            if held == data[start:end]:
                same[run.start() : run.end()] = b"\1" * (run.end() - run.start())
                continue
            for page in range(run.start(), run.end()):
                at = page * _PAGE_BYTES
                same[page] = held[at - start : at - start + _PAGE_BYTES] == data[at : at + _PAGE_BYTES]
        return same

    def _cached(self, offset: int, length_bytes: int) -> bytes:
        """A byte for each page, 1 when it is in the page cache. RWF_NOWAIT would tell too, but not of FUSE files."""
        if self._mapped is None or offset + length_bytes > len(self._mapped):
            return b""
        found = ctypes.create_string_buffer(-(-length_bytes // _PAGE_BYTES))
        address = ctypes.c_void_p(self._address + offset)
        return b"" if _LIBC.mincore(address, ctypes.c_size_t(length_bytes), found) else found.raw


def _mapped(fd: int) -> mmap.mmap | None:
    """The whole file, only to ask about it: nothing is read or written through this. None when that can not be."""
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE  # ctypes wants it writable
    try:
        return mmap.mmap(fd, 0, flags=flags, prot=access)
    except (OSError, ValueError):
        return None
