"""What the VMs of this host do now: vm.json says what was meant, QEMU and the node daemon what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fuse import mountinfo, rundir
from imaged.config import Config
from imaged.errors import ChunkError, FormatError, PvisorError
from vmm import process
from vmm.errors import QemuError, VmNotFoundError, VmStateError
from vmm.qemu import Qemu
from vmm.record import State, VmRecord
from vmm.recovery import is_settled, settle
from vmm.vms import Vms, release

_AT_ONCE = 8
PAUSED, ENDED, CUT_OFF = "paused", "ended", "cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmStatus:
    """A VM now. `state` is that of the record, or `paused`, `ended` (its QEMU is gone) or `cut off` (the node daemon
    that its memory comes from is gone); `detail` says why.

    `pid` is QEMU's, and `private_bytes` is the memory that only this VM has.
    """

    record: VmRecord
    state: str
    detail: str = ""
    pid: int | None = None
    private_bytes: int = 0

    @property
    def name(self) -> str:
        return self.record.name


def survey(vms: Vms) -> list[VmStatus]:
    """Every VM but damaged ones, by name. What crashed commands left is put in order on the way."""
    records = vms.list()
    if not records:
        return []
    device = blocks_device(vms.config)
    with ThreadPoolExecutor(min(_AT_ONCE, len(records)), thread_name_prefix="survey") as pool:
        found = pool.map(lambda record: _look(vms, record, device), records)
        return [status for status in found if status is not None]


def status(vms: Vms, name: str) -> VmStatus:
    """VmNotFoundError."""
    found = _look(vms, vms.get(name), blocks_device(vms.config))
    if found is None:
        raise VmNotFoundError(f"no VM {name!r} any more", hint="`pvisor vm ls` lists them")
    return found


def look(vms: Vms, records: Iterable[VmRecord]) -> list[VmStatus]:
    """Of VMs that were just started, by the same command; as they are now, whoever works on them."""
    device = blocks_device(vms.config)
    return [_look_at_running(vms.run(record.name), record, device) for record in records]


def refusal(vms: Vms, record: VmRecord, wanted: State) -> VmStateError:
    """Why a VM, in whose record nothing is left to be put in order, is not `wanted`: and what to do about it."""
    found = VmStatus(record=record, state=record.state)
    if record.state == State.RUNNING:
        found = _look_at_running(vms.run(record.name), record, blocks_device(vms.config))
    name, detail = record.name, f" ({found.detail})" if found.detail else ""
    if found.state == ENDED:
        return VmStateError(f"VM {name!r} has ended: {found.detail}", hint=_after_the_end(vms.config, record))
    hints = {
        State.PARKED: f"`pvisor vm resume {name}` first",
        State.RUNNING: f"`pvisor vm fork {name}` makes another one of it",
        PAUSED: "let it go on with the program that stopped it",
        CUT_OFF: f"`pvisor vm park {name}` first, while it lives",
    }
    hint = hints.get(found.state, "`pvisor vm ls` tells more")
    return VmStateError(f"VM {name!r} is {found.state}{detail}, not {wanted}", hint=hint)


def _after_the_end(config: Config, record: VmRecord) -> str:
    """What is left of a VM that ended, in a hint."""
    snapshot = _last_snapshot(config, record)
    if not snapshot:
        return f"nothing of it was parked: `pvisor vm rm {record.name}` removes what is left"
    return (
        f"`pvisor vm resume {snapshot} --name NEW` goes on from what it was last restored from, "
        f"`pvisor vm rm {record.name}` removes what is left"
    )


def _last_snapshot(config: Config, record: VmRecord) -> str:
    """What to call the snapshot that the VM stands on; "" when there is none, or it is gone."""
    if not record.snapshot or not config.store.is_dir():
        return ""
    from imaged.ids import ChunkId
    from imaged.store import ChunkStore

    snapshot = ChunkId.parse(record.snapshot)
    try:
        with ChunkStore.open(config.store, readonly=True) as store:
            names = [name for name, ref in store.snapshots.items() if ref.record == snapshot]
            if record.snapshot_name in names:
                return record.snapshot_name
            return names[0] if names else record.snapshot if store.has(snapshot) else ""
    except (ChunkError, FormatError):  # a damaged name beside it
        return record.snapshot


def blocks_device(config: Config) -> int:
    """The node daemon's mount as it is now; 0 when no daemon runs. Asks neither the daemon nor its files."""
    if not config.run.is_dir() or rundir.daemon_pid(config) is None:
        return 0
    devices = [mount.device for mount in mountinfo.mount_points() if mount.path == config.blocks]
    return devices[-1] if devices else 0


def _look(vms: Vms, record: VmRecord, device: int) -> VmStatus | None:
    """None for a VM that is gone by now."""
    if not is_settled(vms, record):
        try:
            held = vms.try_hold(record.name)
            if held is None:  # a command is at work
                return VmStatus(record=vms.get(record.name), state=record.state)
            try:
                if not settle(vms, held):
                    return None
                record = held.record
            finally:
                release(held.lock_fd)
        except VmNotFoundError:
            return None
        except PvisorError as error:  # its QEMU or the store does not do as it is told
            return VmStatus(record=record, state=record.state, detail=error.message)
    if record.state != State.RUNNING:
        return VmStatus(record=record, state=record.state)
    return _look_at_running(vms.run(record.name), record, device)


def _look_at_running(run: Path, record: VmRecord, device: int) -> VmStatus:
    if not record.booted:
        return VmStatus(record=record, state=ENDED, detail="the host was booted since")
    try:
        found = process.Process.attach(run)
    except VmStateError:
        return VmStatus(record=record, state=ENDED, detail=_cause(run))
    found.close()
    pid, private_bytes = found.pid, _private_bytes(found.pid)
    if device != record.device:
        detail = "the node daemon that its memory and disks come from is gone"
        return VmStatus(record=record, state=CUT_OFF, detail=detail, pid=pid, private_bytes=private_bytes)
    state, detail = _ask(run)
    return VmStatus(record=record, state=state, detail=detail, pid=pid, private_bytes=private_bytes)


def _cause(run: Path) -> str:
    ending = process.last_ending(run)
    if ending is None:
        return "what was known of it is gone"
    if ending.powered_off:
        return "the guest powered off or rebooted"
    return f"{ending}: {ending.log_line}" if ending.log_line else str(ending)


def _ask(run: Path) -> tuple[str, str]:
    try:
        with Qemu.attach(run) as machine:
            status = machine.status()
    except (QemuError, VmStateError) as error:
        return State.RUNNING, error.message
    return (State.RUNNING, "") if status == "running" else (PAUSED, "" if status == "paused" else status)


def _private_bytes(pid: int) -> int:
    """Anonymous memory: the pages that the guest has changed, and QEMU's own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return sum(int(number) << 10 for number in kilobytes)
