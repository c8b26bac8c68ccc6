"""A VM from an image: its kernel boots, and its agent answers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuse import vmlease
from fuse.node import OpenImage
from imaged.errors import InvalidNameError
from imaged.names import ImageName
from imaged.progress import NoProgress, Progress
from vmm import facts, identity, recovery
from vmm.agentproto import TEXT_MAX
from vmm.disk import create_disk
from vmm.errors import AgentError, VmError, VmNotFoundError
from vmm.guest.initramfs import initramfs
from vmm.guest.kernel import find_kernel, kernel_arguments
from vmm.machine import MachineSpec
from vmm.qemu import Qemu
from vmm.record import State, VmRecord
from vmm.vms import Held, Vms, disk_faults, release
from vmm.workload import taken

_BOOT_S = 300.0
"""Emulated guests that share a busy host take long; one that hangs is seen on its console before."""
_ID = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a VM has. `disk_bytes` 0: its writes are in its RAM. `network` is "none" or "user"."""

    memory_bytes: int
    cpus: int = 1
    disk_bytes: int = 0
    network: str = "none"


def boot(
    vms: Vms,
    image: str,
    open_image: Callable[[], OpenImage],
    shape: Shape,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> VmRecord:
    """A VM that runs when this returns, called `name` or by the image and a number.

    `open_image` gives the image `image` once the node daemon can not be stopped any more. Nothing stays of one that
    does not come up. VmExistsError, VmSetupError, QemuError, AgentError, NodeError.
    """
    recovery.sweep(vms)
    with vms.make(_wanted(name or _base(image), shape), numbered=name is None) as held:
        _boot(vms, held, open_image, progress or NoProgress())
        return held.record


@contextmanager
def temporary(
    vms: Vms,
    image: str,
    open_image: Callable[[], OpenImage],
    shape: Shape,
    *,
    name: str | None = None,
    progress: Progress | None = None,
) -> Iterator[VmRecord]:
    """As `boot`, a VM that is removed after the block, however that ends; but one that was parked meanwhile stays."""
    recovery.sweep(vms)
    wanted = _wanted(name or _base(image), shape, temporary=True)
    with vms.make(wanted, numbered=name is None) as held:
        _boot(vms, held, open_image, progress or NoProgress())
    try:
        yield held.record
    finally:
        try:
            _remove_temporary(vms, held)
        finally:
            if held.owner_fd >= 0:
                release(held.owner_fd)


def _wanted(name: str, shape: Shape, *, temporary: bool = False) -> VmRecord:
    return VmRecord(
        name=name,
        state=State.BOOTING,
        image="",
        image_name="",
        image_config={},
        memory_bytes=shape.memory_bytes,
        cpus=shape.cpus,
        disk_bytes=shape.disk_bytes,
        network=shape.network,
        created_ns=time.time_ns(),
        temporary=temporary,
    )


def _base(image: str) -> str:
    """What VMs of an image are called, with a number: the last part of its name."""
    try:
        repo = ImageName.parse(image).repo
    except InvalidNameError:
        return "vm"
    return "vm" if _ID.fullmatch(repo) else repo.rpartition("/")[2]


def _boot(vms: Vms, held: Held, open_image: Callable[[], OpenImage], progress: Progress) -> None:
    config, record = vms.config, held.record
    lease = vmlease.take(config, held.name)
    try:
        image = open_image()
        progress.start(f"booting {held.name}", None)
        held.save(
            image=image.id,
            image_name=image.name if image.name != image.id else "",
            image_config=taken(image.config),
            device=config.blocks.stat().st_dev,
        )
        kernel = find_kernel(config.home, configured_kernel())
        first_root = initramfs(config.home, kernel)
        held.make_run()
        with disk_faults(f"memory file or disk of VM {held.name!r}"):
            with open(held.memory, "xb") as stream:
                stream.truncate(record.memory_bytes)
            if record.disk_bytes:
                create_disk(held.disk, record.disk_bytes)
        accelerator = facts.accelerator()
        spec = MachineSpec(
            memory_bytes=record.memory_bytes,
            cpus=record.cpus,
            accelerator=accelerator,
            network=record.network,
            memory_path=held.memory,
            metadata_path=image.metadata_path,
            data_path=image.data_path,
            upper_path=held.disk if record.disk_bytes else None,
            mac=identity.new_mac() if record.network != "none" else None,
            kernel=kernel.image,
            initramfs=first_root,
            kernel_arguments=kernel_arguments(
                accelerator=accelerator, network=record.network, disk=bool(record.disk_bytes)
            ),
            kernel_release=kernel.release,
        )
        try:
            with Qemu.start(spec, held.run, inherit=[lease]) as machine:
                _wait(held, machine)
            held.save(state=State.RUNNING)
        except BaseException:
            recovery.end(held.run)
            raise
    finally:
        os.close(lease)


def _wait(held: Held, machine: Qemu) -> None:
    """Until the guest is up and has its identity. VmError with what it said on its console."""
    try:
        identity.give(held.run, held.name, mac=None, timeout_s=_BOOT_S)
    except AgentError as error:
        said = [line.strip() for line in machine.console_tail().splitlines() if line.strip()]
        shown = next((line for line in reversed(said) if line.startswith("pvisor:")), said[-1] if said else "")
        ending = machine.ending()
        cause = f"{error.message}" if ending is None else ending.error("QEMU ended").message
        text = f"VM {held.name!r} did not boot: {shown[:TEXT_MAX] or cause}"
        raise VmError(text, hint="" if shown else error.hint) from error


def configured_kernel() -> Path | None:
    """PVISOR_KERNEL."""
    text = os.environ.get("PVISOR_KERNEL")
    return Path(text) if text else None


def _remove_temporary(vms: Vms, held: Held) -> None:
    try:
        with vms.hold(held.name) as again:
            if again.record.temporary and again.record.created_ns == held.record.created_ns:
                recovery.end(again.run)
                vms.remove(again)
    except VmNotFoundError:
        return
