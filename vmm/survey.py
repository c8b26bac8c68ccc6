"""What the VMs of this host do now: vm.json says what was meant, QEMU and the node daemon what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from imaged.config import Config
from imaged.errors import ChunkError, FormatError, PvisorError
from vmm import process
from vmm.blocks import current_device
from vmm.console import panic, trim
from vmm.errors import QemuError, VmArgumentError, VmError, VmNotFoundError, VmSetupError, VmStateError
from vmm.held import console_log
from vmm.qemu import Qemu
from vmm.record import State, VmRecord
from vmm.recovery import is_settled, settle
from vmm.vmlock import release
from vmm.vms import Vms

_AT_ONCE = 32
_ASK_S = 3.0
"""QEMU answers within some ms, on a busy host too; one that does not holds up nothing else."""
PAUSED, ENDED, CUT_OFF = "paused", "ended", "cut off"
STOPPED, SILENT, DAMAGED = "stopped", "not answering", "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmStatus:
    """A VM now. `state` is that of the record, or `paused`, `ended` (its QEMU is gone), `cut off` (the node daemon
    that its memory comes from is gone), `stopped` (QEMU's process is), `not answering` or `damaged` (files of it are
    gone or can not be read: then the record may say nothing); `detail` says why.

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
    """Every VM, by name. What crashed commands left is put in order on the way."""
    found = list(vms.found())
    if not found:
        return []
    device = current_device(vms.config)

    def one(name: str, record: VmRecord | None) -> VmStatus | None:
        return _damaged(vms, name) if record is None else _look(vms, record, device)

    with ThreadPoolExecutor(min(_AT_ONCE, len(found)), thread_name_prefix="survey") as pool:
        return [status for status in pool.map(one, *zip(*found, strict=True)) if status is not None]


def status(vms: Vms, name: str) -> VmStatus:
    """VmNotFoundError, VmArgumentError."""
    try:
        record = vms.get(name)
    except (VmSetupError, VmArgumentError):
        raise
    except VmError:
        return _damaged(vms, name)
    found = _look(vms, record, current_device(vms.config))
    if found is None:
        raise VmNotFoundError(name, " any more")
    return found


def look(vms: Vms, records: Iterable[VmRecord]) -> list[VmStatus]:
    """Of VMs that were just started, by the same command; as they are now, whoever works on them."""
    device = current_device(vms.config)
    return [_look_at_running(vms, record, device) for record in records]


def refusal(vms: Vms, record: VmRecord, wanted: State) -> VmStateError:
    """Why a VM, in whose record nothing is left to be put in order, is not `wanted`: and what to do about it."""
    found = VmStatus(record=record, state=record.state)
    if record.state == State.RUNNING:
        found = _look_at_running(vms, record, current_device(vms.config))
    name, detail = record.name, f" ({found.detail})" if found.detail else ""
    if found.state == ENDED:
        return VmStateError(f"VM {name!r} has ended: {found.detail}", hint=_after_the_end(vms.config, record))
    hints = {
        State.PARKED: f"`pvisor vm resume {name}` first",
        State.RUNNING: f"`pvisor vm fork {name}` makes another one of it",
        PAUSED: "let it go on with the program that stopped it",
        CUT_OFF: f"`pvisor vm park {name}` first, while it lives",
        DAMAGED: f"`pvisor vm rm {name}` ends it",
        STOPPED: f"`kill -CONT {found.pid}` lets it go on, `pvisor vm rm {name}` ends it",
        SILENT: f"`pvisor vm rm {name}` ends it",
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
    from imaged.chunkstore.store import ChunkStore
    from imaged.ids import ChunkId

    snapshot = ChunkId.parse(record.snapshot)
    try:
        with ChunkStore.open(config.store, readonly=True) as store:
            names = [name for name, ref in store.snapshots.items() if ref.record == snapshot]
            if record.snapshot_name in names:
                return record.snapshot_name
            return names[0] if names else record.snapshot if store.has(snapshot) else ""
    except (ChunkError, FormatError):  # a damaged name beside it
        return record.snapshot


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
    found = _look_at_running(vms, record, device)
    if found.state == ENDED:  # a command that is done by now may have ended it
        try:
            now = vms.get(record.name)
        except VmNotFoundError:
            return None
        except VmError:
            return found
        if now != record:
            return _look(vms, now, device)
    return found


def _look_at_running(vms: Vms, record: VmRecord, device: int) -> VmStatus:
    run, log = vms.run(record.name), console_log(vms.path(record.name))
    if not record.booted:
        return VmStatus(record=record, state=ENDED, detail="the host was booted since")
    try:
        found = process.Process.attach(run)
    except VmStateError:
        return VmStatus(record=record, state=ENDED, detail=_cause(run, log))
    found.close()
    trim(log)
    pid, private_bytes = found.pid, _private_bytes(found.pid)
    if device != record.device:
        detail = "the node daemon that its memory and disks come from is gone"
        return VmStatus(record=record, state=CUT_OFF, detail=detail, pid=pid, private_bytes=private_bytes)
    if process.is_stopped(pid):
        state, detail = STOPPED, "its QEMU was stopped by a signal"
    elif not (run / "qmp.sock").exists():
        state, detail = DAMAGED, f"its QEMU runs, but no command reaches it: files of {run} are gone"
    else:
        state, detail = _ask(run, log)
    return VmStatus(record=record, state=state, detail=detail, pid=pid, private_bytes=private_bytes)


def _cause(run: Path, log: Path) -> str:
    ending = process.last_ending(run)
    if ending is None:
        return "what was known of it is gone"
    if ending.powered_off:
        said = panic(log)
        if said:
            return f"the guest's kernel panicked: {said}"
        return "the guest powered off or rebooted"
    return f"{ending}: {ending.log_line}" if ending.log_line else str(ending)


def _ask(run: Path, log: Path) -> tuple[str, str]:
    try:
        with Qemu.attach(run) as qemu:
            status = qemu.status(timeout_s=_ASK_S)
    except (QemuError, VmStateError) as error:
        return (ENDED, _cause(run, log)) if not process.alive(run) else (SILENT, error.message)
    return (State.RUNNING, "") if status == "running" else (PAUSED, "" if status == "paused" else status)


def _damaged(vms: Vms, name: str) -> VmStatus:
    """One whose vm.json is gone or can not be read."""
    cause = "its vm.json can not be read"
    try:
        vms.get(name)
    except VmError as error:
        cause = error.message.partition(" is damaged: ")[2] or error.message
    pid = process.pid_of(vms.run(name))
    what = "removes what is left of it" if pid is None else "ends and removes it"
    return VmStatus(
        record=VmRecord.unknown(name),
        state=DAMAGED,
        detail=f"{cause}; `pvisor vm rm {name}` {what}",
        pid=pid,
        private_bytes=0 if pid is None else _private_bytes(pid),
    )


def _private_bytes(pid: int) -> int:
    """Anonymous memory: the pages that the guest has changed, and QEMU's own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "VmSwap:"))]
    return sum(int(number) << 10 for number in kilobytes)
