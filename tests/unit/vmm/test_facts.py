from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from imaged.snapshot import Machine
from vmm import facts
from vmm.errors import SnapshotMismatchError, VmSetupError
from vmm.machine import LAYOUT, cpu

INTEL = "model name : Xeon\nflags\t\t: fpu vmx sse\n\nmodel name : Xeon\nflags : fpu\n"
PLAIN = "model name : Xeon\nflags\t\t: fpu sse xvmx\n"
MACHINE = Machine(
    qemu="Debian 1:7.2",
    machine="pc-i440fx-7.2",
    accelerator="tcg",
    cpu="max",
    cpus=1,
    memory_bytes=1 << 28,
    network="none",
    firmware="ab" * 32,
    kernel="6.1.0-1-cloud-amd64",
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of files: a KVM device, a processor, firmware."""
    (tmp_path / "kvm").write_bytes(b"")
    (tmp_path / "cpuinfo").write_text(INTEL)
    for number, name in enumerate(facts._FIRMWARE):
        (tmp_path / name).write_bytes(bytes([number]) * 100)
    monkeypatch.setattr(facts, "_KVM", tmp_path / "kvm")
    monkeypatch.setattr(facts, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(facts, "_FIRMWARE_DIRECTORIES", (tmp_path / "none", tmp_path))
    return tmp_path


def test_kvm_needs_a_device_that_opens_and_a_processor_that_has_it(host: Path) -> None:
    assert facts.accelerator() == "kvm"
    (host / "cpuinfo").write_text(PLAIN)
    assert facts.accelerator() == "tcg"
    (host / "cpuinfo").write_text(INTEL)
    (host / "kvm").unlink()
    assert facts.accelerator() == "tcg"


def test_the_processor_under_kvm_is_the_hosts(host: Path) -> None:
    assert facts.processor("tcg") == cpu("tcg")
    before = facts.processor("kvm")
    assert before.startswith("host (Xeon, ")
    (host / "cpuinfo").write_text(INTEL.replace("sse", "sse avx"))
    assert facts.processor("kvm") != before


def test_firmware_is_told_by_its_bytes(host: Path) -> None:
    before = facts.firmware()
    assert len(before) == 64
    (host / facts._FIRMWARE[0]).write_bytes(b"another")
    assert facts.firmware() != before
    (host / facts._FIRMWARE[0]).unlink()
    with pytest.raises(VmSetupError, match="not installed") as caught:
        facts.firmware()
    assert "seabios" in caught.value.hint


def test_equal_machines_agree_whatever_their_kernel() -> None:
    facts.check(MACHINE, dataclasses.replace(MACHINE, kernel="other"))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Machine) if field.name != "kernel"])
def test_every_other_fact_is_compared_and_both_values_are_shown(name: str) -> None:
    value = getattr(MACHINE, name)
    other = value + 1 if isinstance(value, int) else value + "-other"
    with pytest.raises(SnapshotMismatchError) as caught:
        facts.check(MACHINE, Machine.from_json(MACHINE.to_json() | {name: other}))
    assert str(value) in caught.value.message
    assert str(other) in caught.value.message
    assert caught.value.hint


def test_the_host_is_checked_before_qemu_starts(host: Path) -> None:
    (host / "cpuinfo").write_text(PLAIN)
    recorded = dataclasses.replace(MACHINE, firmware=facts.firmware(), cpu=cpu("tcg"), layout=LAYOUT)
    facts.check_host(recorded)
    with pytest.raises(SnapshotMismatchError, match="firmware"):
        facts.check_host(dataclasses.replace(recorded, firmware="ab" * 32))
    with pytest.raises(SnapshotMismatchError, match="kvm, here is tcg"):
        facts.check_host(dataclasses.replace(recorded, accelerator="kvm"))


def test_a_host_without_qemu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(VmSetupError) as caught:
        facts.program()
    assert "qemu-system-x86" in caught.value.hint
