"""What a snapshot's machine depends on: this host's accelerator, firmware and processor, and how they are compared."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from imaged.snapshot import Machine
from vmm.errors import SnapshotMismatchError, VmSetupError
from vmm.machine import LAYOUT, MachineSpec, cpu

_QEMU = "qemu-system-x86_64"
_KVM = Path("/dev/kvm")
_CPUINFO = Path("/proc/cpuinfo")
_FIRMWARE_DIRECTORIES = (Path("/usr/share/seabios"), Path("/usr/share/qemu"))
_FIRMWARE = ("bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin")
_SHOWN = {
    "layout": "pVisor's layout of the machine",
    "qemu": "QEMU build",
    "machine": "machine type",
    "accelerator": "accelerator",
    "cpu": "processor",
    "cpus": "number of processors",
    "memory_bytes": "memory size in bytes",
    "network": "network",
    "firmware": "firmware",
}
_HINTS = {
    "layout": "resume it with the pVisor it was made with, or boot a new VM",
    "qemu": "install the QEMU it was made with, or boot a new VM",
    "firmware": "install the firmware it was made with (seabios, qemu-system-data), or boot a new VM",
    "cpu": "resume it on a host with that processor, or boot a new VM",
}


def program() -> str:
    """The path of QEMU. VmSetupError."""
    for directory in os.get_exec_path():
        path = Path(directory, _QEMU)
        if os.access(path, os.X_OK) and path.is_file():
            return str(path)
    raise VmSetupError(f"{_QEMU} is not installed", hint="install the Debian package qemu-system-x86")


def accelerator() -> str:
    """ "kvm" when a guest can really run on it, else "tcg".

    /dev/kvm may open on a host whose processor shows no virtualisation: then making the first processor fails.
    """
    try:
        os.close(os.open(_KVM, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return "tcg"
    flags = _cpuinfo("flags").split()
    return "kvm" if "vmx" in flags or "svm" in flags else "tcg"


def here(spec: MachineSpec, *, qemu: str, machine: str) -> Machine:
    """The facts of a machine that is built from `spec` by this `qemu` as the resolved type `machine`."""
    return Machine(
        qemu=qemu,
        machine=machine,
        accelerator=spec.accelerator,
        cpu=processor(spec.accelerator),
        cpus=spec.cpus,
        memory_bytes=spec.memory_bytes,
        network=spec.network,
        firmware=firmware(),
        kernel=spec.kernel_release,
        layout=LAYOUT,
    )


def check_host(recorded: Machine) -> None:
    """SnapshotMismatchError when this host can not continue it; the QEMU build is compared once QEMU has started."""
    _compare(recorded.layout, LAYOUT, "layout")
    _compare(recorded.accelerator, accelerator(), "accelerator")
    _compare(recorded.cpu, processor(recorded.accelerator), "cpu")
    _compare(recorded.firmware, firmware(), "firmware")


def check(recorded: Machine, found: Machine) -> None:
    """SnapshotMismatchError for the first fact that differs; the kernel's release may, as it is in the memory."""
    for name in _SHOWN:
        _compare(getattr(recorded, name), getattr(found, name), name)


def processor(accelerator: str) -> str:
    """The processor a guest sees: under KVM the host's name and flags, as `host` means another one elsewhere."""
    model = cpu(accelerator)
    if accelerator != "kvm":
        return model
    flags = " ".join(sorted(_cpuinfo("flags").split()))
    return f"{model} ({_cpuinfo('model name')}, {_digest([flags.encode()])[:16]})"


def firmware() -> str:
    """BLAKE3 in hex over the firmware files that QEMU loads. VmSetupError."""
    return _digest(_read(name) for name in _FIRMWARE)


def _read(name: str) -> bytes:
    for directory in _FIRMWARE_DIRECTORIES:
        try:
            return (directory / name).read_bytes()
        except FileNotFoundError:
            continue
    hint = "install the Debian packages seabios and qemu-system-data"
    raise VmSetupError(f"QEMU's firmware {name} is not installed", hint=hint)


def _digest(parts: Iterable[bytes]) -> str:
    from blake3 import blake3

    digest = blake3()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _cpuinfo(field: str) -> str:
    """A field of the first processor."""
    for line in _CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _compare(recorded: str | int, found: str | int, name: str) -> None:
    if recorded != found:
        hint = _HINTS.get(name, "resume it on a host that has this, or boot a new VM")
        raise SnapshotMismatchError(_SHOWN[name], recorded=str(recorded), found=str(found), hint=hint)
