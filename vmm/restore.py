"""A VM from a snapshot: resumed where it was parked, or as many new ones as are asked for.

Memory and disk are files of the node daemon, so nothing is copied: pages come when the guest touches them, and all
forks of a snapshot share them in the host's page cache.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from fuse import node, vmlease
from fuse.opened import OpenSnapshot
from fuse.warm import warm
from imaged.progress import NoProgress, Progress
from vmm import facts, identity, names, recovery
from vmm.blocks import daemon_gone, require_device
from vmm.capacity import check_count
from vmm.errors import AgentError, VmArgumentError, VmError
from vmm.held import Held, disk_faults
from vmm.machine import MachineSpec
from vmm.process import has_ended, last_ending
from vmm.qemu import Qemu
from vmm.record import State, VmRecord
from vmm.source import base_name, open_snapshot
from vmm.vms import Vms
from vmm.workload import taken

_AGENT_S = 120.0
_ENDED_HINT = "try again; `dmesg` says whether the host's kernel killed it for lack of memory"
_AT_ONCE = 2 * (os.cpu_count() or 1) + 2


def resume(
    vms: Vms,
    text: str,
    *,
    name: str | None = None,
    network: str | None = None,
    server: str | None = None,
    progress: Progress | None = None,
) -> VmRecord:
    """Let a parked VM go on; or a new VM from a snapshot, called `name`, or as the snapshot is.

    `text` is a VM or a snapshot (name, id or the start of one). With a `name` of its own a parked VM stays parked, and
    a new one goes on from its snapshot. A snapshot that is not here is pulled lazily from `server` first.

    `network` is "user" for outgoing connections, "none" for an interface that leads nowhere. Without it a VM keeps its
    own and a snapshot what it was made with, but for one that was pulled, which gets "none": whoever made it does not
    choose who reaches this host. VmStateError, VmExistsError, SnapshotMismatchError, NodeError, NotFoundError,
    UpstreamError, VmArgumentError; a parked VM is then parked still.
    """
    progress = progress or NoProgress()
    _check(text, network)
    recovery.sweep(vms)
    if name in (None, text) and names.NAME.fullmatch(text) and vms.exists(text):
        with vms.hold(text) as held:
            if held.record.state != State.PARKED:
                from vmm.survey import refusal

                raise refusal(vms, held.record, State.PARKED)
            held.record = replace(held.record, state=State.RESUMING)  # written down before anything is started
            try:
                _restore(vms, [held], held.record.snapshot, server, progress, network or _own(held.record))
            except BaseException:
                recovery.undo_resume(held)
                raise
            return held.record
    snapshot, network = _source(vms, text, network)
    if name is not None:
        return _make(vms, snapshot, [name], None, server, progress, network)[0]
    base = base_name(vms, text, server, progress)
    among = names.free_of_snapshots(vms.config, base) if vms.path(base).exists() else None
    return _make(vms, snapshot, [base], among, server, progress, network)[0]


def fork(
    vms: Vms,
    text: str,
    count: int = 1,
    *,
    network: str | None = None,
    server: str | None = None,
    progress: Progress | None = None,
) -> list[VmRecord]:
    """New VMs from a running VM, which goes on, from a parked one or from a snapshot: all of them, or none.

    They are called NAME-1, NAME-2 and so on, by what is free of VMs and of snapshots. `network` and errors as of
    `resume`.
    """
    progress = progress or NoProgress()
    _check(text, network)
    check_count(count)
    recovery.sweep(vms)
    running = vms.get(text) if _is_vm(vms, text) else None
    if running is not None and running.state != State.PARKED:
        from vmm.parking import frozen

        among = names.free_of_snapshots(vms.config, text)
        with frozen(vms, text, progress=progress) as taken_down:
            network = network or _own(running)
            return _make(vms, taken_down.snapshot, [text] * count, among, server, progress, network)
    base = base_name(vms, text, server, progress)
    snapshot, network = _source(vms, text, network)
    among = names.free_of_snapshots(vms.config, base)
    return _make(vms, snapshot, [base] * count, among, server, progress, network)


def _check(text: object, network: object) -> None:
    if not isinstance(text, str):
        raise VmArgumentError(f"{text!r} is no text", hint="give the name of a VM or a snapshot as a str")
    if network not in (None, "none", "user"):
        raise VmArgumentError(f"network {network!r} is none", hint="one of none, user")


def _own(record: VmRecord) -> str | None:
    """The network that a VM of this host has, which its user chose; None without an interface."""
    return record.network if record.network != "none" else None


def _network(opened: OpenSnapshot, asked: str | None) -> str:
    """What a machine gets that goes on from this snapshot. It can not lose an interface: then that leads nowhere."""
    made_with = opened.record.machine.network
    if made_with == "none":
        if asked == "user":
            label = opened.name or opened.id[:12]
            raise VmArgumentError(
                f"snapshot {label} was made without a network", hint="boot a VM with `pvisor vm run --net user`"
            )
        return "none"
    if asked is None:
        asked = "none" if opened.pulled else made_with
    return "user" if asked == "user" else "restricted"


def _source(vms: Vms, text: str, network: str | None) -> tuple[str, str | None]:
    """The snapshot that the text means, and the network asked for. Of a parked VM that is its snapshot by its id, so
    that another one of its name is not meant, and the VM's own network when none was asked for."""
    if _is_vm(vms, text):
        record = vms.get(text)
        if record.state == State.PARKED:
            return record.snapshot, network or _own(record)
    return text, network


