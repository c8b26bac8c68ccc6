"""A VM from an image: its kernel boots, and its agent answers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fuse import vmlease
from fuse.node import OpenImage
from imaged.blockformat import IMAGE_LIMIT_BYTES
from imaged.errors import InvalidNameError
from imaged.ids import BLOCK_BYTES
from imaged.names import ImageName
from imaged.progress import NoProgress, Progress
from imaged.snapshot import CPUS_LIMIT
from vmm import facts, identity, names, recovery
from vmm.agentproto import TEXT_MAX
from vmm.blocks import require_device
from vmm.console import panic
from vmm.disk import SIZE_LEAST_BYTES, create_disk
from vmm.errors import AgentError, VmArgumentError, VmError, VmNotFoundError
from vmm.guest.initramfs import initramfs
from vmm.guest.kernel import find_kernel, kernel_arguments
from vmm.held import Held, disk_faults
from vmm.machine import LEAST_MEMORY_BYTES, MIB, MOST_MEMORY_BYTES, MachineSpec
from vmm.qemu import Qemu
from vmm.record import State, VmRecord
from vmm.vms import Vms
from vmm.workload import taken

_BOOT_S = 300.0
"""Emulated guests that share a busy host take long; one that hangs is seen on its console before."""
_ROOMY_BYTES = 192 * MIB
"""Below this, what a guest of Debian lacks when it does not boot is memory: with 64 MiB its kernel gives up."""
_ID = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a VM has. `disk_bytes` 0: its writes are in its RAM. `network` is "none" or "user"."""

    memory_bytes: int
    cpus: int = 1
    disk_bytes: int = 0
    network: str = "none"

    def check(self) -> None:
        """VmArgumentError when there can be no such VM."""
        least, most = LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES
        if not _is_int(self.memory_bytes) or self.memory_bytes % MIB or not least <= self.memory_bytes <= most:
            hint = f"whole MiB, from {least // MIB}M to {most // MIB}M"
            raise VmArgumentError(f"a VM can not have {_size(self.memory_bytes)} of memory", hint=hint)
        if not _is_int(self.cpus) or not 1 <= self.cpus <= CPUS_LIMIT:
            raise VmArgumentError(f"a VM can not have {self.cpus!r} processors", hint=f"from 1 to {CPUS_LIMIT}")
        if not _is_int(self.disk_bytes) or (
            self.disk_bytes
            and (self.disk_bytes % BLOCK_BYTES or not SIZE_LEAST_BYTES <= self.disk_bytes <= IMAGE_LIMIT_BYTES)
        ):
            hint = f"a multiple of {BLOCK_BYTES} bytes, from {SIZE_LEAST_BYTES // MIB}M to {IMAGE_LIMIT_BYTES // MIB}M"
            raise VmArgumentError(f"a VM can not have a disk of {_size(self.disk_bytes)}", hint=hint)
        if self.network not in ("none", "user"):
            raise VmArgumentError(f"network {self.network!r} is none", hint="one of none, user")


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
    shape.check()
    recovery.sweep(vms)
    with vms.make(_wanted(name or _base(image), shape), among=_among(vms, image, name)) as held:
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
    shape.check()
    recovery.sweep(vms)
    wanted = _wanted(name or _base(image), shape, temporary=True)
    with vms.make(wanted, among=_among(vms, image, name)) as held:
        _boot(vms, held, open_image, progress or NoProgress())
    try:
        yield held.record
    finally:
        try:
            _remove_temporary(vms, held)
        finally:
            held.release_owner()


def _wanted(name: str, shape: Shape, *, temporary: bool = False) -> VmRecord:
    return replace(
        VmRecord.unknown(name),
        memory_bytes=shape.memory_bytes,
        cpus=shape.cpus,
        disk_bytes=shape.disk_bytes,
        network=shape.network,
        created_ns=time.time_ns(),
        temporary=temporary,
    )


def _among(vms: Vms, image: str, name: str | None) -> Iterator[str] | None:
    """The names that it may have when none was given."""
    return names.free_of_snapshots(vms.config, _base(image)) if name is None else None


def _base(image: str) -> str:
    """What VMs of an image are called, with a number: the last part of its name."""
    try:
        repo = ImageName.parse(image).repo
    except InvalidNameError:
        return "vm"
    return "vm" if _ID.fullmatch(repo) else repo.rpartition("/")[2]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(size_bytes: object) -> str:
    """For people."""
    if not isinstance(size_bytes, int) or size_bytes % MIB:
        return f"{size_bytes!r} bytes"
    return f"{size_bytes // MIB}M"


def _boot(vms: Vms, held: Held, open_image: Callable[[], OpenImage], progress: Progress) -> None:
    config, record = vms.config, held.record
    lease = vmlease.take(config, held.name)
    try:
        image = open_image()
        held.save(
            image=image.id,
            image_name=image.name if image.name != image.id else "",
            image_config=taken(image.config),
            device=require_device(config),
        )
        kernel = find_kernel(config.home, configured_kernel(), progress)
        progress.start(f"booting {held.name}", None)
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
            console_log=held.console_log,
        )
        try:
            with Qemu.start(spec, held.run, inherit=[lease]) as qemu:
                _wait(held, qemu)
            held.save(state=State.RUNNING)
        except BaseException:
            recovery.end(held.run)
            raise
    finally:
        os.close(lease)


def _wait(held: Held, qemu: Qemu) -> None:
    """Until the guest is up and has its identity. VmError with what it said on its console."""
    try:
        identity.give(held.run, held.name, mac=None, timeout_s=_BOOT_S)
    except AgentError as error:
        said = [line.strip() for line in qemu.console_tail().splitlines() if line.strip()]
        shown = next((line for line in reversed(said) if line.startswith("pvisor:")), said[-1] if said else "")
        panicked = panic(held.console_log)
        if panicked:
            shown = f"its kernel panicked: {panicked}"
        ending = qemu.ending()
        cause = f"{error.message}" if ending is None else ending.error("QEMU ended").message
        hint = "" if shown else error.hint
        if held.record.memory_bytes < _ROOMY_BYTES:
            hint = f"it has {held.record.memory_bytes // MIB}M of memory: give it more with --memory"
        raise VmError(f"VM {held.name!r} did not boot: {shown[:TEXT_MAX] or cause}", hint=hint) from error


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
