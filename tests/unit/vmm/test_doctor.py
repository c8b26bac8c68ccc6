"""What doctor says of a host that can run VMs, and of one that lacks things."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.group import run
from fuse.doctor import Check
from imaged.config import Config
from vmm import doctor, facts
from vmm.errors import VmSetupError

ARGV = {"qemu-system-x86_64": 'echo "QEMU emulator version 9.9.9 (Test)"; echo Copyright', "ldd": "echo not dynamic"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH, with none of what is wanted; PVISOR_KERNEL is not set."""
    made = tmp_path / "bin"
    made.mkdir()
    monkeypatch.setenv("PATH", str(made))
    monkeypatch.delenv("PVISOR_KERNEL", raising=False)
    return made


def add(programs: Path, name: str, script: str = "true") -> None:
    (programs / name).write_text(f"#!/bin/sh\n{script}\n")
    (programs / name).chmod(0o755)


def examined(home: Path) -> dict[str, Check]:
    found = doctor.examine(Config(home=home, run=home / "run"))
    assert all(check.optional for check in found)
    return {check.name.removeprefix("VMs: "): check for check in found}


def test_a_host_with_everything(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "firmware", lambda: "ab" * 32)
    for name in ("busybox", "perl", "mkfs.ext4", "qemu-img"):
        add(programs, name)
    for name, script in ARGV.items():
        add(programs, name, script)
    release = "1.2.3-cloud-amd64"
    (tmp_path / "guest/kernel/boot").mkdir(parents=True)
    (tmp_path / "guest/kernel/boot" / f"vmlinuz-{release}").touch()
    (tmp_path / "guest/kernel/lib/modules" / release).mkdir(parents=True)
    monkeypatch.setattr(doctor, "newest", lambda root, releases: None if root == Path("/") else object())
    monkeypatch.setattr(doctor, "find_kernel", lambda home, configured: _kernel(home, release))
    found = examined(tmp_path)
    assert all(check.ok for check in found.values()), found
    assert found["qemu-system-x86_64"].detail == "9.9.9 (Test)"
    assert found["busybox"].detail.endswith("busybox, static")
    assert found["kernel of guests"].detail.startswith(release)


def _kernel(home: Path, release: str) -> object:
    from vmm.guest.kernel import newest

    return newest(home / "guest/kernel", release)


def test_a_host_with_nothing_is_told_the_packages(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "newest", lambda root, releases: None)
    found = examined(tmp_path)
    hints = {name: check.hint for name, check in found.items() if not check.ok}
    packages = {
        "qemu-system-x86_64": "qemu-system-x86",
        "busybox": "busybox-static",
        "perl": "perl-base",
        "mkfs.ext4": "e2fsprogs",
        "qemu-img": "qemu-utils",
        "kernel of guests": "linux-image-cloud-amd64",
    }
    for name, package in packages.items():
        assert package in hints[name]
    assert found["accelerator"].ok


def test_a_kernel_is_there_or_to_be_had_without_asking_a_mirror(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "newest", lambda root, releases: None)
    add(programs, "apt-cache", 'echo "  Depends: linux-image-6.1.0-9-cloud-amd64"')
    add(programs, "apt-get", "exit 9")
    add(programs, "dpkg-deb", "exit 9")
    kernel = examined(tmp_path)["kernel of guests"]
    assert kernel.ok
    assert "linux-image-6.1.0-9-cloud-amd64" in kernel.detail
    monkeypatch.setenv("PVISOR_KERNEL", str(tmp_path / "nowhere"))
    kernel = examined(tmp_path)["kernel of guests"]
    assert not kernel.ok
    assert "nowhere" in kernel.detail


def test_what_is_there_and_will_not_do(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(programs, "busybox")
    add(programs, "ldd", 'echo "libc.so.6 => /lib/libc.so.6 (0x1)"')
    add(programs, "qemu-system-x86_64", "echo no such host >&2; exit 3")

    def firmware() -> str:
        raise VmSetupError("QEMU's firmware is not installed", hint="seabios")

    monkeypatch.setattr(facts, "firmware", firmware)
    found = examined(tmp_path)
    assert (found["busybox"].ok, found["qemu-system-x86_64"].ok, found["firmware"].ok) == (False, False, False)
    assert "not static" in found["busybox"].detail
    assert found["qemu-system-x86_64"].detail == "no such host"
    assert found["firmware"].hint == "seabios"


@pytest.mark.parametrize(("needed", "code"), [(True, 0), (False, 1)])
def test_what_only_vms_lack_fails_nothing(
    needed: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Check("VMs: qemu", False, "not on PATH", "install it", optional=True)
    monkeypatch.setattr("fuse.doctor.examine", lambda config: [Check("root", needed, "user id", "be root")])
    monkeypatch.setattr("vmm.doctor.examine", lambda config: [absent])
    assert run(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is needed
    assert document["checks"][1] == {
        "name": "VMs: qemu",
        "ok": False,
        "optional": True,
        "detail": "not on PATH",
        "hint": "install it",
    }
    assert run(["doctor"]) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("ok  " if needed else "FAIL")
    assert shown[-2:] == ["no    VMs: qemu: not on PATH", "      hint: install it"]
