"""Which pages of a privately mapped file a process has of its own: what it wrote, and nothing else.

A page of a MAP_PRIVATE mapping shows the file until the process writes to it; then the kernel gives it a copy, which
is anonymous memory. `/proc/PID/pagemap` has 8 bytes for each page
(https://docs.kernel.org/admin-guide/mm/pagemap.html): bit 63 is set for a page in memory, 62 for one in swap, 61 for
one that belongs to a file. So a page is the process's own when it is in memory or in swap and no file's. Only the
highest byte of each entry is looked at; the physical addresses in the others are zero for those without CAP_SYS_ADMIN.
Newer kernels search by themselves (`vmm.pagescan`).
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imaged.ids import ChunkId
from vmm import pagescan
from vmm.errors import VmSetupError, VmStateError

PAGE_BYTES = mmap.PAGESIZE
_ENTRY_BYTES = 8
_READ_PAGES = 1 << 17
"""Entries read at once: 1 MiB of them is 512 MiB of the mapping."""
_IN_MEMORY, _IN_SWAP, _OF_FILE = 0x80, 0x40, 0x20
_OWN = bytes(bool(top & (_IN_MEMORY | _IN_SWAP)) and not top & _OF_FILE for top in range(256))
"""For `bytes.translate`: the highest byte of an entry becomes 1 for a page of the process's own, else 0."""
_OWN_RUN = re.compile(rb"\x01+")
_MAPS_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """`length_bytes` of a mapped file from `offset` on, and the address at which the process has them."""

    offset: int
    length_bytes: int
    address: int


def mappings(pid: int, path: Path) -> list[Range]:
    """Where the process maps the file privately, in the order of the file.

    The file is known by its inode or by the path that it was opened by: some file systems (btrfs, overlayfs of older
    kernels) tell stat another device than maps, and one whose daemon has ended tells nothing. Where a mount is gone
    paths begin at its root: a file that is called by the id of what it holds is known by that.
    VmStateError when the process is gone, or has no such mapping, or one that shares its writes with the file.
    """
    try:
        status = path.stat()
        inode = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    except OSError:
        inode = None
    name, by_id = os.fsencode(path), os.fsencode(path.name) if ChunkId.is_id(path.name) else None
    found: list[Range] = []
    for line in _maps(pid).splitlines():
        match = _MAPS_LINE.fullmatch(line)
        if match is None:
            continue
        named = match[8] == name or (by_id is not None and match[8].rpartition(b"/")[2] == by_id)
        if not named and (int(match[5], 16), int(match[6], 16), int(match[7])) != inode:
            continue
        if match[3][3:] != b"p":
            raise VmStateError(f"process {pid} maps {path} shared: its writes are in the file, not its own")
        start, end = int(match[1], 16), int(match[2], 16)
        found.append(Range(offset=int(match[4], 16), length_bytes=end - start, address=start))
    if not found:
        hint = "the VM has ended, or was started from another file"
        raise VmStateError(f"process {pid} does not map {path}", hint=hint)
    return sorted(found, key=lambda one: one.offset)


def private_ranges(pid: int, path: Path, size_bytes: int) -> list[Range]:
    """The runs of pages, in the order of the file, that are the process's own within the first `size_bytes` of it.

    The process should stand still meanwhile. VmStateError as `mappings`, and when a part of the file is mapped twice
    or not at all: then nobody knows what the guest sees there.
    """
    found: list[Range] = []
    covered = 0
    with open_process(pid, "pagemap") as fd:
        for mapping in mappings(pid, path):
            if mapping.offset != covered and min(mapping.offset, covered) < size_bytes:
                raise VmStateError(f"process {pid} maps {path} with a gap or an overlap at byte {covered}")
            covered = mapping.offset + mapping.length_bytes
            length_bytes = min(mapping.length_bytes, size_bytes - mapping.offset)
            for first, end in _own_regions(fd, mapping.address, -(-length_bytes // PAGE_BYTES)):
                start = first - mapping.address
                length = min(end - first, length_bytes - start)
                found.append(Range(offset=mapping.offset + start, length_bytes=length, address=first))
    if covered < size_bytes:
        raise VmStateError(f"process {pid} maps only {covered} bytes of {path}, not {size_bytes}")
    return found


def own_runs(entries: bytes) -> Iterator[tuple[int, int]]:
    """(first page, number of pages) of each run of pages of the process's own in these pagemap entries."""
    for match in _OWN_RUN.finditer(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_OWN)):
        yield match.start(), match.end() - match.start()


def _own_regions(fd: int, address: int, page_count: int) -> Iterable[tuple[int, int]]:
    """The addresses (first, end) of the process's own pages, of those from `address` on."""
    try:
        found = pagescan.own_regions(fd, address, address + page_count * PAGE_BYTES)
    except OSError as error:
        raise VmStateError(f"the process's pages can not be looked at: {error.strerror}") from error
    return _read_regions(fd, address, page_count) if found is None else found


def _read_regions(fd: int, address: int, page_count: int) -> Iterator[tuple[int, int]]:
    """As `_own_regions`, by what pagemap says of each page; what two reads find is not joined."""
    for start in range(0, page_count, _READ_PAGES):
        wanted = min(_READ_PAGES, page_count - start) * _ENTRY_BYTES
        entries = os.pread(fd, wanted, (address // PAGE_BYTES + start) * _ENTRY_BYTES)
        if len(entries) != wanted:
            raise VmStateError("the process ended while its pages were looked at")
        for first, count in own_runs(entries):
            yield address + (start + first) * PAGE_BYTES, address + (start + first + count) * PAGE_BYTES


def _maps(pid: int) -> bytes:
    with open_process(pid, "maps") as fd:
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
    return b"".join(parts)


@contextmanager
def open_process(pid: int, name: str) -> Iterator[int]:
    """A file of `/proc/PID`, for reading. VmStateError when the process is gone, VmSetupError when it is not ours."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        raise VmStateError(f"process {pid} is gone", hint="`pvisor vm ls` tells how the VM ended") from None
    except PermissionError as error:
        hint = "run this as the user that started the VM, or as root"
        raise VmSetupError(f"/proc/{pid}/{name} can not be opened: {error.strerror}", hint=hint) from error
    try:
        yield fd
    finally:
        os.close(fd)
