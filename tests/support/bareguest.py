"""A guest of busybox and kernel modules alone, to drive QEMU without images, agent or node.

It has a shell at agent ports 0, 3 and 7.

Its disks are two files of a known pattern. Commands go to a port as lines; after each the guest says that it has ended
and with which status.
"""

from __future__ import annotations

import dataclasses
import select
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuse import protocol
from tests.support import guest
from vmm import facts
from vmm.guest import cpio
from vmm.guest.kernel import Kernel
from vmm.guest.modules import ModuleTree, content
from vmm.machine import MIB, MachineSpec
from vmm.pagemap import private_ranges
from vmm.qemu import Qemu

MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "virtio_rng")
DISK_BYTES = 4 * MIB
WAIT_S = 120.0
_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
for module in $(cat /modules/order); do insmod /modules/$module || echo "pvisor: insmod $module failed"; done
for number in 0 3 7; do
    port=/dev/vport$(sed -n s/DEVNAME=vport//p /sys/class/virtio-ports/vport*p$((number + 1))/uevent)
    (while :; do sh /repl 0<> $port 1>&0 2>&0; sleep 0.5; done) &
done
echo "bare guest is up"
read -r forever < /dev/console
exec sleep 1000000
"""
_REPL = """while read -r line; do
    eval "$line"
    echo "[status $?]"
done
"""


class GuestShellError(Exception):
    """The guest did not answer, or a command failed in it."""


class Shell:
    """The shell at one of the guest's ports."""

    def __init__(self, run_dir: Path, port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        with protocol.address(run_dir / f"agent-{port}.sock") as address:
            self._socket.connect(address)
        self._buffer = b""
        self._greet()

    def _greet(self) -> None:
        """A guest that still notices that the last user is gone discards what comes: say it until it hears."""
        deadline = time.monotonic() + WAIT_S
        attempt = 0
        while time.monotonic() < deadline:
            attempt += 1
            self._socket.sendall(b"echo hello %d\n" % attempt)
            again = time.monotonic() + 1
            while select.select([self._socket], [], [], max(0, again - time.monotonic()))[0]:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise GuestShellError("the port was closed")
                self._buffer += data
                if self._buffer.endswith(b"hello %d\n[status 0]\n" % attempt):
                    self._buffer = b""
                    return
        raise GuestShellError(f"nobody answers at the port in {WAIT_S} s")

    def run(self, command: str, *, timeout_s: float = WAIT_S) -> str:
        """What the command prints; GuestShellError when it fails or nothing is heard in time."""
        self._socket.sendall(command.encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        while b"[status " not in self._buffer or not self._buffer.endswith(b"]\n"):
            if not select.select([self._socket], [], [], max(0, deadline - time.monotonic()))[0]:
                raise GuestShellError(f"{command}: no answer in {timeout_s} s, but {self._buffer!r}")
            data = self._socket.recv(1 << 16)
            if not data:
                raise GuestShellError(f"{command}: the port was closed after {self._buffer!r}")
            self._buffer += data
        output, _, status = self._buffer.decode().rpartition("[status ")
        self._buffer = b""
        if status != "0]\n":
            raise GuestShellError(f"{command}: status {status.strip()} {output}")
        return output

    def close(self) -> None:
        self._socket.close()


@contextmanager
def shell(run_dir: Path, port: int = 0) -> Iterator[Shell]:
    opened = Shell(run_dir, port)
    try:
        yield opened
    finally:
        opened.close()


@dataclass(frozen=True, slots=True)
class BareGuest:
    """The files a guest boots from; `spec` is a boot of it with its memory in `run_dir`."""

    kernel: Kernel
    initramfs: Path
    metadata: Path
    data: Path

    @classmethod
    def make(cls, directory: Path) -> BareGuest:
        kernel = guest.kernel()
        made = cls(kernel, directory / "initramfs", directory / "metadata", directory / "data")
        modules = ModuleTree.read(kernel.modules).load_order(MODULES)
        busybox = shutil.which("busybox")
        assert busybox is not None
        entries = [
            *(cpio.directory(name) for name in ("proc", "sys", "dev", "tmp")),
            cpio.file("bin/busybox", Path(busybox).read_bytes(), mode=0o755),
            cpio.file("init", _INIT.encode(), mode=0o755),
            cpio.file("repl", _REPL.encode()),
            cpio.file("modules/order", "\n".join(path.name for path in modules).encode()),
            *(cpio.file(f"modules/{path.name}", content(path)) for path in modules),
        ]
        made.initramfs.write_bytes(cpio.archive(entries))
        for path, letter in ((made.metadata, b"m"), (made.data, b"d")):
            path.write_bytes(letter * DISK_BYTES)
        return made

    def boot(self, run_dir: Path, *, memory_mib: int = 192, network: str = "user", cpus: int = 1) -> MachineSpec:
        run_dir.mkdir(parents=True, exist_ok=True)
        memory = run_dir / "memory"
        with open(memory, "wb") as stream:
            stream.truncate(memory_mib * MIB)
        return MachineSpec(
            memory_bytes=memory_mib * MIB,
            cpus=cpus,
            accelerator=facts.accelerator(),
            network=network,
            memory_path=memory,
            metadata_path=self.metadata,
            data_path=self.data,
            mac="02:00:00:00:00:07" if network == "user" else None,
            kernel=self.kernel.image,
            initramfs=self.initramfs,
            kernel_arguments="console=ttyS0 quiet panic=-1 mitigations=off no_timer_check",
            kernel_release=self.kernel.release,
        )


def restored(spec: MachineSpec, saved: Path, run_dir: Path) -> MachineSpec:
    """The machine of `spec` from what `save` left in `saved`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    upper = None if spec.upper_path is None else shutil.copyfile(saved / "upper", run_dir / "upper")
    return dataclasses.replace(
        spec,
        kernel=None,
        initramfs=None,
        kernel_arguments="",
        memory_path=saved / "memory",
        state_path=saved / "state",
        upper_path=upper,
    )


def save(qemu: Qemu, spec: MachineSpec, saved: Path) -> int:
    """Stop the guest and write its device state, memory and disk down; the bytes of memory that were its own."""
    saved.mkdir()
    qemu.stop()
    qemu.save_state(saved / "state")
    own_bytes = 0
    with (
        open(spec.memory_path, "rb") as parent,
        open(saved / "memory", "wb") as memory,
        open(f"/proc/{qemu.pid}/mem", "rb", 0) as process,
    ):
        memory.truncate(spec.memory_bytes)
        for offset in range(0, spec.memory_bytes, MIB):
            data = parent.read(MIB)
            if data.count(0) != len(data):
                memory.seek(offset)
                memory.write(data)
        for one in private_ranges(qemu.pid, spec.memory_path, spec.memory_bytes):
            process.seek(one.address)
            memory.seek(one.offset)
            memory.write(process.read(one.length_bytes))
            own_bytes += one.length_bytes
    if spec.upper_path is not None:
        shutil.copyfile(spec.upper_path, saved / "upper")
    return own_bytes
