"""What the VM benchmark runs in and on: a host of its own, guests' payloads, and what the store has of a snapshot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.image import pvisor, pvisor_env
from fuse import node
from imaged import snapshots
from imaged.chunkstore.store import ChunkStore
from imaged.collection.census import Census
from imaged.config import Config
from imaged.ids import ChunkId
from scripts.debian import TAG, debian_layout
from tests.support.vm import kernel_environment
from vmm import api, facts, recovery
from vmm.boot import configured_kernel
from vmm.guest.initramfs import initramfs
from vmm.guest.kernel import Kernel, find_kernel, kernel_arguments
from vmm.machine import MachineSpec
from vmm.vms import Vms

IMAGE = "bench:vm"
ANSWER = ("echo", "ready")
ANSWERED = b"ready\n"
CHANGED = ("sh", "-c", "head -c 1048576 /dev/urandom > /dev/shm/change")
"""The small change before the second park: a file of 1 MiB, new noise each time."""

_FILE = """
import random
block = random.Random(7).randbytes({block})
with open("/dev/shm/payload", "wb") as file:
    for number in range({count}):
        file.write({piece})
"""
_MODULES = (
    "argparse asyncio concurrent.futures csv ctypes decimal email.mime.text fractions html.parser http.client json "
    "logging.config multiprocessing pydoc sqlite3 ssl statistics tarfile typing unittest.mock urllib.request "
    "xml.dom.minidom zipfile"
).replace(" ", ", ")
_PROCESS = f"import {_MODULES}, time, pathlib; pathlib.Path('/dev/shm/up').touch(); time.sleep(1e6)"
PAYLOADS: dict[str, tuple[str, ...]] = {
    "64 MiB repeated": ("python3", "-c", _FILE.format(block=64 << 10, count=1024, piece="block")),
    "64 MiB random": (
        "python3",
        "-c",
        _FILE.format(block=16, count=64, piece="random.Random(number).randbytes(1 << 20)"),
    ),
    "Python, modules": (
        "sh",
        "-c",
        f'setsid python3 -c "{_PROCESS}" </dev/null >/dev/null 2>&1 & while ! test -e /dev/shm/up; do sleep 0.1; done',
    ),
}
"""What is in the guest's memory beside its system when it is parked: a command that puts it there."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A host with the image in its store, and what plain QEMU boots the same guest from: its disks as plain files."""

    scratch: Path
    config: Config
    metadata: Path
    data: Path
    kernel: Kernel
    initramfs: Path
    extra_env: dict[str, str]

    @property
    def env(self) -> dict[str, str]:
        return pvisor_env(self.scratch) | self.extra_env

    @property
    def vms(self) -> Vms:
        return Vms(self.config)

    def spec(self, memory_bytes: int) -> MachineSpec:
        """As `vmm.boot` makes it; `memory_path` is not used by plain QEMU."""
        accelerator = facts.accelerator()
        return MachineSpec(
            memory_bytes=memory_bytes,
            cpus=1,
            accelerator=accelerator,
            network="none",
            memory_path=self.scratch / "unused",
            metadata_path=self.metadata,
            data_path=self.data,
            kernel=self.kernel.image,
            initramfs=self.initramfs,
            kernel_arguments=kernel_arguments(accelerator=accelerator),
            kernel_release=self.kernel.release,
        )

    def memory_path(self, snapshot: str) -> Path:
        """The file that VMs from this snapshot map as their memory."""
        with ChunkStore.open(self.config.store, readonly=True) as store:
            return self.config.blocks / str(snapshots.find(store, snapshot).record.memory)

    def command(self, *words: str) -> list[str]:
        return [pvisor(), "vm", *words]

    def pvisor(self, *words: str) -> None:
        """A command that must succeed. RuntimeError."""
        done = subprocess.run([pvisor(), *words], env=self.env, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"pvisor {words}: exit code {done.returncode}: {done.stderr.decode()[-2000:]}")


@contextmanager
def prepared(directory: Path | None = None) -> Iterator[Bench]:
    """The image converted and the node daemon running; all VMs, the daemon and the files are gone afterwards."""
    extra = kernel_environment()
    os.environ.update(extra)
    with tempfile.TemporaryDirectory(prefix="pvisor-bench-vm-", dir=directory) as name:
        scratch = Path(name)
        config = Config(home=scratch / "home", run=scratch / "run")
        kernel = find_kernel(config.home, configured_kernel())
        first_root = initramfs(config.home, kernel)
        bench = Bench(scratch, config, scratch / "metadata.img", scratch / "data.img", kernel, first_root, extra)
        try:
            layout = debian_layout("python-git", ["git", "python3"])
            bench.pvisor("convert", f"oci:{layout}:{TAG}", "--name", IMAGE)
            bench.pvisor("node", "start")
            opened = node.open_image(config, IMAGE)
            shutil.copyfile(opened.metadata_path, bench.metadata)
            shutil.copyfile(opened.data_path, bench.data)
            yield bench
        finally:
            for run in (config.run / "vms").glob("*"):
                recovery.end(run)
            bench.pvisor("node", "stop")


def answer(vm: api.Vm) -> None:
    """The guest executes a command. RuntimeError when it says something else."""
    said = vm.exec(ANSWER, capture_output=True)
    if said.stdout != ANSWERED:
        raise RuntimeError(f"VM {vm.name} said {said.stdout!r}, {said.stderr!r}")


def do(vm: api.Vm, argv: tuple[str, ...]) -> None:
    """A command that must succeed in the guest. RuntimeError."""
    said = vm.exec(argv, capture_output=True, timeout_s=600)
    if said.exit_code:
        raise RuntimeError(f"VM {vm.name}: {argv}: exit code {said.exit_code}: {said.stderr.decode()[-2000:]}")


def own_bytes(bench: Bench, snapshot: str, parent: str | None = None) -> int:
    """Bytes in the store of what a snapshot has and its parent, or without one its image, has not: all of it, maps,
    device state and record too."""
    with ChunkStore.open(bench.config.store, readonly=True) as store:
        census = Census(store)
        found = census.snapshot(ChunkId.parse(snapshot))
        if parent is None:
            below = census.image(ChunkId.parse(node.open_image(bench.config, IMAGE).id))
        else:
            below = census.snapshot(ChunkId.parse(parent))
        return census.present(found - below).stored_bytes


def require_nothing_held(bench: Bench, name: str, pid: int) -> None:
    """A parked VM has no process, and none has its memory or its files. RuntimeError says what is left."""
    status = api.get(name, config=bench.config).status()
    if status.state != "parked" or status.pid is not None or status.private_bytes:
        raise RuntimeError(f"VM {name} is {status.state}, with process {status.pid}")
    if Path(f"/proc/{pid}").exists() or bench.vms.run(name).exists():
        raise RuntimeError(f"VM {name} is parked, and process {pid} or {bench.vms.run(name)} is there")
    places = (os.fsencode(bench.vms.run(name)) + b"/", os.fsencode(bench.config.blocks) + b"/")
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_bytes()
        except OSError:  # it ended just now
            continue
        if any(place in text for place in places):
            raise RuntimeError(f"VM {name} is parked, and process {maps.parent.name} maps its memory")
