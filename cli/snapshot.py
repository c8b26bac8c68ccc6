"""`pvisor snapshot`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from cli.common import Settings, age, command_options, human_bytes, store_options
from cli.listing import Described, asking, here_or_remote, readable, show
from cli.progress import progress
from imaged import snapshots
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.collection.census import Census
from imaged.snapshot import SnapshotRecord
from imaged.snapshots import Ancestor, Snapshot
from imaged.verify import verify_snapshot

_NS = 1_000_000_000
_AGAIN = "`pvisor snapshot verify {name}`, then pull it again, or `pvisor snapshot rm {name}`"


@click.group(short_help="List, inspect, verify, remove, push and pull snapshots of VMs.")
def snapshot() -> None:
    """Snapshots of virtual machines, in the local store or in --store DIR.

    A snapshot goes by its name, its id, or the first 8 or more digits of its id. `pvisor vm park` makes one, `pvisor
    vm resume` and `pvisor vm fork` start machines from it.

    \b
    Examples:
      pvisor snapshot ls
      pvisor snapshot tree
      pvisor snapshot push ready --server http://store:7878
    """


def describe(name: str | None, snapshot_id: str, record: SnapshotRecord, **more: Any) -> dict[str, Any]:
    """What `ls --json` and `inspect` show of a snapshot."""
    return {
        "id": snapshot_id,
        "name": name,
        "vm": record.vm,
        "image": str(record.image),
        "parent": None if record.parent is None else str(record.parent),
        "memory_bytes": record.machine.memory_bytes,
        "disk_bytes": record.disk_bytes,
        "dirty_bytes": record.dirty_bytes,
        "created_ns": record.created_ns,
        **more,
    }


def describe_local(store: ChunkStore, census: Census, found: Snapshot) -> dict[str, Any]:
    """With how much of it is in this store."""
    ref = found.ref
    known = census.snapshot(found.id)
    present = census.present(known)
    origin = snapshots.snapshot_origin(store, found)
    chunks = max(len(known), ref.chunks or 0 if ref is not None else 0)
    stored_bytes = ref.stored_bytes if ref is not None and ref.stored_bytes is not None else present.stored_bytes
    return describe(
        found.name,
        str(found.id),
        found.record,
        chunks=chunks,
        present_chunks=present.chunks,
        stored_bytes=stored_bytes,
        origin=origin,
        complete=not origin,
    )


@snapshot.command("ls")
@here_or_remote("snapshots")
def list_snapshots(settings: Settings, at: str | None) -> None:
    """List snapshots.

    MEMORY and DISK are the machine's, DIRTY what was captured from the guest for this snapshot, uncompressed. STORED is
    what all its chunks take in a store, those that it shares with its image, its parent and other snapshots among them.
    STATE is complete, or how much of a lazily pulled snapshot is here.

    \b
    Examples:
      pvisor snapshot ls
      pvisor snapshot ls --server http://store:7878
    """
    found = _local_snapshots(settings) if at is None else _remote_snapshots(at)
    show(settings, found, ["NAME", "ID", "AGE", "VM", "MEMORY", "DISK", "DIRTY", "STORED", "STATE"], _row)


def _row(found: Described, now: float) -> list[str]:
    return [
        found["name"],
        found["id"][:12],
        age(now - found["created_ns"] / _NS),
        found["vm"],
        human_bytes(found["memory_bytes"]),
        human_bytes(found["disk_bytes"]) if found["disk_bytes"] else "-",
        human_bytes(found["dirty_bytes"]),
        human_bytes(found["stored_bytes"]),
        _state(found),
    ]


def _state(found: Described) -> str:
    """How much is here, in words: 100% only when it is all."""
    if not found["origin"]:
        return "complete"
    return f"lazy {min(100 * found['present_chunks'] // max(found['chunks'], 1), 99)}%"


def _local_snapshots(settings: Settings) -> list[dict[str, Any]]:
    if not settings.config.store.exists():
        return []
    with ChunkStore.open(settings.config.store, readonly=True) as store:
        census = Census(store)

        def described(name: str, ref: SnapshotRef) -> dict[str, Any]:
            return describe_local(store, census, snapshots.load(store, name, ref))

        return list(readable(store.snapshots.items(), described, _AGAIN))


def _remote_snapshots(at: str) -> list[dict[str, Any]]:
    with asking(at) as upstream:
        return [
            describe(
                found.name,
                str(found.id),
                found.record,
                chunks=found.chunks,
                stored_bytes=found.stored_bytes,
                origin="",
            )
            for found in upstream.snapshots()
        ]


@snapshot.command(short_help="Show everything known of a snapshot.")
@click.argument("name", metavar="SNAP")
@store_options
def inspect(settings: Settings, name: str) -> None:
    """Show everything known of a snapshot; prints JSON.

    `own_bytes` is what of it neither its image nor its parent has, compressed; null when the parent is gone.

    \b
    Example:
      pvisor snapshot inspect ready
    """
    import json

    with ChunkStore.open(settings.config.store, readonly=True) as store:
        found = snapshots.find(store, name)
        record = found.record
        profile = store.profiles.get(record.memory)
        census = Census(store)
        document = {
            **describe_local(store, census, found),
            "image_names": [image for image, ref in store.refs.items() if ref.record == record.image],
            "parent_names": [one for one, ref in store.snapshots.items() if ref.record == record.parent],
            "memory": str(record.memory),
            "disk": None if record.disk is None else str(record.disk),
            "state": str(record.state),
            "machine": record.machine.to_json(),
            "own_bytes": _own_bytes(store, census, found),
            "profile": None if profile is None else {"runs": profile.runs, "entries": len(profile.chunks)},
        }
    settings.emit(document, lambda: json.dumps(document, indent=2))


def _own_bytes(store: ChunkStore, census: Census, found: Snapshot) -> int | None:
    record = found.record
    shared = census.image(record.image)
    if record.parent is not None:
        if not store.has(record.parent):
            return None
        shared |= census.snapshot(record.parent)
    return census.present(census.snapshot(found.id) - shared).stored_bytes


@snapshot.command(short_help="Show which snapshot descends from which.")
@store_options
def tree(settings: Settings) -> None:
    """Show which snapshot descends from which, each below its parent.

    A parent without a name is shown too while it is in the store, and as gone once it is not: its children need
    nothing of it.

    \b
    Example:
      pvisor snapshot tree
    """
    if settings.config.store.exists():
        with ChunkStore.open(settings.config.store, readonly=True) as store:
            found = snapshots.lineage(store)
    else:
        found = []
    settings.emit([_branch(one) for one in found], lambda: "\n".join(_line(one) for one in found))


def _branch(one: Ancestor) -> dict[str, Any]:
    record = one.record
    return {
        "id": str(one.id),
        "names": list(one.names),
        "depth": one.depth,
        "gone": record is None,
        "parent": str(record.parent) if record is not None and record.parent is not None else None,
        "vm": record.vm if record is not None else None,
        "created_ns": record.created_ns if record is not None else None,
    }


def _line(one: Ancestor) -> str:
    gone = ["(gone)"] if one.record is None else []
    label = " ".join([*one.names, *gone]) or "(no name)"
    about = ""
    if one.record is not None:
        about = f"  {one.record.vm}, {age(time.time() - one.record.created_ns / _NS)}"
    return f"{'  ' * one.depth}{label}  {str(one.id)[:12]}{about}"


@snapshot.command()
@click.argument("names", nargs=-1, required=True, metavar="SNAP...")
@here_or_remote("names")
def rm(settings: Settings, names: tuple[str, ...], at: str | None) -> None:
    """Remove names. `pvisor store gc` then frees what no other snapshot, image, VM or stage keeps; at a server its next
    collection does.

    Snapshots that descend from it lose nothing.

    \b
    Examples:
      pvisor snapshot rm ready
      pvisor snapshot rm ready --server http://store:7878
    """
    if at is not None:
        with asking(at) as upstream:
            removed = [upstream.remove_snapshot(name) for name in names]
    else:
        with ChunkStore.open(settings.config.store) as store:
            removed = [snapshots.remove(store, name) for name in names]
    settings.emit({"removed": removed}, "\n".join(removed))


@snapshot.command(short_help="Check every chunk of a snapshot.")
@click.argument("name", metavar="SNAP")
@store_options
def verify(settings: Settings, name: str) -> int:
    """Check every chunk of a snapshot and of its image that is here against its id. Exit code 1 when something is
    corrupt or lost.

    Nothing is fetched: of a lazily pulled snapshot it says how many chunks are not here yet.

    \b
    Example:
      pvisor snapshot verify ready
    """
    with ChunkStore.open(settings.config.store) as store, progress(settings) as line:
        found = snapshots.find(store, name)
        report = verify_snapshot(store, found, line)
    document = {"name": found.name, "id": str(found.id), "sound": report.sound, **asdict(report)}
    settings.emit(document, lambda: report.text(found.label))
    return 0 if report.sound else 1


@snapshot.command(short_help="Send a snapshot to the server.")
@click.option("--force", is_flag=True, help="Take the name from whatever other snapshot has it at the server.")
@click.argument("name", metavar="SNAP")
@command_options
def push(settings: Settings, name: str, force: bool) -> None:
    """Send a snapshot to the server, with the image it stands on: only the chunks that the server lacks.

    Where the server has a snapshot of this name that this one does not descend from, it is refused, unless --force is
    given.

    \b
    Examples:
      pvisor snapshot push ready --server http://store:7878
      pvisor snapshot push --force ready
    """
    from imaged.transfer.acquire import push_snapshot

    with progress(settings) as line:
        pushed = push_snapshot(settings.config, name, progress=line, replace=force)
    document = {"name": pushed.name, "id": str(pushed.id), **pushed.details}
    settings.emit(document, f"{pushed.name}  {pushed.id}")


@snapshot.command(short_help="Fetch a snapshot from the server, lazily.")
@click.option(
    "--lazy/--complete",
    default=True,
    help="Fetch what a restore begins with (the default); memory and disk arrive when they are read. Or all of it.",
)
@click.argument("name", metavar="SNAP")
@command_options
def pull(settings: Settings, name: str, lazy: bool) -> None:
    """Fetch a snapshot from the server, ready for `pvisor vm resume`.

    Without a server, one that was pulled before is fetched from where it came from. A name moves only from a snapshot
    that was pulled or pushed as it is: one that only this host has keeps it, and the pull is refused.

    \b
    Examples:
      pvisor snapshot pull ready --server http://store:7878
      pvisor snapshot pull --complete ready
    """
    from imaged.transfer.acquire import pull_snapshot

    with progress(settings) as line:
        pulled = pull_snapshot(settings.config, name, lazy=lazy, progress=line)
    document = {"name": pulled.name, "id": str(pulled.id), **pulled.details}
    settings.emit(document, f"{pulled.name}  {pulled.id}")
