"""Writing a VM down: as a parked one that then holds no process and no memory, or as what its forks begin with.

The order makes a crash harmless at any point: the intent is written, the agent holds the jobs still, the guest stops,
its device state, memory and disk go into the store, and once the intent is durable the record of the snapshot and last
its name. Before the name is there the VM goes on, by this command or the next (`vmm.recovery`); from then on it is
parked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fuse import vmlease
from imaged import snapshots
from imaged.blockbuilder import write_blob
from imaged.chunks import ChunkReader
from imaged.chunkstore.store import ChunkStore
from imaged.errors import NameTakenError, PvisorError
from imaged.frame import ZSTD_LEVEL
from imaged.ids import ChunkId
from imaged.names import snapshot_name
from imaged.progress import NoProgress, Progress
from imaged.snapshot import Machine, SnapshotRecord
from imaged.snapshots import Snapshot
from imaged.transfer.acquire import snapshot_reader
from vmm import recovery
from vmm.disk import capture_disk
from vmm.errors import VmError, VmStateError
from vmm.held import Held, disk_faults
from vmm.identity import hold_still, set_clock
from vmm.memory import capture_memory
from vmm.naming import Naming
from vmm.qemu import Qemu
from vmm.record import Park, State
from vmm.vms import Vms

_STATE_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """What a VM was written down as. `dirty_bytes` of its memory and disk were captured from it, `memory_bytes` is what
    it has; the guest stood for `stopped_s`."""

    vm: str
    snapshot: str
    name: str
    dirty_bytes: int
    memory_bytes: int
    stopped_s: float


def park(vms: Vms, name: str, *, snapshot: str | None = None, progress: Progress | None = None) -> Parked:
    """Write a running VM into the store and end it; the snapshot gets this name, or one of the VM's own.

    A VM that is parked again replaces its own last park, and nothing else: where another snapshot has the VM's name,
    its own is the next free of NAME-1, NAME-2. VmStateError when it does not run, VmExistsError when `snapshot` is the
    name of another snapshot. After any other error the VM goes on.
    """
    progress = progress or NoProgress()
    if snapshot is not None:
        snapshot_name(snapshot)
    with vms.hold(name) as held:
        _require_running(vms, held)
        with _store(vms) as store, store.lease(f"parking VM {name}"):
            naming = Naming(vms, store, held, snapshot)
            parked = _capture(vms, store, held, State.PARKING, naming, progress)
            try:
                recovery.finish_park(held, parked.snapshot)
            except PvisorError as error:
                hint = f"`pvisor vm ls` tidies up; {error.hint}"
                raise VmError(f"VM {name!r} is parked as {parked.name}, but {error.message}", hint=hint) from error
            vmlease.drop(vms.config, name)
        return parked


@contextmanager
def frozen(vms: Vms, name: str, *, progress: Progress | None = None) -> Iterator[Parked]:
    """A running VM written down for its forks, without a name; it goes on before the block begins, and no collection
    removes the snapshot before it ends."""
    with _store(vms) as store, store.lease(f"forking VM {name}") as lease:
        with vms.hold(name) as held:
            _require_running(vms, held)
            taken = _capture(vms, store, held, State.FORKING, None, progress or NoProgress())
            lease.keep(ChunkId.parse(taken.snapshot))
            recovery.undo_park(held)  # it goes on
        yield taken


def _store(vms: Vms) -> ChunkStore:
    """One that keeps nothing of a capture that fails: on a disk that it filled, nobody could go on."""
    return ChunkStore.open(vms.config.store, commit_s=None)


def _require_running(vms: Vms, held: Held) -> None:
    if held.record.state != State.RUNNING:
        from vmm.survey import refusal

        raise refusal(vms, held.record, State.RUNNING)


def _capture(
    vms: Vms, store: ChunkStore, held: Held, state: State, naming: Naming | None, progress: Progress
) -> Parked:
    """The guest stopped, and written down as a durable snapshot, without a name when there is no naming. After an error
    it goes on."""
    record, name = held.record, naming.choose() if naming is not None else ""
    park = Park(name=name, created_ns=time.time_ns(), own=naming is not None and naming.is_own)
    with _attached(vms, held) as qemu:
        if qemu.status() != "running":
            raise VmStateError(f"VM {held.name!r} is paused by another program", hint="let it go on first")
        machine = qemu.facts()
        held.begin(state=state, park=park)
        began = time.monotonic()
        try:
            with _meanwhile(held.sync):  # the intent is durable before the name is
                if _has_its_daemon(vms, held):
                    hold_still(held.run, held.name)
                qemu.stop()
                made = _write_down(store, held, qemu, machine, park, progress)
            snapshot, dirty_bytes = str(_publish(store, held, naming, park, made)), made.dirty_bytes
        except BaseException as error:
            published = _published(store, held, error)
            if published is None:
                _go_on(held, qemu, error)
                raise
            snapshot, dirty_bytes = published, 0  # it came when the name was there already
        return Parked(
            vm=record.name,
            snapshot=snapshot,
            name=held.record.park.name if held.record.park is not None else name,
            dirty_bytes=dirty_bytes,
            memory_bytes=record.memory_bytes,
            stopped_s=time.monotonic() - began,
        )


@contextmanager
def _meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """The block and the work, which waits for a disk, side by side; an error of the work is raised after the block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="meanwhile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]


