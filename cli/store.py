"""`pvisor store`."""

from __future__ import annotations

from dataclasses import asdict

import click

from cli.common import Settings, human_bytes, store_options
from imaged.errors import PvisorError


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
    """Remove what no image name and no stage keeps alive.

    Nothing else may use the store meanwhile: `pvisor node stop` first, and stop the server.

    \b
    Example:
      pvisor node stop && pvisor store gc
    """
    from imaged.collect import collect
    from imaged.ids import ChunkId
    from imaged.store import ChunkStore
    from stage.kept.stages import StageInfo, Stages

    # The stages of this host stand on images of its own store.
    kept: list[StageInfo] = []
    if settings.store is None:
        stages = Stages(settings.config.stages)
        damaged = stages.damaged()
        if damaged:
            hint = f"`pvisor stage drop {damaged[0]}`, or restore its stage.json"
            raise PvisorError(f"stage {damaged[0]!r} does not say which image it stands on", hint=hint)
        kept = stages.list()
    report = collect(settings.config.store, keep={ChunkId.parse(stage.image) for stage in kept})
    with ChunkStore.open(settings.config.store, readonly=True) as opened:
        named = {str(ref.record) for _, ref in opened.refs.items()}
        unnamed = [stage for stage in kept if stage.image not in named and opened.has(ChunkId.parse(stage.image))]

    def text() -> str:
        left = f", {human_bytes(report.dead_bytes)} still lie dead" if report.dead_bytes else ""
        done = f"{report.removed_chunks} chunks removed, {human_bytes(report.freed_bytes)} freed{left}"
        images = [f"{stage.image_name or stage.image[:12]}: kept by stage {stage.name}" for stage in unnamed]
        return "\n".join([done, *images])

    settings.emit({**asdict(report), "kept_by_stages": [stage.name for stage in unnamed]}, text)


@store.command(short_help="Verify every chunk and every image.")
@click.option("--rebuild", is_flag=True, help="Make the index anew from the packs.")
@store_options
def fsck(settings: Settings, rebuild: bool) -> int:
    """Read and verify every chunk, and every image down to its last chunk. Exit code 1 when something is wrong.

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
