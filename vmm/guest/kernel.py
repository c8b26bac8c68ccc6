"""The kernel that guests boot: the installed one of Debian for clouds, a configured one, or one from its package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from imaged.errors import FormatError
from imaged.progress import Progress
from vmm.errors import VmSetupError
from vmm.guest import bzimage

CLOUD = "*-cloud-amd64"


# Parts of the time from the kernel's start to the agent's, under TCG, that a guest gets nothing for: testing ciphers
# 9 %, checking the signature of the certificates of modules 5 % (modules load without; the kernel notes that as a
# taint), testing a key derivation 2 %, looking for a keyboard and a mouse 2 %.
_FASTER = (
    "cryptomgr.notests",
    "initcall_blacklist=load_system_certificate_list,crypto_kdf108_init",
    "i8042.nokbd",
    "i8042.noaux",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel image that QEMU boots, and the directory of its modules, which is named by the release."""

    image: Path
    modules: Path
    release: str


def find_kernel(home: Path, configured: Path | None = None, progress: Progress | None = None) -> Kernel:
    """The configured kernel (PVISOR_KERNEL: a vmlinuz, or a directory with boot/ and lib/modules/); without one the
    newest cloud kernel in /boot, else in `home`/guest/kernel, where its package is unpacked when it is nowhere.

    Threads and processes may call this at once. VmSetupError.
    """
    if configured is not None:
        return _configured(configured)
    unpacked = home / "guest/kernel"
    for root in (Path("/"), unpacked):
        kernel = newest(root, CLOUD)
        if kernel is not None:
            return kernel
    from vmm.guest import package

    package.unpack(unpacked, progress)
    kernel = newest(unpacked, CLOUD)
    if kernel is None:
        hint = f"remove {unpacked}, or set PVISOR_KERNEL"
        raise VmSetupError(f"the kernel package unpacked in {unpacked} has no boot/vmlinuz-{CLOUD}", hint=hint)
    return kernel


def newest(root: Path, releases: str) -> Kernel | None:
    """Of the kernels below `root`/boot whose release matches the pattern and whose modules are there, the newest."""
    images = [path for path in (root / "boot").glob(f"vmlinuz-{releases}") if path.is_file()]
    for image in sorted(images, key=lambda path: _version(path.name), reverse=True):
        release = image.name.removeprefix("vmlinuz-")
        for modules in (root / "lib/modules" / release, root / "usr/lib/modules" / release):
            if modules.is_dir():
                return Kernel(image=image, modules=modules, release=release)
    return None


def kernel_arguments(*, accelerator: str, network: str = "none", disk: bool = False) -> str:
    """The kernel's command line. `network` is "none" or "user"; `disk`: the guest's writes go to its own disk.

    A guest whose kernel panics ends (`panic=-1` with QEMU's -no-reboot). What only TCG gets: the emulated processor
    does not speculate, so the guarding against that, which flushes QEMU's translations, only costs; and a library that
    each program has at another address is translated anew for each (a short command takes 84 ms so, else 50).
    """
    arguments = ["console=ttyS0", "quiet", "panic=-1", "random.trust_cpu=on", "no_timer_check", *_FASTER]
    if accelerator == "tcg":
        arguments += ["mitigations=off", "norandmaps"]
    arguments += [f"pvisor.network={network}", f"pvisor.upper={'disk' if disk else 'memory'}"]
    return " ".join(arguments)


def _configured(path: Path) -> Kernel:
    if path.is_dir():
        kernel = newest(path, "*")
        if kernel is None:
            raise VmSetupError(
                f"PVISOR_KERNEL={path} has no boot/vmlinuz-RELEASE with its lib/modules/RELEASE",
                hint="unpack a kernel package there with `dpkg-deb -x`, or unset PVISOR_KERNEL",
            )
        return kernel
    try:
        release = bzimage.release(path.read_bytes())
    except (OSError, FormatError) as error:
        said = error.message if isinstance(error, FormatError) else error.strerror
        hint = "set PVISOR_KERNEL to a vmlinuz, or to a directory with boot/ and lib/modules/"
        raise VmSetupError(f"PVISOR_KERNEL={path}: {said}", hint=hint) from error
    places = [root / "lib/modules" / release for root in (*path.absolute().parents[:2], Path("/"))]
    for modules in places:
        if modules.is_dir():
            return Kernel(image=path, modules=modules, release=release)
    raise VmSetupError(
        f"PVISOR_KERNEL={path} is kernel {release}, and its modules are not in {' or '.join(map(str, places))}",
        hint="set PVISOR_KERNEL to a directory with boot/ and lib/modules/",
    )


def _version(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
