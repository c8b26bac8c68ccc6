"""`pvisor store`."""

from __future__ import annotations

from dataclasses import asdict

import click

from cli.common import Settings, human_bytes, store_options
from imaged.errors import PvisorError


@click.group(short_help="Look after the chunk store.")
def store() -> None:
    """Look after the chunk store in PVISOR_HOME, or in --store DIR."""


@store.command()
@store_options
def df(settings: Settings) -> None:
    """Show what the store holds and what it takes on disk."""
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


@store.command()
@store_options
def gc(settings: Settings) -> None:
    """Remove what no image name and no stage keeps alive.

    Nothing else may use the store meanwhile: `pvisor node stop` first, and stop the server.
    """
    from imaged.collect import collect
    from imaged.ids import ChunkId
    from stage.kept.stages import Stages

    # The stages of this host stand on images of its own store.
    keep: set[ChunkId] = set()
    if settings.store is None:
        stages = Stages(settings.config.stages)
        damaged = stages.damaged()
        if damaged:
            hint = f"`pvisor stage drop {damaged[0]}`, or restore its stage.json"
            raise PvisorError(f"stage {damaged[0]!r} does not say which image it stands on", hint=hint)
        keep = {ChunkId.parse(stage.image) for stage in stages.list()}
    report = collect(settings.config.store, keep=keep)

    def text() -> str:
        left = f", {human_bytes(report.dead_bytes)} still lie dead" if report.dead_bytes else ""
        return f"{report.removed_chunks} chunks removed, {human_bytes(report.freed_bytes)} freed{left}"

    settings.emit(asdict(report), text)


@store.command()
@click.option("--rebuild", is_flag=True, help="Make the index anew from the packs.")
@store_options
def fsck(settings: Settings, rebuild: bool) -> int:
    """Read and verify every chunk, and every image down to its last chunk. Exit code 1 when something is wrong."""
    from imaged.fsck import check

    report = check(settings.config.store, rebuild=rebuild)
    settings.emit(
        asdict(report),
        lambda: "\n".join([*report.errors, *report.hints, f"{report.chunks} chunks, {len(report.errors)} errors"]),
    )
    return 1 if report.errors else 0
