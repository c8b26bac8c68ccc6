"""Guest memory becomes a block image: the pages that are the guest's own, over those of the image it came from.

What it costs follows the own pages, not the size of the memory: for 1 GiB the look at all page table entries takes 8 ms
of CPU, a MB of own pages 4 ms (reading 0.35, hashing 0.9, the rest compression on the store's threads, which goes on
meanwhile), and a restored guest that was idle for two seconds 14 ms of this thread's CPU, 15 to 40 ms in all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from imaged.chunks import ChunkReader, ChunkReadWriter
from imaged.derive import CELL_BYTES, derive
from imaged.ids import ChunkId
from vmm.captured import Captured
from vmm.errors import VmStateError
from vmm.pagemap import Range, open_process, private_ranges
from vmm.parentfile import ParentFile


def capture_memory(
    store: ChunkReadWriter,
    pid: int,
    memory_path: Path,
    parent: ChunkId | None,
    size_bytes: int,
    *,
    reader: ChunkReader | None = None,
) -> Captured:
    """The memory of the stopped guest of process `pid`, which maps the file `memory_path` privately.

    `parent` is the image that the file shows, None when it is empty. `reader` gives the parent's chunks where they may
    have to be fetched; else the store does. Nothing is durable before `store.flush`.
    VmStateError when the process is gone or does not map the file.
    """
    ranges = private_ranges(pid, memory_path, size_bytes)
    with open_process(pid, "mem") as fd, ParentFile.open(memory_path if parent is not None else None) as before:
        changes = (change for page in _pages(fd, ranges) for change in before.different(*page))
        image = derive(store, parent, size_bytes, changes, reader=reader)
    return Captured(id=image, dirty_bytes=sum(one.length_bytes for one in ranges))


def _pages(fd: int, ranges: Iterable[Range]) -> Iterator[tuple[int, bytes]]:
    """What the process has in these ranges, cut as the image is."""
    for one in ranges:
        offset, end = one.offset, one.offset + one.length_bytes
        while offset < end:
            stop = min(end, (offset // CELL_BYTES + 1) * CELL_BYTES)
            try:
                data = os.pread(fd, stop - offset, one.address + offset - one.offset)
            except OSError as error:
                raise VmStateError(f"guest memory at byte {offset} can not be read: {error.strerror}") from error
            if len(data) != stop - offset:
                raise VmStateError(f"the process ended while its memory was read, at byte {offset}")
            yield offset, data
            offset = stop
