"""Run a shell script in a QEMU guest with Debian's 6.1 kernel, to see what a kernel older than the host's does.

The guest has no network and no disk but those given: an initramfs of busybox, the host's own programs that the script
needs, and kernel modules. What the script prints goes to a disk of its own, so that no byte of it is touched by a
terminal.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from vmm.guest import cpio
from vmm.guest.initramfs import libraries, program
from vmm.guest.kernel import Kernel, find_kernel
from vmm.guest.modules import ModuleTree, content

MODULES = ("virtio_pci", "virtio_blk", "erofs", "loop", "overlay")
RELEASE = "6.1."
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


def kernel() -> Kernel:
    """The installed cloud kernel, else one taken from its package and kept in the user's cache. GuestError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pvisor-tests"
    found = find_kernel(cache)
    if not found.release.startswith(RELEASE):
        raise GuestError(f"the cloud kernel here is {found.release}: this needs Debian 12's, {RELEASE}x")
    return found


def run(script: str, disks: Sequence[Path], *, programs: Sequence[str] = (), timeout_s: float = 240) -> bytes:
    """What the script prints. Disks are read-only, /dev/vda first.

    `programs` are names on the host's PATH that become /usr/bin/NAME; a bare name in the script is busybox's own.
    """
    found = kernel()
    with tempfile.TemporaryDirectory(prefix="pvisor-guest-") as work:
        initramfs, output = Path(work, "initramfs"), Path(work, "output")
        init = _INIT.format(output=chr(ord("a") + len(disks)))
        initramfs.write_bytes(cpio.archive(_entries(found, init, script, programs)))
        with open(output, "wb") as stream:
            stream.truncate(64 << 20)
        console = _boot(found, initramfs, [*disks, output], timeout_s)
        if "script exit 0" not in console:
            raise GuestError(f"the script failed in the guest:\n{console[-4000:]}")
        return output.read_bytes().rstrip(b"\0")


def _boot(found: Kernel, initramfs: Path, disks: Sequence[Path], timeout_s: float) -> str:
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "512", "-nodefaults", "-display", "none", "-no-reboot"]
    command += ["-serial", "stdio", "-kernel", str(found.image), "-initrd", str(initramfs)]
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


def _entries(found: Kernel, init: str, script: str, programs: Sequence[str]) -> Iterator[cpio.Entry]:
    yield from map(cpio.directory, ("proc", "sys", "dev", "mnt", "tmp"))
    yield cpio.file("bin/busybox", program("busybox", "busybox-static").read_bytes(), mode=0o755)
    yield cpio.file("init", init.encode(), mode=0o755)
    yield cpio.file("script", script.encode(), mode=0o755)
    order = ModuleTree.read(found.modules).load_order(MODULES)
    yield cpio.file("modules/order", "\n".join(path.name for path in order).encode())
    for path in order:
        yield cpio.file(f"modules/{path.name}", content(path))
    wanted = [program(name, name) for name in programs]
    for path in wanted:
        yield cpio.file(f"usr/bin/{path.name}", path.read_bytes(), mode=0o755)
    for path in libraries(wanted) if wanted else ():
        yield cpio.file(str(path).lstrip("/"), path.read_bytes(), mode=0o755)
