"""Run a shell script in a QEMU guest with Debian's 6.1 kernel, to see what a kernel older than the host's does.

The guest has no network and no disk but those given: an initramfs of busybox, the host's own programs that the script
needs, and kernel modules. What the script prints goes to a disk of its own, so that no byte of it is touched by a
terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODULES = ("virtio_pci", "virtio_blk", "erofs", "loop", "overlay")
_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module || echo "insmod $module failed"; done
sh /script > /output 2> /dev/console
echo "script exit $?"
dd if=/output of=/dev/vd{output} bs=1M 2> /dev/console
poweroff -f
"""


class GuestError(Exception):
    """The guest can not be made, or it did not do what it was asked; its console is in the message."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel image and the directory of its modules."""

    image: Path
    modules: Path

    @property
    def release(self) -> str:
        return self.modules.name


def kernel() -> Kernel:
    """The installed cloud kernel, else one taken from its package and kept in the user's cache. GuestError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pvisor-tests" / "kernel"
    for root in (Path("/"), cache):
        for image in sorted((root / "boot").glob("vmlinuz-6.1*-cloud-amd64"), reverse=True):
            modules = root / "lib/modules" / image.name.removeprefix("vmlinuz-")
            if modules.is_dir():
                return Kernel(image, modules)
    _unpack_package(cache)
    found = sorted((cache / "boot").glob("vmlinuz-6.1*-cloud-amd64"))
    if not found:
        raise GuestError("the kernel package has no /boot/vmlinuz-6.1*-cloud-amd64")
    return Kernel(found[-1], cache / "lib/modules" / found[-1].name.removeprefix("vmlinuz-"))


def run(script: str, disks: Sequence[Path], *, programs: Sequence[str] = (), timeout_s: float = 240) -> bytes:
    """What the script prints. Disks are read-only, /dev/vda first.

    `programs` are names on the host's PATH that become /usr/bin/NAME; a bare name in the script is busybox's own.
    """
    machine = kernel()
    with tempfile.TemporaryDirectory(prefix="pvisor-guest-") as work:
        initramfs, output = Path(work, "initramfs"), Path(work, "output")
        init = _INIT.format(output=chr(ord("a") + len(disks)))
        initramfs.write_bytes(_initramfs(machine, init, script, programs))
        with open(output, "wb") as stream:
            stream.truncate(64 << 20)
        console = _boot(machine, initramfs, [*disks, output], timeout_s)
        if "script exit 0" not in console:
            raise GuestError(f"the script failed in the guest:\n{console[-4000:]}")
        return output.read_bytes().rstrip(b"\0")


def _boot(machine: Kernel, initramfs: Path, disks: Sequence[Path], timeout_s: float) -> str:
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "512", "-nodefaults", "-display", "none", "-no-reboot"]
    command += ["-serial", "stdio", "-kernel", str(machine.image), "-initrd", str(initramfs)]
    command += ["-append", "console=ttyS0 quiet panic=-1"]
    for number, disk in enumerate(disks):
        mode = "off" if number == len(disks) - 1 else "on"
        command += ["-drive", f"file={disk},format=raw,if=none,id=disk{number},readonly={mode}"]
        command += ["-device", f"virtio-blk-pci,drive=disk{number}"]
    try:
        result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        console = (error.stdout or b"").decode(errors="replace")
        raise GuestError(f"the guest did not end in {timeout_s} s:\n{console[-4000:]}") from error
    console = result.stdout.decode(errors="replace")
    if result.returncode != 0:
        raise GuestError(f"QEMU exit {result.returncode}: {result.stderr.decode(errors='replace')}\n{console[-4000:]}")
    return console


def _unpack_package(cache: Path) -> None:
    """Download the package that linux-image-cloud-amd64 depends on, and unpack it into the cache."""
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-cloud-amd64"], capture_output=True, text=True, check=False, timeout=60
    ).stdout
    package = re.search(r"linux-image-6\.1\S*-cloud-amd64", depends)
    if package is None:
        raise GuestError("no package linux-image-6.1*-cloud-amd64: this needs Debian 12's package lists")
    cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel-", dir=cache.parent) as work:
        for command in (["apt-get", "download", package.group()], ["sh", "-c", "dpkg -x ./*.deb unpacked"]):
            result = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, timeout=600)
            if result.returncode != 0:
                raise GuestError(f"{' '.join(command)}: {result.stderr.strip()}")
        if not cache.exists():
            Path(work, "unpacked").rename(cache)


def _module_files(machine: Kernel, names: Sequence[str]) -> list[Path]:
    """The files of these modules and all they depend on, in an order in which they load; built-in ones are left out."""
    files = {path.name.removesuffix(".ko").replace("-", "_"): path for path in machine.modules.rglob("*.ko")}
    order: list[Path] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        name = name.replace("-", "_")
        if name in seen or name not in files:
            return
        seen.add(name)
        depends = re.search(rb"\0depends=([^\0]*)\0", files[name].read_bytes())
        for other in depends.group(1).decode().split(",") if depends is not None else ():
            visit(other)
        order.append(files[name])

    for name in names:
        visit(name)
    return order


def _libraries(program: Path) -> list[Path]:
    """The shared libraries a program loads, its loader among them."""
    output = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False, timeout=30).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", output)]


def _initramfs(machine: Kernel, init: str, script: str, programs: Sequence[str]) -> bytes:
    """A cpio archive in the kernel's "newc" format."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise GuestError("busybox is not installed (busybox-static)")
    modules = _module_files(machine, MODULES)
    content = {"bin/busybox": Path(busybox).read_bytes(), "init": init.encode(), "script": script.encode()}
    content["modules/order"] = "\n".join(path.name for path in modules).encode()
    content |= {f"modules/{path.name}": path.read_bytes() for path in modules}
    for name in programs:
        found = shutil.which(name)
        if found is None:
            raise GuestError(f"{name} is not installed")
        content[f"usr/bin/{name}"] = Path(found).read_bytes()
        content |= {str(path).lstrip("/"): path.read_bytes() for path in _libraries(Path(found))}
    directories = {"proc", "sys", "dev", "mnt", "tmp"}
    for path in content:
        directories |= {str(parent) for parent in Path(path).parents if str(parent) != "."}
    parts = [_cpio(name, stat.S_IFDIR | 0o755, b"") for name in sorted(directories)]
    parts += [_cpio(name, stat.S_IFREG | 0o755, data) for name, data in content.items()]
    return b"".join([*parts, _cpio("TRAILER!!!", 0, b"")])


def _cpio(name: str, mode: int, data: bytes) -> bytes:
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
