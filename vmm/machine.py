"""The QEMU command line of a VM.

Device state is saved by one QEMU and loaded by another, so both must build the same machine: every device has its
own id and PCI address here, and what a restore leaves out (kernel, initramfs) is no device. The guest sees disks by
serial number, ports by name, and nothing of the host: no path, no socket, no host port but those that `network="user"`
reaches as the host itself would (QEMU's user network answers for the host's loopback at 10.0.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from imaged.snapshot import CPUS_LIMIT, MACHINE_TYPE, SIZE_LIMIT_BYTES
from vmm.errors import VmSetupError

# A guest boots a quarter faster than on "pc", where ACPI works out the interrupt of each device at length.
MACHINE = "q35"
LAYOUT = 3
"""Raised whenever the devices below change: device state of another layout can not be loaded."""
UPPER_FILE = "upper-file"
UPPER_OPTIONS = {"driver": "qcow2", "node-name": "upper", "discard": "unmap"}
"""The writable disk's block node, over that of its file."""
MIB = 1 << 20
LEAST_MEMORY_BYTES = 96 * MIB
"""With 64 MiB the kernel can not unpack its first root."""
MOST_MEMORY_BYTES = SIZE_LIMIT_BYTES
NETWORKS = ("none", "user", "restricted")
# Devices by PCI slot; 0 and 31 are the chipset's.
_SERIAL_SLOT, _METADATA_SLOT, _DATA_SLOT, _UPPER_SLOT, _NETWORK_SLOT, _RANDOM_SLOT = range(3, 9)
# Translated code is bounded, because QEMU's own choice is an eighth of the host's memory.
_TRANSLATED_MIB = 256
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """What a VM is built from.

    `memory_path` is a file of `memory_bytes` that is mapped privately and never written: empty and sparse for a boot,
    the memory image's FUSE file for a restore. `metadata_path` and `data_path` are the image's two disks, `upper_path`
    the writable disk (qcow2). A boot has `kernel`, `initramfs` and `kernel_arguments`; a restore has `state_path`, the
    device state. `machine` is a QEMU machine type: an alias for a boot, what the snapshot says for a restore.
    `kernel_release` is only noted. `network` "restricted" is the interface of "user", and what it sends goes nowhere.
    What the guest prints on its serial line is appended to `console_log` as well.
    """

    memory_bytes: int
    cpus: int
    accelerator: str
    network: str
    memory_path: Path
    metadata_path: Path
    data_path: Path
    upper_path: Path | None = None
    mac: str | None = None
    kernel: Path | None = None
    initramfs: Path | None = None
    kernel_arguments: str = ""
    kernel_release: str = ""
    state_path: Path | None = None
    machine: str = MACHINE
    console_log: Path | None = None

    def check(self) -> None:
        """VmSetupError when there can be no such machine."""
        if self.memory_bytes % MIB or not MIB <= self.memory_bytes <= MOST_MEMORY_BYTES:
            raise VmSetupError(
                f"a VM has 1 to {MOST_MEMORY_BYTES // MIB} whole MiB of memory, not {self.memory_bytes} bytes"
            )
        if not 1 <= self.cpus <= CPUS_LIMIT:
            raise VmSetupError(f"a VM has 1 to {CPUS_LIMIT} processors, not {self.cpus}")
        if MACHINE_TYPE.fullmatch(self.machine) is None:
            raise VmSetupError(f"{self.machine[:80]!r} is no machine type", hint="one is like pc-q35-7.2")
        if self.network not in NETWORKS:
            raise VmSetupError(f"a VM's network is one of {', '.join(NETWORKS)}, not {self.network!r}")
        if (self.kernel is None) == (self.state_path is None):
            raise VmSetupError("a VM starts from a kernel or from device state, from one of them")


class Descriptors(NamedTuple):
    """The listening sockets that QEMU inherits, and the device state it may load."""

    monitor: int
    serial: int
    agents: tuple[int, ...]


def arguments(spec: MachineSpec, program: str, descriptors: Descriptors) -> list[str]:
    """The argument vector. A restored machine is stopped and waits for its device state."""
    argv = [program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _SANDBOX]
    argv += _machine(spec)
    argv += _sockets(descriptors, spec.console_log)
    argv += _disk("metadata", _METADATA_SLOT, spec.metadata_path)
    argv += _disk("data", _DATA_SLOT, spec.data_path)
    if spec.upper_path is not None:
        argv += _upper(spec.upper_path)
    if spec.network != "none":
        # A restore needs QEMU's user network even where it leads nowhere: its state is a part of the device state.
        argv += ["-netdev", "user,id=net0,ipv6=off" + (",restrict=on" if spec.network == "restricted" else "")]
        mac = f",mac={spec.mac}" if spec.mac else ""
        argv += _device(f"virtio-net-pci,id=nic0,netdev=net0,romfile={mac}", _NETWORK_SLOT)
    argv += ["-object", "rng-builtin,id=entropy0"]
    argv += _device("virtio-rng-pci,id=rng0,rng=entropy0", _RANDOM_SLOT)
    argv += _start(spec)
    return argv


