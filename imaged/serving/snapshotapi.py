"""HTTP handlers for snapshots."""

from __future__ import annotations

import time
from typing import Any, Literal

from aiohttp import web

from imaged import snapshots
from imaged.blockimage import BlockImage, open_blob
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import require_own
from imaged.errors import ChunkMissingError, FormatError, NameTakenError, NotFoundError
from imaged.ids import ChunkId
from imaged.measure import measure
from imaged.names import snapshot_name
from imaged.reach import reachable_snapshot
from imaged.serving.access import grant, view
from imaged.serving.blocking import Blocking
from imaged.serving.bootapi import DamagedError, answer, choice, is_known, known
from imaged.serving.bootview import BootView, snapshot_view
from imaged.serving.chunkapi import ChunkApi, parse_id, read_json
from imaged.serving.throughstore import ThroughStore
from imaged.snapshot import STATE_LIMIT_BYTES, SnapshotRecord
from imaged.snapshots import Snapshot


class SnapshotApi:
    """The handlers under /v1/snapshots of one store."""

    def __init__(self, store: ChunkStore, chunks: ChunkApi, blocking: Blocking) -> None:
        self._store = store
        self._chunks = chunks
        self._blocking = blocking

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/snapshots", self.list_all),
            web.get("/v1/snapshots/{name}", self.one),
            web.put("/v1/snapshots/{name}", self.publish),
            web.delete("/v1/snapshots/{name}", self.remove),
        ]

    async def list_all(self, request: web.Request) -> web.Response:
        """GET snapshots: all that have a name and a record that can be read; one damaged snapshot hides no other."""
        return web.json_response({"snapshots": await self._blocking.run(_list, view(request, self._store))})

    async def one(self, request: web.Request) -> web.StreamResponse:
        """GET snapshots/NAME: the snapshot as JSON, or with ?view=boot as the frames that a restore begins with, with
        &profile=frame after that of its profile."""
        wanted = choice(request, "view", "boot")
        profile = choice(request, "profile", "frame")
        store, name = view(request, self._store), request.match_info["name"]
        snapshot, boot = await self._blocking.run(_find_view, store, name, wanted, known(request))
        document = _document(snapshot)
        if snapshot.ref is not None and snapshot.ref.origin and not isinstance(store, ThroughStore):
            document["complete"] = False
        return await answer(request, self._chunks, document, boot, header="Pvisor-Snapshot", profile=profile)

    async def publish(self, request: web.Request) -> web.Response:
        """PUT snapshots/NAME {"id", "replaces"}: name a snapshot of which every chunk is here, its image among them.

        A name that stands for another snapshot moves only from the one that `replaces` says, or from any for "*".
        """
        name = snapshot_name(request.match_info["name"])
        require_own(grant(request).namespace, name, ".", "snapshots")
        body = await read_json(request)
        over: ChunkId | Literal["*"] | None = None
        if body.get("replaces") is not None:
            over = "*" if body["replaces"] == "*" else parse_id(body, "replaces")
        store, lease, record = view(request, self._store), request.headers.get("Pvisor-Lease"), parse_id(body, "id")
        return web.json_response(_document(await self._blocking.run(self._publish, store, lease, name, record, over)))

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE snapshots/NAME: what it stood for stays until a collection, and its descendants stay whole."""
        name = request.match_info["name"]
        return web.json_response(
            {"removed": await self._blocking.run(snapshots.remove, view(request, self._store), name)}
        )

    def _publish(
        self, store: ChunkStore, lease: str | None, name: str, record: ChunkId, over: ChunkId | Literal["*"] | None
    ) -> Snapshot:
        with self._chunks.naming(store, lease):
            return self._measured(store, name, record, over)

    def _measured(self, store: ChunkStore, name: str, record: ChunkId, over: ChunkId | Literal["*"] | None) -> Snapshot:
        """Under a lease: what is found here stays until it has its name."""
        chunks, stored_bytes = measure(store, "snapshot", record, reachable_snapshot)
        ref = SnapshotRef(record=record, created_at=int(time.time()), chunks=chunks, stored_bytes=stored_bytes)
        snapshot = snapshots.load(store, name, ref)
        _require_sound(store, snapshot.record)
        if over == "*":
            store.snapshots.set(name, ref)
        elif not store.snapshots.replace(name, ref, over=over):
            hint = f"`pvisor snapshot push --force {name}` replaces it"
            raise NameTakenError(f"there is another snapshot {name!r} already", hint=hint)
        return snapshot


def _list(store: ChunkStore) -> list[dict[str, Any]]:
    return [_document(snapshot) for snapshot in snapshots.listing(store)]


def _find_view(store: ChunkStore, name: str, wanted: str | None, known: str) -> tuple[Snapshot, BootView | None]:
    """The snapshot, and its boot view if that is asked for and the client does not have it."""
    if isinstance(store, ThroughStore):
        store.find_snapshot(name)
    snapshot = _find(store, name)
    lacking = wanted is not None and not is_known(snapshot.id, known)
    try:
        return snapshot, snapshot_view(store, snapshot) if lacking else None
    except ChunkMissingError as error:
        if snapshot.ref is None or not snapshot.ref.origin:
            raise
        hint = "another server may have the rest"
        raise NotFoundError(f"snapshot {name} is here in part only: {error.message}", hint=hint) from error


def _find(store: ChunkStore, text: str) -> Snapshot:
    name, ref = snapshots.resolve(store, text)
    try:
        return snapshots.load(store, name, ref)
    except FormatError as error:
        hint = "push it again with --force, from this version of pVisor"
        raise DamagedError(f"snapshot {name}, in the server's store: {error.message}", hint=hint) from error


def _require_sound(store: ChunkStore, record: SnapshotRecord) -> None:
    """FormatError for what no machine could go on from."""
    open_blob(store, record.state, limit_bytes=STATE_LIMIT_BYTES)
    record.require_sizes(
        memory_bytes=BlockImage.open(store, record.memory).size_bytes,
        disk_bytes=0 if record.disk is None else BlockImage.open(store, record.disk).size_bytes,
    )


def _document(snapshot: Snapshot) -> dict[str, Any]:
    ref = snapshot.ref
    assert ref is not None  # a server lists and finds by name
    return {
        "name": snapshot.name,
        "id": str(snapshot.id),
        "record": snapshot.record.to_json(),
        "chunks": ref.chunks or 0,
        "stored_bytes": ref.stored_bytes or 0,
        "created_at": ref.created_at,
    }
