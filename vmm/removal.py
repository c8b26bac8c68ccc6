"""Taking a VM away, and with a parked one the snapshot that it is parked as under a name of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from imaged.errors import FormatError, PvisorError
from vmm import record, recovery, stray
from vmm.held import Held
from vmm.record import State
from vmm.vms import Vms


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """`snapshot` is the name of the snapshot that went too, or None; `kept` that of the VM's own last park which stays,
    because the VM was not parked or the caller wants it so."""

    name: str
    snapshot: str | None = None
    kept: str | None = None


def remove(vms: Vms, name: str, *, keep_snapshot: bool = False) -> Removed:
    """End a VM and remove what it wrote. VmNotFoundError, VmBusyError.

    With a parked VM goes the snapshot that it is, when its name is the VM's own, unless `keep_snapshot`. Of any other
    its own last park stays: it is what was saved before. So do snapshots of other names, and VMs forked from any.
    """
    if _is_damaged(vms, name):
        vms.remove_damaged(name)
        return Removed(name=name)
    with vms.hold_as_it_is(name) as held:
        with contextlib.suppress(PvisorError):  # a QEMU that does not do as it is told is ended all the same
            if not recovery.settle(vms, held):
                return Removed(name=name)
        record = held.record
        goes = record.state == State.PARKED and record.snapshot == record.own_park and not keep_snapshot
        kept = None if goes else _own_park(vms, held)
        held.save_if_room(state=State.REMOVING, own_park=record.own_park if goes else "")
        recovery.end(held.run)
        snapshot = drop_own_park(vms, held)
        vms.remove(held)
        return Removed(name=name, snapshot=snapshot, kept=kept)


def drop_own_park(vms: Vms, held: Held) -> str | None:
    """Take its name from the snapshot that the VM was last parked as; the name, or None when there is no such one."""
    name = _own_park(vms, held)
    if name is None:
        return None
    from imaged.chunkstore.store import ChunkStore

    with ChunkStore.open(vms.config.store) as store:
        return name if store.snapshots.delete(name) else None


def _own_park(vms: Vms, held: Held) -> str | None:
    """The name that the VM's own last park still has."""
    record = held.record
    if not record.own_park or not vms.config.store.is_dir():
        return None
    from imaged.chunkstore.store import ChunkStore

    with ChunkStore.open(vms.config.store, readonly=True) as store:
        try:
            ref = store.snapshots.get(record.own_park_name)
        except FormatError:  # a damaged row, nobody knows of what
            return None
    return record.own_park_name if ref is not None and str(ref.record) == record.own_park else None


def _is_damaged(vms: Vms, name: str) -> bool:
    try:
        record.load(vms.path(name))
    except (FileNotFoundError, NotADirectoryError):
        return stray.find(vms.run(name)) is not None
    except (OSError, FormatError):
        return True
    return False
