"""A guest with the agent over an image of busybox alone, without a node: its two disks are plain files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imaged.conversion.apply import Tree
from imaged.conversion.cutter import Cutter
from imaged.conversion.hostdir import read_directory
from tests.support import erofs, guest
from tests.support.busybox import busybox_root
from tests.support.memory_store import MemoryStore
from vmm import facts
from vmm.guest.initramfs import initramfs
from vmm.guest.kernel import Kernel, kernel_arguments
from vmm.machine import MIB, MachineSpec
from vmm.qemu import Qemu


@dataclass(frozen=True, slots=True)
class AgentGuest:
    """The files a guest boots from."""

    kernel: Kernel
    initramfs: Path
    metadata: Path
    data: Path

    @classmethod
    def make(cls, directory: Path) -> AgentGuest:
        kernel = guest.kernel()
        root = busybox_root(directory / "root")
        store = MemoryStore()
        tree = Tree()
        layer = read_directory(root, Cutter(store), advance=lambda size_bytes: None)
        assert not layer.warnings
        tree.apply(layer)
        built = erofs.build(store, tree.root, directory)
        return cls(kernel, initramfs(directory, kernel), built.metadata, built.data)

    def spec(self, run_dir: Path, *, memory_mib: int = 192, network: str = "none") -> MachineSpec:
        run_dir.mkdir(parents=True, exist_ok=True)
        memory = run_dir / "memory"
        with open(memory, "wb") as stream:
            stream.truncate(memory_mib * MIB)
        accelerator = facts.accelerator()
        return MachineSpec(
            memory_bytes=memory_mib * MIB,
            cpus=1,
            accelerator=accelerator,
            network=network,
            memory_path=memory,
            metadata_path=self.metadata,
            data_path=self.data,
            mac="02:00:00:00:00:07" if network == "user" else None,
            kernel=self.kernel.image,
            initramfs=self.initramfs,
            kernel_arguments=kernel_arguments(accelerator=accelerator, network=network),
            kernel_release=self.kernel.release,
        )


@contextmanager
def running(spec: MachineSpec, run_dir: Path) -> Iterator[Qemu]:
    """A boot, or a restore that goes on; killed at the end."""
    with Qemu.start(spec, run_dir) as qemu:
        try:
            if spec.state_path is not None:
                qemu.wait_loaded()
                qemu.cont()
            yield qemu
        finally:
            qemu.kill()
