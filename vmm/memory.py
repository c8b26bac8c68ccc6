"""Guest memory becomes a block image: the pages that are the guest's own, over those of the image it came from.

What it costs follows the own pages, not the size of the memory: for 1 GiB the look at all page table entries takes 8 ms
of CPU, a MB of own pages 4 ms (reading 0.35, hashing 0.9, the rest compression on the store's threads, which goes on
meanwhile), and a restored guest that was idle for two seconds 14 ms of this thread's CPU, 15 to 40 ms in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from imaged.chunks import ChunkBatchWriter
from imaged.derive import derive
from imaged.ids import ChunkId
from imaged.parentleaves import ParentLeaves
from vmm.captured import Captured
from vmm.errors import VmSetupError, VmStateError
from vmm.gather import PIECES_LIMIT, gather
from vmm.pagemap import Range, private_ranges
from vmm.parentfile import ParentFile

_BATCH_BYTES = 2 << 20
"""Of pages read at once: what is compared and cut next is in the processor's cache still, and is stored meanwhile."""


def capture_memory(
    store: ChunkBatchWriter,
    pid: int,
    memory_path: Path,
    parent: ChunkId | None,
    size_bytes: int,
    *,
    before: ParentLeaves | None = None,
) -> Captured:
    """The memory of the stopped guest of process `pid`, which maps the file `memory_path` privately.

    `parent` is the image that the file shows, None when it is empty. `before` gives its leaves where they may have to
    be fetched, or are read ahead; else the store does. Nothing is durable before `store.flush`.
    VmStateError when the process is gone or does not map the file.
    """
    ranges = private_ranges(pid, memory_path, size_bytes)
    with ParentFile.open(memory_path if parent is not None else None) as file:
        changes = (change for some, data in _read(pid, ranges) for change in file.different(some, data))
        image = derive(store, parent, size_bytes, changes, before=before)
    return Captured(id=image, dirty_bytes=sum(one.length_bytes for one in ranges))


def read_ahead(pid: int, memory_path: Path, size_bytes: int, before: ParentLeaves) -> None:
    """The leaves that the guest has changed something of until now: it runs still. Errors as of `capture_memory`, which
    then meets them too; ChunkError."""
    step = before.root.leaf_bytes
    for one in private_ranges(pid, memory_path, size_bytes):
        before.read(range(one.offset - one.offset % step, one.offset + one.length_bytes, step))


def _read(pid: int, ranges: Iterable[Range]) -> Iterator[tuple[list[tuple[int, int]], bytearray]]:
    """What the process has in these ranges, many at once: (offset, length in bytes) of each, and all their bytes."""
    for some in _batches(ranges):
        try:
            data = gather(pid, [(one.address, one.length_bytes) for one in some])
        except PermissionError as error:
            hint = "run this as the user that started the VM, or as root"
            raise VmSetupError(f"memory of process {pid} can not be read: {error.strerror}", hint=hint) from error
        except OSError as error:
            raise VmStateError(f"memory of process {pid} can not be read: {error.strerror}") from error
        wanted = sum(one.length_bytes for one in some)
        if len(data) != wanted:
            raise VmStateError(
                f"guest memory can not be read, or process {pid} ended: {len(data)} of {wanted} bytes from "
                f"{some[0].offset} on were there"
            )
        yield [(one.offset, one.length_bytes) for one in some], data


def _batches(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """As many as one call takes, large ones cut."""
    some: list[Range] = []
    size_bytes = 0
    for one in ranges:
        for start in range(0, one.length_bytes, _BATCH_BYTES):
            length_bytes = min(_BATCH_BYTES, one.length_bytes - start)
            if some and (len(some) == PIECES_LIMIT or size_bytes + length_bytes > _BATCH_BYTES):
                yield some
                some, size_bytes = [], 0
            some.append(Range(offset=one.offset + start, length_bytes=length_bytes, address=one.address + start))
            size_bytes += length_bytes
    if some:
        yield some