def _is_vm(vms: Vms, text: str) -> bool:
    """Whether the text is a VM, which is put in order when the last command was cut off. VmBusyError."""
    if not names.NAME.fullmatch(text) or not vms.exists(text):
        return False
    if not recovery.is_settled(vms, vms.get(text)):
        with vms.hold_as_it_is(text) as held:
            return recovery.settle(vms, held)
    return True


def _make(
    vms: Vms,
    snapshot: str,
    called: Sequence[str],
    among: Iterator[str] | None,
    server: str | None,
    progress: Progress,
    network: str | None,
) -> list[VmRecord]:
    """New VMs, called so, or by the next of the names `among` that are free."""
    with ExitStack() as stack:
        helds = [stack.enter_context(vms.make(_wanted(name), among=among)) for name in called]
        _restore(vms, helds, snapshot, server, progress, network)
        return [held.record for held in helds]


def _wanted(name: str) -> VmRecord:
    """What the snapshot says is filled in when it is open."""
    return replace(VmRecord.unknown(name), created_ns=time.time_ns())


def _restore(
    vms: Vms, helds: Sequence[Held], snapshot: str, server: str | None, progress: Progress, network: str | None
) -> None:
    """All of them run and have an identity of their own when this returns; when it raises nothing of them runs."""
    config = vms.config
    with ExitStack() as stack:
        leases = {}
        for held in helds:
            leases[held.name] = vmlease.take(config, held.name)
            stack.callback(os.close, leases[held.name])
        opened = open_snapshot(config, snapshot, server, progress)
        warming = threading.Thread(target=_warm, args=(opened,), name="warm", daemon=True)
        warming.start()
        facts.check_host(opened.record.machine)
        network = _network(opened, network)
        who = helds[0].name if len(helds) == 1 else f"{len(helds)} VMs"
        progress.start(f"starting {who} from {opened.name or opened.id[:12]}", None)
        device = require_device(config)
        try:
            _each(helds, lambda held: _start(vms, held, opened, leases[held.name], device, network))
        except BaseException:
            for held in helds:
                recovery.end(held.run)
            raise


def _each(helds: Sequence[Held], start: Callable[[Held], None]) -> None:
    """Start them, several at a time; the first error ends all."""
    if len(helds) == 1:
        start(helds[0])
        return
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(min(_AT_ONCE, len(helds)), thread_name_prefix="start")
    try:
        futures = [pool.submit(start, held) for held in helds]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for held in helds:  # what waits for a QEMU goes on when that is gone
            recovery.end(held.run)
        raise
    finally:
        pool.shutdown(wait=True)


def _start(vms: Vms, held: Held, opened: OpenSnapshot, lease: int, device: int, network: str) -> None:
    record, machine = opened.record, replace(opened.record.machine, network=network)
    held.save(
        image=opened.image.id,
        image_name=opened.image.name if opened.image.name != opened.image.id else "",
        image_config=taken(opened.image.config),
        memory_bytes=machine.memory_bytes,
        cpus=machine.cpus,
        disk_bytes=record.disk_bytes,
        snapshot=opened.id,
        snapshot_name=opened.name,
        device=device,
        boot=VmRecord.current_boot(),
    )
    held.make_run()
    if opened.disk_path is not None:
        from vmm.qcow2 import create_overlay

        with disk_faults(f"disk of VM {held.name!r}"):
            create_overlay(held.disk, opened.disk_path, record.disk_bytes)
    mac = identity.new_mac() if machine.network != "none" else None
    spec = MachineSpec(
        memory_bytes=machine.memory_bytes,
        cpus=machine.cpus,
        accelerator=machine.accelerator,
        network=machine.network,
        memory_path=opened.memory_path,
        metadata_path=opened.image.metadata_path,
        data_path=opened.image.data_path,
        upper_path=held.disk if opened.disk_path is not None else None,
        mac=mac,
        state_path=opened.state_path,
        machine=machine.machine,
        kernel_release=machine.kernel,
        console_log=held.console_log,
    )
    try:
        with Qemu.start(spec, held.run, inherit=[lease], recorded=machine) as qemu:
            qemu.wait_loaded()
            node.check_snapshot(vms.config, opened.id)
            qemu.cont()
        identity.give(held.run, held.name, mac=mac, timeout_s=_AGENT_S)
    except OSError as error:  # device state, of the daemon's files as well
        raise daemon_gone(str(error.filename), error) from error
    except VmError as error:
        if not has_ended(held.run):
            raise
        if require_device(vms.config) != device:  # it may have died of a daemon that is gone,
            raise daemon_gone(str(vms.config.blocks), OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))) from error
        node.check_snapshot(vms.config, opened.id)  # or of memory that can not be read: that chunk is named then
        ending = last_ending(held.run)
        if ending is None or not isinstance(error, AgentError):  # which knows of its connection only
            raise
        raise ending.error(f"QEMU ended when VM {held.name!r} began to run", hint=_ENDED_HINT) from error
    held.save(state=State.RUNNING, network=machine.network)  # not before: a parked VM that is not resumed keeps its own


def _warm(opened: OpenSnapshot) -> None:
    try:
        warm(opened.memory_path, opened.working_set)
    except OSError as error:
        import logging

        logging.getLogger(__name__).warning(
            "snapshot %s: its memory can not be read ahead: %s", opened.id, error.strerror
        )
