"""The snapshot that VMs are made from: found by what a user types, pulled when it is not here, and opened."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from fuse import node
from fuse.errors import NodeError
from fuse.opened import OpenSnapshot
from imaged.config import Config
from imaged.errors import ChunkError, FormatError, NotFoundError, UpstreamError
from imaged.progress import Progress
from vmm.names import NAME
from vmm.vms import Vms

if TYPE_CHECKING:
    from imaged.snapshots import Snapshot

_NOT_HERE = "no snapshot {} on this host, and no VM of this name"
_LIKE_AN_ID = re.compile(r"[0-9a-f]{8,64}")


def base_name(vms: Vms, text: str, server: str | None, progress: Progress) -> str:
    """What VMs of it are called: as the VM or snapshot that the text names. From (the start of) an id they are called
    as the snapshot is, else as the VM that it was made of. NotFoundError, UpstreamError."""
    if NAME.fullmatch(text) and (vms.exists(text) or not _LIKE_AN_ID.fullmatch(text)):
        return text
    found = _found(vms.config, text)
    if found is None and server and vms.config.store.is_dir() and not _is_here(vms.config, text):
        _pull(vms.config, text, server, progress)
        found = _found(vms.config, text)
    names = (found.name or "", found.record.vm) if found is not None else ()
    return next((name for name in names if NAME.fullmatch(name)), "vm")


def _found(config: Config, text: str) -> Snapshot | None:
    """The snapshot, when it is here and whole enough to be opened."""
    if not config.store.is_dir():
        return None
    from imaged import snapshots
    from imaged.chunkstore.store import ChunkStore

    with ChunkStore.open(config.store, readonly=True) as store:
        try:
            return snapshots.find(store, text)
        except (NotFoundError, ChunkError, FormatError):  # opening it says so
            return None


def open_snapshot(config: Config, snapshot: str, server: str | None, progress: Progress) -> OpenSnapshot:
    """One that is not here is pulled lazily first. NodeError, NotFoundError, UpstreamError."""
    try:
        return node.open_snapshot(config, snapshot, server=server)
    except NodeError as error:
        if not config.store.is_dir() or _is_here(config, snapshot):
            raise
        if not server:
            hint = "`pvisor snapshot ls` lists them; set --server or PVISOR_SERVER to get one from a server"
            raise NotFoundError(_NOT_HERE.format(snapshot), hint=hint) from error
    _pull(config, snapshot, server, progress)
    return node.open_snapshot(config, snapshot, server=server)


def _pull(config: Config, snapshot: str, server: str, progress: Progress) -> None:
    """Lazily. NotFoundError, UpstreamError."""
    from imaged.transfer.acquire import pull_snapshot

    text = _NOT_HERE.format(snapshot)
    try:
        pull_snapshot(replace(config, server=server), snapshot, lazy=True, progress=progress)
    except NotFoundError as error:
        hint = "`pvisor snapshot ls` lists snapshots, with --remote the server's"
        raise NotFoundError(f"{text}; and none at {server}", hint=hint) from error
    except UpstreamError as error:
        raise UpstreamError(f"{text}; and {error.message}", hint=error.hint) from error


def _is_here(config: Config, snapshot: str) -> bool:
    """Whether the store knows the snapshot, damaged or not, or more than one that is meant."""
    from imaged.chunkstore.store import ChunkStore
    from imaged.snapshots import knows

    with ChunkStore.open(config.store, readonly=True) as store:
        return knows(store, snapshot)
