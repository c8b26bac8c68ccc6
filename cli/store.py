"""`pvisor store`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cli.common import Settings, age, human_bytes, store_options, table
from cli.listing import asking, here_or_remote
from cli.progress import progress

if TYPE_CHECKING:
    from imaged.collection.lastcollection import LastCollection
    from imaged.collection.usage import ImageUsage


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
@click.option("--totals", is_flag=True, help="Only the sums, which takes no time on a large store.")
@store_options
def df(settings: Settings, totals: bool) -> None:
    """Show what the store holds and what it takes on disk, and of each image and snapshot what is here, how much of
    that others have too, and how much goes with its last name.

    \b
    Examples:
      pvisor store df
      pvisor store df --totals --json
    """
    from imaged.chunkstore.store import ChunkStore
    from imaged.collection import lastcollection
    from imaged.collection.eviction import noted_bound, used_bytes
    from imaged.collection.usage import image_usage

    with ChunkStore.open(settings.config.store, readonly=True) as opened:
        usage, disk_bytes, bound = opened.df(), used_bytes(opened.root), noted_bound(opened.index)
        collected = lastcollection.noted(opened.index)
        images = [] if totals else image_usage(opened)
    of_bound = f" of {human_bytes(bound)} (--cache-max)" if bound is not None else ""
    settings.emit(
        {
            **asdict(usage),
            "disk_bytes": disk_bytes,
            "cache_max_bytes": bound,
            "last_collection": None if collected is None else asdict(collected),
            **({} if totals else {"images": [asdict(one) for one in images]}),
        },
        lambda: "\n".join(
            [
                f"{usage.chunks} chunks in {usage.packs} packs",
                f"logical  {human_bytes(usage.logical_bytes)}",
                f"stored   {human_bytes(usage.stored_bytes)}",
                f"dead     {human_bytes(usage.dead_bytes)}",
                f"on disk  {human_bytes(disk_bytes)}{of_bound}",
                *([f"collected {_when(collected)}"] if collected is not None else []),
                *(["", table(["NAME", "LIVE", "SHARED", "OWN"], _lines(images))] if images else []),
            ]
        ),
    )


def _when(collected: LastCollection) -> str:
    shown = age(time.time() - collected.ended_at)
    return f"{'just now' if shown == 'now' else f'{shown} ago'}, {human_bytes(collected.freed_bytes)} freed"


def _lines(images: Sequence[ImageUsage]) -> list[list[str]]:
    return [
        [
            ", ".join(one.names) if one.kind == "image" else f"snapshot {', '.join(one.names)}",
            human_bytes(one.live_bytes),
            human_bytes(one.shared_bytes),
            human_bytes(one.own_bytes),
        ]
        for one in images
    ]


@store.command(short_help="Remove what nothing keeps alive.")
@here_or_remote("store")
def gc(settings: Settings, at: str | None) -> None:
    """Remove what no name of an image or snapshot, no stage, no VM, and nothing that is being made or used keeps alive.

    The server, the node daemon, conversions and VMs go on meanwhile. With --server that server does it, on its
    own store.

    \b
    Examples:
      pvisor store gc
      pvisor store gc --store /srv/pvisor
      pvisor store gc --server http://store:7878
    """
    if at is not None:
        _collect_there(settings, at)
        return
    from cli.garbage import collect_here

    report, unnamed = collect_here(settings.config, own=settings.store is None)

    def text() -> str:
        left = f", {human_bytes(report.dead_bytes)} still lie dead" if report.dead_bytes else ""
        done = f"{report.removed_chunks} chunks removed, {human_bytes(report.freed_bytes)} freed{left}"
        lines = [done, *unnamed.lines()]
        if report.waiting_chunks:
            who = ", ".join(report.waiting_for) or "names that change all the time"
            lines.append(f"{report.waiting_chunks} chunks more can go when this has ended: {who}")
        return "\n".join(lines)

    settings.emit(
        {
            **asdict(report),
            "kept_by_stages": [stage.name for stage in unnamed.stages],
            "kept_by_vms": list(dict.fromkeys(one.vm for one in unnamed.vms)),
            "kept_by_leases": sorted({one.holder for one in unnamed.leases}),
        },
        text,
    )


def _collect_there(settings: Settings, at: str) -> None:
    from imaged.transfer.serverjob import collect_there

    with asking(at) as upstream, progress(settings) as line:
        report = collect_there(upstream, line)
    freed, removed = report.get("freed_bytes", 0), report.get("removed_chunks", 0)
    settings.emit(report, f"{removed} chunks removed, {human_bytes(freed)} freed")


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
    from imaged.chunkstore.fsck import check

    report = check(settings.config.store, rebuild=rebuild)
    settings.emit(
        asdict(report),
        lambda: "\n".join([*report.errors, *report.hints, f"{report.chunks} chunks, {len(report.errors)} errors"]),
    )
    return 1 if report.errors else 0
