"""A collection of a store on this host, and what stays in it though it has no name any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cli.common import warn
from fuse import mounts
from fuse.node import connect
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import CollectReport, collect
from imaged.config import Config
from imaged.errors import PvisorError
from imaged.ids import ChunkId
from stage.errors import StageBusyError, StageNotFoundError
from stage.kept.record import StageInfo
from stage.kept.stages import Stages
from vmm.kept import kept_images, kept_snapshots
from vmm.record import VmRecord
from vmm.vms import Vms


@dataclass(frozen=True, slots=True)
class ByVm:
    """An image or snapshot without a name, and the VM that stands on it."""

    vm: str
    called: str


@dataclass(frozen=True, slots=True)
class ByLease:
    """A record without a name, and who holds a lease on it."""

    holder: str
    record: ChunkId


@dataclass(frozen=True, slots=True)
class Unnamed:
    """What a collection left that has no name, by who keeps it."""

    stages: list[StageInfo]
    vms: list[ByVm]
    leases: list[ByLease]

    def lines(self) -> Iterator[str]:
        """One for each, for people."""
        for stage in self.stages:
            yield f"{stage.image_name or stage.image[:12]}: kept by stage {stage.name}"
        for one in self.vms:
            yield f"{one.called}: kept by VM {one.vm}"
        for lease in self.leases:
            yield f"{str(lease.record)[:12]}: kept by {lease.holder}"


@dataclass(slots=True)
class Users:
    """The stages and VMs of this host, as they were when a collection last asked."""

    config: Config
    stages: list[StageInfo] = field(default_factory=list)
    vms: list[VmRecord] = field(default_factory=list)

    def images(self) -> set[ChunkId]:
        """PvisorError when it can not be told what a stage stands on."""
        stages = Stages(self.config.stages)
        _require_known(stages)
        self.stages = stages.list()
        self.vms = Vms(self.config).list()
        return {ChunkId.parse(stage.image) for stage in self.stages} | kept_images(self.config)

    def snapshots(self) -> set[ChunkId]:
        return kept_snapshots(self.config)


def collect_here(config: Config, *, own: bool) -> tuple[CollectReport, Unnamed]:
    """Collect the store of `config`. `own`: it is this host's, on which its stages and VMs stand. PvisorError."""
    users = Users(config)
    if own:
        _let_go(config)
        report = collect(config.store, keep=users.images, keep_snapshots=users.snapshots)
    else:
        report = collect(config.store)
    with ChunkStore.open(config.store, readonly=True) as store:
        return report, _unnamed(store, users)


def _unnamed(store: ChunkStore, users: Users) -> Unnamed:
    images = {str(ref.record) for _, ref in store.refs.items()}
    named = images | {str(ref.record) for _, ref in store.snapshots.items()}

    def stays(record: str, names: set[str]) -> bool:
        return record not in names and store.has(ChunkId.parse(record))

    return Unnamed(
        stages=[stage for stage in users.stages if stays(stage.image, images)],
        vms=[ByVm(vm.name, called) for vm in users.vms for record, called in _stands_on(vm) if stays(record, named)],
        leases=[
            ByLease(lease.holder, record)
            for lease in store.leases.live()
            for record in lease.keeps
            if stays(str(record), named)
        ],
    )


def _stands_on(vm: VmRecord) -> list[tuple[str, str]]:
    """Ids of image and snapshot, and what they were called."""
    found = [
        (vm.image, vm.image_name or vm.image[:12]),
        (vm.snapshot, f"snapshot {vm.snapshot_name or vm.snapshot[:12]}"),
    ]
    return [(record, called) for record, called in found if record]


def _require_known(stages: Stages) -> None:
    """PvisorError for a stage that does not say what it stands on, unless a command is just making it: then the node
    daemon keeps that."""
    for name in stages.damaged():
        try:
            stages.require_idle(name)
        except (StageBusyError, StageNotFoundError):
            continue
        if name in stages.damaged():
            hint = f"`pvisor stage drop {name}`, or restore its stage.json"
            raise PvisorError(f"stage {name!r} does not say which image it stands on", hint=hint)


def _let_go(config: Config) -> None:
    """The node daemon keeps what is mounted: what has lost its name, and nobody uses, need not be."""
    node = connect(config)
    if node is None:
        return
    with ChunkStore.open(config.store, readonly=True) as opened:
        named = {str(ref.record) for _, ref in opened.refs.items()}
    try:
        mounts.release_unnamed(config, named)
        node.tidy()
    except PvisorError as error:
        warn(error.message)
