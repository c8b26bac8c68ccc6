"""A guest that is just being stopped, into the store: its device state, memory and disk, over what it came from."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from imaged.blockbuilder import write_blob
from imaged.chunks import ChunkReader
from imaged.chunkstore.store import ChunkStore
from imaged.errors import PvisorError
from imaged.frame import ZSTD_LEVEL
from imaged.ids import ChunkId
from imaged.parentleaves import ParentLeaves
from imaged.progress import Progress
from imaged.snapshot import Machine, SnapshotRecord
from imaged.snapshots import Snapshot
from imaged.transfer.acquire import snapshot_reader
from vmm.disk import capture_disk
from vmm.errors import VmSetupError
from vmm.held import Held, disk_faults
from vmm.memory import capture_memory, read_ahead
from vmm.qemu import Qemu
from vmm.record import Park

_STATE_CHUNK_BYTES = 64 << 10


class Parent:
    """The snapshot that a VM stands on, if any; what is not here of it is at the servers that it was pulled from. A
    context manager: for one thread at a time."""

    def __init__(self, store: ChunkStore, held: Held) -> None:
        self._store, self._held = store, held
        self._stack = ExitStack()
        self.record: SnapshotRecord | None = None
        self._reader: ChunkReader = store
        self.memory: ParentLeaves | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def open(self, pid: int) -> None:
        """Also read the leaves that will be edited, for the process `pid` of a guest that runs still: while it is being
        stopped its answers are waited for, and there is time. ChunkError, FormatError."""
        held = self._held
        if not held.record.snapshot:
            return
        record = SnapshotRecord.parse(self._store.get(ChunkId.parse(held.record.snapshot)))
        known = Snapshot(name=None, id=record.id, record=record, ref=None)
        self._reader = self._stack.enter_context(snapshot_reader(self._store, known))
        self.record, self.memory = record, ParentLeaves(self._reader, record.memory, held.record.memory_bytes)
        with suppress(PvisorError):  # what can not be read is told by who needs it
            read_ahead(pid, self.memory_path, held.record.memory_bytes, self.memory)

    @property
    def memory_path(self) -> Path:
        """The file that QEMU maps."""
        return self._held.memory if self.record is None else self._held.blocks / str(self.record.memory)

    def disk(self) -> ParentLeaves | None:
        """None when there is no parent. ChunkError, FormatError."""
        if self.record is None:
            return None
        return ParentLeaves(self._reader, self.record.disk, self._held.record.disk_bytes)


def save_state(store: ChunkStore, held: Held, qemu: Qemu) -> ChunkId:
    """The device state of the stopped guest, in the store; what it wrote to its disk is in the file then."""
    if held.record.disk_bytes:
        qemu.flush_disk()
    path = held.run / "state"
    try:
        with disk_faults(f"device state of VM {held.name!r}"):
            qemu.save_state(path)
            return write_blob(store, path.read_bytes(), _STATE_CHUNK_BYTES)
    finally:
        path.unlink(missing_ok=True)


def write_down(
    store: ChunkStore,
    held: Held,
    qemu: Qemu,
    parent: Parent,
    devices: ChunkId,
    machine: Machine,
    park: Park,
    progress: Progress,
) -> SnapshotRecord:
    """Memory and disk of the stopped guest into the store, and the record that names these and its `devices`."""
    record = held.record
    progress.start(f"writing down {held.name}", None)
    told = _Telling(store, progress)
    below = parent.record
    memory = capture_memory(
        told,
        qemu.pid,
        parent.memory_path,
        below.memory if below is not None else None,
        record.memory_bytes,
        before=parent.memory,
    )
    disk = None
    if record.disk_bytes:
        disk_below = below.disk if below is not None else None
        try:
            disk = capture_disk(told, held.disk, disk_below, record.disk_bytes, before=parent.disk())
        except OSError as error:
            raise VmSetupError(
                f"disk of VM {held.name!r}: {error.filename or held.disk}: {error.strerror}",
                hint=f"its guest may have all of it still: copy out what you need with `pvisor vm exec {held.name}`",
            ) from error
    return SnapshotRecord(
        image=ChunkId.parse(record.image),
        memory=memory.id,
        disk=disk.id if disk is not None else None,
        disk_bytes=record.disk_bytes,
        state=devices,
        machine=machine,
        parent=ChunkId.parse(record.snapshot) if record.snapshot else None,
        created_ns=park.created_ns,
        vm=held.name,
        dirty_bytes=memory.dirty_bytes + (disk.dirty_bytes if disk is not None else 0),
    )


class _Telling:
    """A store that tells how many bytes were put into it. Threads may share it as they may the store."""

    def __init__(self, store: ChunkStore, progress: Progress) -> None:
        self._store, self._progress = store, progress
        self._lock = threading.Lock()
        self.get, self.frames, self.flush = store.get, store.frames, store.flush

    def put(self, data: bytes, *, level: int = ZSTD_LEVEL) -> ChunkId:
        chunk = self._store.put(data, level=level)
        self._advance(len(data))
        return chunk

    def put_all(self, pieces: Sequence[bytes]) -> list[ChunkId]:
        chunks = self._store.put_all(pieces)
        self._advance(sum(map(len, pieces)))
        return chunks

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._progress.advance(size_bytes)
