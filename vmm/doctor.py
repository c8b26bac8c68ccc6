"""What a host needs to run VMs, checked one by one. A host that runs none goes without."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from fuse.doctor import Check
from imaged.config import Config
from vmm import facts
from vmm.boot import configured_kernel
from vmm.errors import VmSetupError
from vmm.guest import package
from vmm.guest.initramfs import libraries
from vmm.guest.kernel import CLOUD, find_kernel, newest

_VERSION_S = 20


def examine(config: Config) -> list[Check]:
    """All checks, each of them made even when an earlier one fails."""
    return [
        _qemu(),
        _firmware(),
        _accelerator(),
        _busybox(),
        _program("perl", "perl-base", "the agent of guests"),
        _program("mkfs.ext4", "e2fsprogs", "--disk"),
        _program("qemu-img", "qemu-utils", "--disk"),
        _kernel(config.home),
    ]


def _check(name: str, detail: str, *, ok: bool = True, hint: str = "") -> Check:
    return Check(f"VMs: {name}", ok, detail, hint, optional=True)


def _failed(name: str, error: VmSetupError) -> Check:
    return _check(name, error.message, ok=False, hint=error.hint)


def _qemu() -> Check:
    name, hint = "qemu-system-x86_64", "apt-get install qemu-system-x86"
    try:
        argv = [facts.program(), "--version"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except VmSetupError:
        return _check(name, "not on PATH", ok=False, hint=hint)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _check(name, f"does not run: {error}", ok=False, hint=hint)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    line = said[0] if said else f"exit status {done.returncode}"
    return _check(name, line.removeprefix("QEMU emulator version "), ok=done.returncode == 0, hint=hint)


def _firmware() -> Check:
    try:
        return _check("firmware", f"BLAKE3 {facts.firmware()[:16]}")
    except VmSetupError as error:
        return _failed("firmware", error)


def _accelerator() -> Check:
    """Either will do."""
    if facts.accelerator() == "kvm":
        return _check("accelerator", "KVM")
    why = "the processor shows neither vmx nor svm"
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        why = f"/dev/kvm: {error.strerror}"
    return _check("accelerator", f"TCG, which is slow: {why}")


def _busybox() -> Check:
    name, hint = "busybox", "apt-get install busybox-static"
    found = shutil.which("busybox")
    if found is None:
        return _check(name, "not on PATH", ok=False, hint=hint)
    try:
        needed = libraries([Path(found)])
    except VmSetupError as error:
        return _failed(name, error)
    if needed:
        return _check(name, f"{found} is not static: it needs {needed[0]}", ok=False, hint=hint)
    return _check(name, f"{found}, static")


def _program(name: str, debian: str, use: str) -> Check:
    found = shutil.which(name)
    hint = f"apt-get install {debian}, for {use}"
    return _check(name, found or "not on PATH", ok=found is not None, hint=hint)


def _kernel(home: Path) -> Check:
    """There, or to be had; asks no mirror."""
    name, configured = "kernel of guests", configured_kernel()
    try:
        if configured is None and all(newest(root, CLOUD) is None for root in (Path("/"), home / "guest/kernel")):
            return _check(name, f"the first boot downloads the package {package.find()}")
        kernel = find_kernel(home, configured)
    except VmSetupError as error:
        return _failed(name, error)
    return _check(name, f"{kernel.release} in {kernel.image.parent}")
