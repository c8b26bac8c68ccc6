"""Writing a VM down: as a parked one that then holds no process and no memory, or as what its forks begin with.

The order makes a crash harmless at any point: the intent is written, the agent holds the jobs still, the guest stops,
its device state, memory and disk go into the store, and once the intent is durable the record of the snapshot and last
its name. Before the name is there the VM goes on, by this command or the next (`vmm.recovery`); from then on it is
parked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from fuse import vmlease
from imaged import snapshots
from imaged.chunkstore.store import ChunkStore
from imaged.errors import NameTakenError, PvisorError
from imaged.ids import ChunkId
from imaged.names import snapshot_name
from imaged.progress import NoProgress, Progress
from imaged.snapshot import SnapshotRecord
from vmm import recovery
from vmm.capture import Parent, save_state, write_down
from vmm.errors import QemuError, VmError, VmStateError
from vmm.held import Held
from vmm.identity import hold_still, set_clock
from vmm.naming import Naming
from vmm.qemu import Qemu
from vmm.record import Park, State
from vmm.vms import Vms


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
    with vms.hold(name) as held, _left_in_order(vms, held):
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
    with ExitStack() as stack:
        with vms.hold(name) as held, _left_in_order(vms, held):
            _require_running(vms, held)
            store = stack.enter_context(_store(vms))
            lease = stack.enter_context(store.lease(f"forking VM {name}"))
            taken = _capture(vms, store, held, State.FORKING, None, progress or NoProgress())
            lease.keep(ChunkId.parse(taken.snapshot))
            recovery.undo_park(held)  # it goes on
        yield taken


@contextmanager
def _left_in_order(vms: Vms, held: Held) -> Iterator[None]:
    """An interrupt may come at any point of the block: what is then half done is finished, or undone, at once, and not
    by the next command, for until then the guest would stand still. An error after which the VM runs on says so."""
    try:
        yield
    except BaseException as error:
        if held.record.state in (State.PARKING, State.FORKING):
            with suppress(PvisorError):  # the next command tries again
                recovery.settle(vms, held)
        if held.record.state == State.RUNNING and isinstance(error, PvisorError):
            _say_that_it_runs(held, error)
        raise


def _say_that_it_runs(held: Held, error: PvisorError) -> None:
    """Where nothing has been said of that yet, and the error is none of its state or its QEMU."""
    if not isinstance(error, VmStateError | QemuError) and not error.hint.startswith(f"VM {held.name} "):
        _add_hint(error, f"VM {held.name} runs on")


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
            # The intent is durable before the name is.
            with _meanwhile(held.sync), Parent(store, held) as parent:
                with _meanwhile(lambda: parent.open(qemu.pid)):
                    if _has_its_daemon(vms, held):
                        hold_still(held.run, held.name)
                    qemu.stop()
                    devices = save_state(store, held, qemu)
                made = write_down(store, held, qemu, parent, devices, machine, park, progress)
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
    try:
        thread.start()
        yield
    finally:
        with suppress(RuntimeError):  # an interrupt came before it was started
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
            _add_hint(error, outcome)
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
        _add_hint(error, outcome)


def _add_hint(error: PvisorError, outcome: str) -> None:
    error.hint = f"{outcome}; {error.hint}" if error.hint else outcome
