"""The command line of a boot and of a restore make the same machine, and name nothing of the host to the guest."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest

from vmm.errors import VmSetupError
from vmm.machine import Descriptors, MachineSpec, arguments

MIB = 1 << 20
DESCRIPTORS = Descriptors(monitor=10, serial=11, agents=tuple(range(12, 20)))
BOOT = MachineSpec(
    memory_bytes=256 * MIB,
    cpus=2,
    accelerator="tcg",
    network="user",
    memory_path=Path("/run/vms/a/memory"),
    metadata_path=Path("/blocks/meta"),
    data_path=Path("/blocks/data"),
    upper_path=Path("/vms/a/disk.qcow2"),
    mac="02:00:00:00:00:01",
    kernel=Path("/boot/vmlinuz"),
    initramfs=Path("/guest/initramfs"),
    kernel_arguments="console=ttyS0 quiet",
)
RESTORE = dataclasses.replace(
    BOOT,
    kernel=None,
    initramfs=None,
    kernel_arguments="",
    state_path=Path("/state"),
    memory_path=Path("/blocks/memory"),
)


def options(argv: list[str], name: str) -> list[str]:
    return [value for option, value in pairwise(argv) if option == name]


def test_boot_and_restore_differ_in_what_starts_them_only() -> None:
    boot, restore = arguments(BOOT, "qemu", DESCRIPTORS), arguments(RESTORE, "qemu", DESCRIPTORS)
    common = len(boot) - 6
    assert boot[common:] == [
        *("-kernel", "/boot/vmlinuz", "-append", "console=ttyS0 quiet", "-initrd", "/guest/initramfs")
    ]
    assert restore[-3:] == ["-S", "-incoming", "defer"]
    assert boot[:common] == [value.replace("/blocks/memory", "/run/vms/a/memory") for value in restore[:-3]]


def test_every_device_has_an_id_and_the_pci_ones_an_address() -> None:
    devices = options(arguments(BOOT, "qemu", DESCRIPTORS), "-device")
    ids = [part for device in devices for part in device.split(",") if part.startswith("id=")]
    slots = [part for device in devices for part in device.split(",") if part.startswith("addr=")]
    assert len(ids) == len(set(ids)) == len(devices)
    assert len(slots) == len(set(slots)) == sum("-pci," in device for device in devices)


def test_addresses_do_not_depend_on_what_else_there_is() -> None:
    less = dataclasses.replace(BOOT, upper_path=None, network="none")
    devices = options(arguments(less, "qemu", DESCRIPTORS), "-device")
    assert set(devices) < set(options(arguments(BOOT, "qemu", DESCRIPTORS), "-device"))
    assert not options(arguments(less, "qemu", DESCRIPTORS), "-netdev")


def test_a_restricted_network_is_the_same_device_and_leads_nowhere() -> None:
    restricted = arguments(dataclasses.replace(BOOT, network="restricted"), "qemu", DESCRIPTORS)
    assert options(restricted, "-device") == options(arguments(BOOT, "qemu", DESCRIPTORS), "-device")
    (netdev,) = options(restricted, "-netdev")
    assert netdev.split(",")[-1] == "restrict=on"
    assert "restrict=on" not in " ".join(arguments(BOOT, "qemu", DESCRIPTORS))


def test_no_device_names_a_host_path() -> None:
    """Devices are what the guest sees; paths are on their other side."""
    devices = options(arguments(BOOT, "qemu", DESCRIPTORS), "-device")
    assert len(devices) > len(DESCRIPTORS.agents)
    assert [device for device in devices if "/" in device] == []


def test_memory_is_private_and_never_touched_ahead() -> None:
    memory = next(value for value in options(arguments(BOOT, "qemu", DESCRIPTORS), "-object") if "memory0" in value)
    assert {"share=off", "prealloc=off", f"size={256 * MIB}", "mem-path=/run/vms/a/memory"} <= set(memory.split(","))
    assert options(arguments(BOOT, "qemu", DESCRIPTORS), "-m") == ["size=256M"]


def test_image_disks_are_read_only_and_tell_their_errors() -> None:
    argv = arguments(BOOT, "qemu", DESCRIPTORS)
    for name in ("metadata", "data"):
        node = next(value for value in options(argv, "-blockdev") if f"node-name={name}" in value)
        assert "read-only=on" in node.split(",")
        device = next(value for value in options(argv, "-device") if f"drive={name}" in value)
        assert {f"serial={name}", "rerror=report"} <= set(device.split(","))


def test_a_comma_in_a_path_is_no_option() -> None:
    spec = dataclasses.replace(BOOT, memory_path=Path("/a,share=on"), data_path=Path("/b,read-only=off"))
    argv = arguments(spec, "qemu", DESCRIPTORS)
    assert any("mem-path=/a,,share=on" in value for value in argv)
    assert any("filename=/b,,read-only=off,read-only=on" in value for value in argv)


def test_qemu_is_confined() -> None:
    sandbox = options(arguments(BOOT, "qemu", DESCRIPTORS), "-sandbox")
    assert sandbox == ["on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"memory_bytes": 256 * MIB + 1}, "whole MiB"),
        ({"memory_bytes": 1 << 50}, "whole MiB"),
        ({"cpus": 0}, "1 to 64 processors"),
        ({"cpus": 65}, "1 to 64 processors"),
        ({"machine": "q35,kernel=/etc/shadow"}, "no machine type"),
        ({"machine": ""}, "no machine type"),
        ({"network": "bridge"}, "'bridge'"),
        ({"state_path": Path("/state")}, "one of them"),
        ({"kernel": None}, "one of them"),
    ],
)
def test_what_can_not_be_is_refused(changes: dict[str, object], fact: str) -> None:
    with pytest.raises(VmSetupError, match=fact):
        dataclasses.replace(BOOT, **changes).check()  # type: ignore[arg-type]


def test_what_can_be_is_not() -> None:
    BOOT.check()
    RESTORE.check()
    for machine in ("q35", "pc-q35-7.2", "pc-i440fx-10.0.1"):
        dataclasses.replace(RESTORE, machine=machine).check()
