"""What VMs stand on, and what a collection must therefore keep."""

from __future__ import annotations

from collections.abc import Callable

from imaged.config import Config
from imaged.ids import ChunkId
from vmm.errors import VmError
from vmm.record import VmRecord
from vmm.vms import Vms


def kept_snapshots(config: Config) -> set[ChunkId]:
    """The snapshots that VMs stand on. VmError for a VM that does not say."""
    return _kept(config, lambda found: found.snapshot)


def kept_images(config: Config) -> set[ChunkId]:
    """The images that VMs stand on. VmError for a VM that does not say."""
    return _kept(config, lambda found: found.image)


def _kept(config: Config, key: Callable[[VmRecord], str]) -> set[ChunkId]:
    kept = set()
    for name, found in Vms(config).found():
        if found is None:
            hint = f"`pvisor vm rm {name}`, or restore its vm.json"
            raise VmError(f"VM {name!r} does not say which snapshot and image it stands on", hint=hint)
        if key(found):
            kept.add(ChunkId.parse(key(found)))
    return kept
