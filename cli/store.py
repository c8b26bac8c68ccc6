"""`pvisor store`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cli.common import Settings, human_bytes, store_options
from imaged.errors import PvisorError

if TYPE_CHECKING:
    from vmm.record import VmRecord


@click.group(short_help="Look after the chunk store.")
def store() -> None:
    """Look after the chunk store in PVISOR_HOME, or in --store DIR.

    \b
    Examples:
      pvisor store df
      pvisor store gc
      pvisor store fsck --store /srv/pvisor
    """


@store.command(short_help="Show what the store holds.")
@store_options
def df(settings: Settings) -> None:
    """Show what the store holds and what it takes on disk.

    \b
    Example:
      pvisor store df
    """
    from imaged.store import ChunkStore

    with ChunkStore.open(settings.config.store, readonly=True) as opened:
        usage = opened.df()
    settings.emit(
        asdict(usage),
        lambda: (
            f"{usage.chunks} chunks in {usage.packs} packs\n"
            f"logical  {human_bytes(usage.logical_bytes)}\n"
            f"stored   {human_bytes(usage.stored_bytes)}\n"
            f"dead     {human_bytes(usage.dead_bytes)}"
        ),
    )


@store.command(short_help="Remove what nothing keeps alive.")
@store_options
def gc(settings: Settings) -> None:
    """Remove what no name of an image or snapshot, no stage and no VM keeps alive.

    Nothing else may use the store meanwhile: stop the server, and `pvisor node stop`, which VMs that run must be parked
    or removed for.

    \b
    Example:
      pvisor node stop && pvisor store gc
    """
    from imaged.collect import collect
    from imaged.ids import ChunkId
    from imaged.store import ChunkStore
    from stage.kept.stages import StageInfo, Stages
    from vmm.vms import Vms, kept_images, kept_snapshots

    # The stages and VMs of this host stand on images and snapshots of its own store.
    kept: list[StageInfo] = []
    vms: list[VmRecord] = []

    def images() -> set[ChunkId]:
        if settings.store is not None:
            return set()
        stages = Stages(settings.config.stages)
        damaged = stages.damaged()
        if damaged:
            hint = f"`pvisor stage drop {damaged[0]}`, or restore its stage.json"
            raise PvisorError(f"stage {damaged[0]!r} does not say which image it stands on", hint=hint)
        kept.extend(stages.list())
        vms.extend(Vms(settings.config).list())
        return {ChunkId.parse(stage.image) for stage in kept} | kept_images(settings.config)

    def used() -> set[ChunkId]:
        return kept_snapshots(settings.config) if settings.store is None else set()

    report = collect(settings.config.store, keep=images, keep_snapshots=used)
    with ChunkStore.open(settings.config.store, readonly=True) as opened:
        named = {str(ref.record) for _, ref in opened.refs.items()}
        unnamed = [stage for stage in kept if stage.image not in named and opened.has(ChunkId.parse(stage.image))]
        named |= {str(ref.record) for _, ref in opened.snapshots.items()}
        held = [(one, what, name) for one in vms for what, name in _stands_on(one) if what not in named]
        held = [(one, what, name) for one, what, name in held if opened.has(ChunkId.parse(what))]

    def text() -> str:
        left = f", {human_bytes(report.dead_bytes)} still lie dead" if report.dead_bytes else ""
        done = f"{report.removed_chunks} chunks removed, {human_bytes(report.freed_bytes)} freed{left}"
        lines = [f"{stage.image_name or stage.image[:12]}: kept by stage {stage.name}" for stage in unnamed]
        lines += [f"{name or what[:12]}: kept by VM {one.name}" for one, what, name in held]
        return "\n".join([done, *lines])

    kept_by_vms = list(dict.fromkeys(one.name for one, _, _ in held))
    settings.emit(
        {**asdict(report), "kept_by_stages": [stage.name for stage in unnamed], "kept_by_vms": kept_by_vms}, text
    )


def _stands_on(vm: VmRecord) -> list[tuple[str, str]]:
    """Ids of image and snapshot, and what they were called."""
    found = [(vm.image, vm.image_name), (vm.snapshot, f"snapshot {vm.snapshot_name or vm.snapshot[:12]}")]
    return [(what, name) for what, name in found if what]


@store.command(short_help="Verify every chunk, image and snapshot.")
@click.option("--rebuild", is_flag=True, help="Make the index anew from the packs.")
@store_options
def fsck(settings: Settings, rebuild: bool) -> int:
    """Read and verify every chunk, and every image and snapshot down to its last chunk. Exit code 1 when something is
    wrong.

    \b
    Examples:
      pvisor store fsck
      pvisor store fsck --rebuild
    """
    from imaged.fsck import check

    report = check(settings.config.store, rebuild=rebuild)
    settings.emit(
        asdict(report),
        lambda: "\n".join([*report.errors, *report.hints, f"{report.chunks} chunks, {len(report.errors)} errors"]),
    )
    return 1 if report.errors else 0
