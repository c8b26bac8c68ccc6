"""What a command that was cut off left of a VM becomes what it should be: running, parked, or no VM at all.

Whoever takes a VM's lock calls `settle`. That the lock was free means that the command is gone, so what vm.json says
it was doing is what it did not finish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from imaged.config import Config
from imaged.errors import ChunkError, FormatError, PvisorError
from vmm import process
from vmm.errors import VmNotFoundError, VmStateError
from vmm.held import Held, disk_faults
from vmm.process import Process
from vmm.record import Park, State, VmRecord
from vmm.vmlock import is_owned, release
from vmm.vms import Vms

if TYPE_CHECKING:
    from imaged.chunkstore.store import ChunkStore


def is_settled(vms: Vms, record: VmRecord) -> bool:
    """Whether a VM without a command at work is what its record says, as far as that can be told without its lock."""
    if record.state == State.PARKED:
        return not vms.run(record.name).exists()
    return record.state == State.RUNNING and not (record.temporary and not is_owned(vms.path(record.name)))


def settle(vms: Vms, held: Held) -> bool:
    """Finish or undo what was begun; False when the VM is no more. VmError when its QEMU does not do as it is told."""
    record = held.record
    match record.state:
        case State.RUNNING if is_settled(vms, record):
            return True
        case State.PARKED:
            clear(held)
        case State.RESUMING:
            undo_resume(held)
        case State.PARKING | State.FORKING:
            snapshot = find_published(vms.config, record)
            if snapshot is not None:
                finish_park(held, snapshot)
            else:
                undo_park(held)
        case _:  # half made, half removed, or left by the command it belongs to
            end(held.run)
            if record.state == State.REMOVING:
                from vmm.removal import drop_own_park

                drop_own_park(vms, held)
            vms.remove(held)
            return False
    return True


def find_published(config: Config, record: VmRecord) -> str | None:
    """The id of the snapshot that this park has made, or None: it is in the store as a whole or not at all."""
    if record.park is None or not record.park.name or not config.store.is_dir():
        return None
    from imaged.chunkstore.store import ChunkStore

    with ChunkStore.open(config.store, readonly=True) as store:
        return published(store, record)


def published(store: ChunkStore, record: VmRecord) -> str | None:
    """As `find_published`, in an open store."""
    from imaged import snapshots

    park = record.park
    if park is None or not park.name:
        return None
    try:
        ref = store.snapshots.get(park.name)
        if ref is None:
            return None
        found = snapshots.load(store, park.name, ref).record
    except (ChunkError, FormatError):  # another one that was there before, or nothing that a VM could go on from
        return None
    return str(ref.record) if (found.vm, found.created_ns) == (record.name, park.created_ns) else None


def finish_park(held: Held, snapshot: str) -> None:
    """The snapshot is durable: the VM is parked, and nothing of it runs any more."""
    park = held.record.park or Park(name="", created_ns=0, own=False)
    own = {"own_park": snapshot, "own_park_name": park.name} if park.own else {}
    with ending(held.run):  # it takes as long as the writing down, with the guest's memory to be freed
        held.save(state=State.PARKED, park=None, temporary=False, snapshot=snapshot, snapshot_name=park.name, **own)
    clear(held)


def undo_resume(held: Held) -> None:
    """The VM is parked as before. On a full disk that is written down when there is room: until then whoever takes its
    lock comes here again."""
    clear(held)
    held.save_if_room(state=State.PARKED)


def undo_park(held: Held) -> None:
    """The VM goes on as if nothing had been, with the time of now. QemuError, and the next command tries again."""
    from vmm.qemu import Qemu

    lives = process.alive(held.run)
    if lives:
        with Qemu.attach(held.run) as qemu:
            qemu.cont()
    held.undo()
    if lives:
        from vmm.identity import set_clock

        set_clock(held.run, held.name)


def sweep(vms: Vms) -> None:
    """Remove the VMs that belong to commands which are gone. What another command works on is left to that; what can
    not be removed is logged, and the next command tries again."""
    for name in vms.temporary():
        if is_owned(vms.path(name)):
            continue
        try:
            held = vms.try_hold(name)
            if held is not None:
                try:
                    settle(vms, held)
                finally:
                    release(held.lock_fd)
        except VmNotFoundError:
            continue
        except PvisorError as error:
            import logging

            logging.getLogger(__name__).warning("VM %s, whose command is gone: %s", name, error.message)


def clear(held: Held) -> None:
    """Nothing of a parked VM is left outside the store."""
    end(held.run)
    held.clear_run()
    with disk_faults(f"VM {held.name!r}: {held.path}"):
        held.disk.unlink(missing_ok=True)
        held.memory.unlink(missing_ok=True)
        held.console_log.unlink(missing_ok=True)


def end(run: Path) -> None:
    """Kill the QEMU of this directory, if it has one. QemuTimeoutError when it does not end."""
    with ending(run):
        pass


@contextmanager
def ending(run: Path) -> Iterator[None]:
    """As `end`: the kill before the block, the waiting for it after."""
    try:
        found = Process.attach(run)
    except VmStateError:
        yield
        return
    try:
        found.send_kill()
        yield
        found.kill()
    finally:
        found.close()
