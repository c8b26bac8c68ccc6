"""How the store is: what it takes, what room is left, what was collected, and what is kept for whom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from imaged.chunkstore.lease import LeaseState
from imaged.chunkstore.store import StoreUsage
from imaged.collection.lastcollection import LastCollection
from imaged.jobs.job import Job, State
from imaged.web.frame import Page, empty, facts, heading, hidden, live_part, note, row, table, tiles
from imaged.web.html import Child, Html, join, tag
from imaged.web.session import Viewer
from imaged.web.text import ago, plural, size, span

_LEASES = [("Holder", ""), ("Ends", ""), ("Keeps", "num"), ("Holds back collections", "")]
_SHOWN = 200
_LOW_SHARE = 0.1
_DEAD_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What there is to say of a store. `collections` are the jobs that collected, the newest first; `collected` is the
    last collection that ended, of a job or not."""

    directory: str
    usage: StoreUsage
    disk_bytes: int
    free_bytes: int
    leases: Sequence[LeaseState]
    collections: Sequence[Job]
    collected: LastCollection | None
    images: int
    snapshots: int
    profiles: int


def health_page(health: Health, viewer: Viewer) -> Page:
    usage = health.usage
    share = (
        f"{100 * usage.stored_bytes // usage.logical_bytes}% of {size(usage.logical_bytes)}"
        if usage.logical_bytes
        else None
    )
    live: list[Child] = [
        _advice(health, viewer),
        tiles(
            ("Stored", size(usage.stored_bytes), share),
            ("Dead", size(usage.dead_bytes), "what a collection gives back"),
            ("Chunks", f"{usage.chunks:,}", f"in {plural(usage.packs, 'pack')}"),
            ("Free on the disk", size(health.free_bytes), f"of {size(health.disk_bytes)}"),
        ),
        tag(
            "div",
            tag("section", tag("h2", "Room"), _room(health), class_="card"),
            tag("section", tag("h2", "Collections"), _collections(health, viewer), class_="card"),
            class_="columns",
        ),
        tag("h2", "Leases"),
        _leases(health.leases),
    ]
    lead = "Chunks lie in pack files; a collection removes those that no name, and no lease, keeps."
    return Page(
        title="Store",
        section="/store",
        body=join(heading("Store", lead), live_part(False, live)),
        reloads=True,
    )


def _advice(health: Health, viewer: Viewer) -> Html | None:
    usage = health.usage
    if health.free_bytes < _LOW_SHARE * health.disk_bytes:
        return note("warn", f"Only {size(health.free_bytes)} are free. Remove names of images, and then collect.")
    if usage.dead_bytes > _DEAD_SHARE * (usage.stored_bytes + usage.dead_bytes) and usage.dead_bytes > 64 << 20:
        return note("warn", f"{size(usage.dead_bytes)} lie dead. A collection gives them back.")
    return None


def _room(health: Health) -> Html:
    usage, used = health.usage, health.disk_bytes - health.free_bytes
    meter = tag(
        "meter",
        f"{size(used)} of {size(health.disk_bytes)}",
        min=0,
        max=health.disk_bytes,
        value=used,
        high=int((1 - _LOW_SHARE) * health.disk_bytes),
        optimum=0,
        aria_label="Used of the disk",
    )
    return facts(
        ("Disk", join(meter, f"{size(used)} of {size(health.disk_bytes)} are used")),
        ("This store", f"{size(usage.stored_bytes + usage.dead_bytes)} in {plural(usage.packs, 'pack')}"),
        ("Directory", tag("span", health.directory, class_="mono")),
        ("Names", f"{plural(health.images, 'image')}, {plural(health.snapshots, 'snapshot')}"),
        ("Startup profiles", f"{health.profiles:,}"),
    )


def _collections(health: Health, viewer: Viewer) -> Html:
    last = next((job for job in health.collections if job.state is State.DONE), None)
    latest = health.collections[0] if health.collections else None
    said: list[Child] = []
    if latest is not None and not latest.finished:
        said.append(tag("p", "One is ", tag("a", str(latest.state), href=f"/jobs/{latest.id}"), "."))
    elif latest is not None and latest.state is State.FAILED:
        said.append(tag("p", "The last one ", tag("a", "failed", href=f"/jobs/{latest.id}"), f": {latest.error}"))
    by_hand = health.collected
    if by_hand is not None and (last is None or by_hand.ended_at > (last.ended_at or 0.0)):
        what = f"{size(by_hand.freed_bytes)} freed"
        said.append(tag("p", "The last one that ended was ", ago(by_hand.ended_at), f", by a command: {what}."))
    elif last is None:
        said.append(tag("p", "None is remembered."))
    else:
        report = last.report or {}
        freed = report.get("freed_bytes")
        what = f": {size(freed)} freed" if isinstance(freed, int) else ""
        said.append(
            tag("p", "The last one that ended was ", tag("a", ago(last.ended_at), href=f"/jobs/{last.id}"), f"{what}.")
        )
    if viewer.may_collect:
        button = tag("button", "Collect now", class_="main")
        said.append(tag("form", hidden(viewer), button, method="post", action="/store/collect"))
    else:
        said.append(tag("p", "A token of scope admin may begin one.", class_="dim"))
    return join(*said)


def _leases(leases: Sequence[LeaseState]) -> Html:
    if not leases:
        return empty(tag("p", "None: nobody is uploading, converting, or using what has no name."))
    now = time.time()
    rows = [
        row(
            _LEASES,
            join(tag("bdi", lease.holder or "–"), tag("span", lease.id, class_="id")),
            "with its process" if lease.expires_at is None else f"in {span(max(0.0, lease.expires_at - now))}",
            plural(len(lease.keeps), "record"),
            f"those after number {lease.epoch}" if lease.epoch is not None else "no",
            id=f"lease-{lease.id}",
        )
        for lease in list(leases)[:_SHOWN]
    ]
    more = tag("p", f"and {len(leases) - _SHOWN} more", class_="dim") if len(leases) > _SHOWN else None
    return join(table("Leases", _LEASES, rows), more)