def cpu(accelerator: str) -> str:
    """The processor model: under KVM the host's own, because it is as fast as the host; else all that TCG can do.

    Without "fast string" instructions under TCG: kernel and libc would copy with `rep movsb`, one byte at a time there.
    """
    return "host" if accelerator == "kvm" else "max,erms=off,fsrm=off"


def _machine(spec: MachineSpec) -> list[str]:
    memory = f"memory-backend-file,id=memory0,size={spec.memory_bytes},share=off,prealloc=off,merge=off,dump=off"
    accelerator = "kvm" if spec.accelerator == "kvm" else f"tcg,tb-size={_TRANSLATED_MIB}"
    machine = f"{spec.machine},sata=off,smbus=off,vmport=off,memory-backend=memory0,suppress-vmdesc=on"
    machine += ",dump-guest-core=off,mem-merge=off"
    return [
        *("-accel", accelerator, "-machine", machine, "-cpu", cpu(spec.accelerator)),
        *("-smp", f"cpus={spec.cpus},sockets=1,cores={spec.cpus},threads=1,maxcpus={spec.cpus}"),
        *("-m", f"size={spec.memory_bytes // MIB}M"),
        *("-object", f"{memory},mem-path={_escaped(spec.memory_path)}"),
        # The stream that xen-save-devices-state writes has no configuration section.
        *("-global", "migration.send-configuration=off", "-global", "migration.x-events=on"),
    ]


def _sockets(descriptors: Descriptors, console_log: Path | None) -> list[str]:
    """Monitor, serial line and the agent's ports: sockets that listen already, so that nobody polls for them."""

    def chardev(name: str, fd: int, more: str = "") -> list[str]:
        return ["-chardev", f"socket,id={name},fd={fd},server=on,wait=off{more}"]

    log = "" if console_log is None else f",logfile={_escaped(console_log)},logappend=on"
    argv = [*chardev("monitor", descriptors.monitor), "-mon", "chardev=monitor,mode=control"]
    argv += [*chardev("console", descriptors.serial, log), "-device", "isa-serial,id=serial0,chardev=console"]
    # Port 0 would be a console's.
    argv += _device(f"virtio-serial-pci,id=ports0,max_ports={len(descriptors.agents) + 1}", _SERIAL_SLOT)
    for number, fd in enumerate(descriptors.agents):
        argv += chardev(f"agent{number}", fd)
        port = f"virtserialport,id=port{number},bus=ports0.0,nr={number + 1}"
        argv += ["-device", f"{port},chardev=agent{number},name=pvisor.agent.{number}"]
    return argv


def _disk(name: str, slot: int, path: Path) -> list[str]:
    """A read-only disk. Its page cache is the host's, shared by all that read the file; what can not be read is an I/O
    error to the guest."""
    node = f"driver=file,node-name={name},filename={_escaped(path)},read-only=on,locking=off"
    device = f"virtio-blk-pci,id=disk-{name},drive={name},serial={name},num-queues=1,rerror=report"
    return ["-blockdev", node, *_device(device, slot)]


def _upper(path: Path) -> list[str]:
    file = f"file.driver=file,file.node-name={UPPER_FILE},file.filename={_escaped(path)}"
    node = ",".join(f"{key}={value}" for key, value in UPPER_OPTIONS.items()) + f",{file}"
    device = "virtio-blk-pci,id=disk-upper,drive=upper,serial=upper,num-queues=1,rerror=report,werror=report"
    return ["-blockdev", node, *_device(device, _UPPER_SLOT)]


def _device(device: str, slot: int) -> list[str]:
    """Virtio 0.9: a modern device saves 1024 queues, 45 KB, and a restore of five takes 14 ms more of CPU."""
    return ["-device", f"{device},bus=pcie.0,addr={slot:#x},disable-modern=on"]


def _start(spec: MachineSpec) -> list[str]:
    if spec.state_path is not None:
        return ["-S", "-incoming", "defer"]
    argv = ["-kernel", str(spec.kernel), "-append", spec.kernel_arguments]
    return argv if spec.initramfs is None else [*argv, "-initrd", str(spec.initramfs)]


def _escaped(path: Path) -> str:
    """In QEMU's option lists a comma is doubled."""
    return str(path).replace(",", ",,")