def _has_its_daemon(vms: Vms, held: Held) -> bool:
    """Without it nothing more is asked of the guest: what it touches for that may not be in memory, and end QEMU."""
    from vmm.blocks import current_device

    return current_device(vms.config) == held.record.device


def _published(store: ChunkStore, held: Held, error: BaseException) -> str | None:
    """The snapshot when its name is there in spite of the error; that it can not be told is said in the error."""
    try:
        return recovery.published(store, held.record)
    except PvisorError as second:
        if isinstance(error, PvisorError):
            outcome = f"VM {held.name} stands still ({second.message}): `pvisor vm ls` lets it go on, or it is parked"
            error.hint = f"{outcome}; {error.hint}" if error.hint else outcome
        raise error from second


def _publish(store: ChunkStore, held: Held, naming: Naming | None, park: Park, made: SnapshotRecord) -> ChunkId:
    """Durable, and then under its name. VmExistsError when another got the name that was asked for meanwhile."""
    if naming is None:
        return snapshots.publish(store, None, made)
    while True:
        try:
            return snapshots.publish_over(store, park.name, made, over=naming.replaceable(park.name))
        except NameTakenError:
            park = replace(park, name=naming.choose())
            held.save(park=park)  # who puts it in order must know which


@contextmanager
def _attached(vms: Vms, held: Held) -> Iterator[Qemu]:
    try:
        qemu = Qemu.attach(held.run)
    except VmStateError as error:
        from vmm.survey import refusal

        raise refusal(vms, held.record, State.RUNNING) from error
    with qemu:
        yield qemu


def _go_on(held: Held, qemu: Qemu, error: BaseException) -> None:
    """The guest continues, and the error says so. When it can not, the next command on the VM tries again, unless its
    QEMU has ended."""
    outcome = f"VM {held.name} runs on"
    try:
        qemu.cont()
        held.undo()
        set_clock(held.run, held.name)
    except PvisorError as second:
        ending = qemu.ending()
        if ending is None:
            outcome = f"VM {held.name} could not be continued yet ({second.message}): `pvisor vm ls` tries again"
        else:
            outcome = f"VM {held.name} has ended: {ending}"
            with suppress(VmError):  # else the next command does
                held.undo()
    if isinstance(error, PvisorError):
        error.hint = f"{outcome}; {error.hint}" if error.hint else outcome


def _write_down(
    store: ChunkStore, held: Held, qemu: Qemu, machine: Machine, park: Park, progress: Progress
) -> SnapshotRecord:
    """Everything of the stopped guest into the store, and the record that names it."""
    record = held.record
    parent = None
    if record.snapshot:
        parent = SnapshotRecord.parse(store.get(ChunkId.parse(record.snapshot)))
    if record.disk_bytes:
        qemu.flush_disk()
    state_path = held.run / "state"
    try:
        with disk_faults(f"device state of VM {held.name!r}"):
            qemu.save_state(state_path)
            state = write_blob(store, state_path.read_bytes(), _STATE_CHUNK_BYTES)
    finally:
        state_path.unlink(missing_ok=True)
    progress.start(f"writing down {held.name}", None)
    told = _Telling(store, progress)
    with ExitStack() as stack:
        reader: ChunkReader = store
        if parent is not None:  # what is not here of it is at the servers that it was pulled from
            known = Snapshot(name=None, id=parent.id, record=parent, ref=None)
            reader = stack.enter_context(snapshot_reader(store, known))
        memory = capture_memory(
            told,
            qemu.pid,
            _memory_path(held, parent),
            parent.memory if parent is not None else None,
            record.memory_bytes,
            reader=reader,
        )
        disk = None
        if record.disk_bytes:
            disk = capture_disk(
                told, held.disk, parent.disk if parent is not None else None, record.disk_bytes, reader=reader
            )
    return SnapshotRecord(
        image=ChunkId.parse(record.image),
        memory=memory.id,
        disk=disk.id if disk is not None else None,
        disk_bytes=record.disk_bytes,
        state=state,
        machine=machine,
        parent=ChunkId.parse(record.snapshot) if record.snapshot else None,
        created_ns=park.created_ns,
        vm=held.name,
        dirty_bytes=memory.dirty_bytes + (disk.dirty_bytes if disk is not None else 0),
    )


def _memory_path(held: Held, parent: SnapshotRecord | None) -> Path:
    """The file that its QEMU maps."""
    return held.memory if parent is None else held.blocks / str(parent.memory)


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
