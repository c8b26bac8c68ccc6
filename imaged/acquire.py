"""Getting an image or snapshot into the local store, or onto the server, by whichever way the configuration gives."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from imaged import catalog, snapshots
from imaged.chunks import ChunkReader
from imaged.config import Config
from imaged.errors import InvalidNameError, NotFoundError, PvisorError
from imaged.ids import ChunkId
from imaged.names import ImageName, SourceName
from imaged.progress import Progress
from imaged.record import ImageRecord
from imaged.remote import Job
from imaged.snapshots import Snapshot, snapshot_origin
from imaged.store import ChunkStore
from imaged.upstream import HttpUpstream, RetryPolicy

if TYPE_CHECKING:
    from imaged.fetch import Fetcher
    from imaged.tally import Tally

_POLL_S = 0.1
COMMAND_RETRY = RetryPolicy(total_s=3.0)
"""Somebody waits at a terminal; the node daemon is more patient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """An image or snapshot that is there now. `details` are facts for the user, such as how many layers were reused."""

    name: str
    id: ChunkId
    warnings: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def command_upstream(url: str) -> HttpUpstream:
    """A server as a command asks it: with little patience when it does not answer."""
    return HttpUpstream(url, retry=COMMAND_RETRY)


def convert_image(
    config: Config, source: SourceName, *, name: str | None, platform: str | None, progress: Progress
) -> Acquired:
    """Convert into the local store; with a server, into the server's.

    A registry image is converted by the server itself. Other sources are files of this host: they are converted here
    and the chunks that the server lacks are sent to it. Without a name the image gets its own, or its source's.
    """
    wanted = ImageName.parse(name) if name is not None else None
    if config.server is None:
        return _convert_here(config, source, name=wanted, platform=platform, progress=progress)
    if source.transport == "docker":
        return _convert_at_server(config.server, source, name=wanted, platform=platform, progress=progress)
    acquired = _convert_here(config, source, name=wanted, platform=platform, progress=progress)
    from imaged.push import push_image

    with ChunkStore.open(config.store) as store, command_upstream(config.server) as upstream:
        push_image(store, upstream, catalog.find(store, acquired.name), progress)
    return acquired


@dataclass(frozen=True, slots=True)
class Offered:
    """An image that a server has under this name or id."""

    name: str
    server: str


def pull_image(config: Config, text: str, *, lazy: bool, platform: str | None, progress: Progress) -> Acquired:
    """Pull a name from the server, or a source through the server or, without one, by converting it here.

    Without a server, a name that was pulled before comes from where it came from.
    """
    found = locate(config, text, platform=platform, progress=progress)
    if isinstance(found, Acquired):
        return found
    return _pull_from_server(config, found.server, found.name, lazy=lazy, progress=progress)


def locate(config: Config, text: str, *, platform: str | None, progress: Progress) -> Acquired | Offered:
    """Where the image that `pull_image` means can be had; a source is converted, and is here already if that was done
    here."""
    if not SourceName.is_source(text):
        local = _local(config, text) if config.server is None else None
        server = local.ref.origin if local is not None else config.server
        if server:
            return Offered(text, server)
        assert local is not None
        return Acquired(name=local.name, id=local.ref.record)
    source = SourceName.parse(text)
    if config.server is None or source.transport != "docker":
        return _convert_here(config, source, name=None, platform=platform, progress=progress)
    _convert_at_server(config.server, source, name=None, platform=platform, progress=progress)
    return Offered(str(source.default_name), config.server)


@contextmanager
def image_reader(store: ChunkStore, entry: catalog.Entry) -> Iterator[ChunkReader]:
    """A reader for all chunks of an image: the store, and its origin for what is not here."""
    origins = [entry.ref.origin] if entry.ref.origin else []
    with _reader(store, entry.record.data, origins) as reader:
        yield reader


@contextmanager
def snapshot_reader(store: ChunkStore, snapshot: Snapshot) -> Iterator[ChunkReader]:
    """As `image_reader`: memory, disk and image of a snapshot may be of different servers. ChunkError, FormatError."""
    record = snapshot.record
    origins: list[str] = []
    if snapshot.ref is None or snapshot_origin(store, snapshot):
        image = ImageRecord.parse(store.get(record.image))
        roots = (record.memory, *record.block_images, image.metadata, image.data)
        origins = [origin for root in roots if (origin := store.origins.get(root))]
    with _reader(store, record.memory, list(dict.fromkeys(origins))) as reader:
        yield reader


@contextmanager
def _reader(store: ChunkStore, block_image: ChunkId, origins: Sequence[str]) -> Iterator[ChunkReader]:
    if not origins:
        yield store
        return
    from imaged.fetch import Fetcher, Tally

    fetcher = Fetcher(store, [command_upstream(origin) for origin in origins], retry=COMMAND_RETRY)
    try:
        yield fetcher.reader(block_image, Tally())
    finally:
        fetcher.close()


def push_snapshot(config: Config, text: str, *, progress: Progress, replace: bool = False) -> Acquired:
    """Send a snapshot of this host to the server; its name there moves as `imaged.push.push_snapshot` says."""
    from imaged import push

    server = require_server(config)
    with ChunkStore.open(config.store) as store, command_upstream(server) as upstream:
        snapshot = snapshots.find(store, text)
        with snapshot_reader(store, snapshot) as reader:
            sent = push.push_snapshot(store, reader, upstream, snapshot, progress, replace=replace)
    return Acquired(name=snapshot.label, id=snapshot.id, details={"pushed_chunks": sent})


def pull_snapshot(config: Config, text: str, *, lazy: bool, progress: Progress) -> Acquired:
    """Pull a snapshot from the server; without one, from where it came from, unless it is all here."""
    from imaged.snapshotpull import pull_snapshot as pull

    with ChunkStore.open(config.store) as store:
        server = config.server
        if server is None:
            snapshot = _local_snapshot(store, text)
            server = snapshot_origin(store, snapshot)
            if not server:
                return Acquired(name=snapshot.label, id=snapshot.id)
        with _fetching(store, server) as (fetcher, upstream, tally):
            pulled = pull(fetcher, upstream, text, lazy=lazy, progress=progress, tally=tally)
            fetcher.drain()
    return Acquired(name=pulled.name, id=pulled.id, details=_counts(tally))


def require_server(config: Config) -> str:
    """The server's URL. InvalidNameError when none is set."""
    if config.server is None:
        raise InvalidNameError("no server is set", hint="give --server URL or set PVISOR_SERVER")
    return config.server


def _local_snapshot(store: ChunkStore, text: str) -> Snapshot:
    try:
        return snapshots.find(store, text)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint="set --server or PVISOR_SERVER to the server that has it") from error


def _convert_here(
    config: Config, source: SourceName, *, name: ImageName | None, platform: str | None, progress: Progress
) -> Acquired:
    from imaged.convert import convert

    with ChunkStore.open(config.store) as store:
        done = convert(store, source, name=name, platform=platform, progress=progress)
    return Acquired(
        name=done.name,
        id=done.id,
        warnings=done.warnings,
        details={"layers": len(done.record.layers), "layers_reused": done.layers_reused},
    )


def _convert_at_server(
    server: str, source: SourceName, *, name: ImageName | None, platform: str | None, progress: Progress
) -> Acquired:
    follower = _Follower(progress)
    with command_upstream(server) as upstream:
        job = upstream.convert(str(source), name=str(name or source.default_name), platform=platform)
        while not job.finished:
            time.sleep(_POLL_S)
            job = upstream.job(job.id)
            follower.show(job)
    if job.image is None:
        raise PvisorError(f"server {server}: {job.error or 'the conversion failed'}", hint=job.hint)
    return Acquired(
        name=str(job.image["name"]),
        id=ChunkId.parse(str(job.image["id"])),
        warnings=tuple(str(warning) for warning in job.image.get("warnings", ())),
        details={"job": job.id},
    )


class _Follower:
    """Tells this host's progress what a server tells of a job: a step begins once, and then only grows."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step = ""
        self._done_bytes = 0

    def show(self, job: Job) -> None:
        step, done_bytes = str(job.progress.get("step") or ""), int(job.progress.get("done_bytes") or 0)
        if not step:
            return
        if step != self._step or done_bytes < self._done_bytes:
            self._progress.start(step, job.progress.get("total_bytes"))
            self._step, self._done_bytes = step, 0
        self._progress.advance(done_bytes - self._done_bytes)
        self._done_bytes = done_bytes


def _local(config: Config, text: str) -> catalog.Entry:
    """Without a server a name can only be an image that is here."""
    with ChunkStore.open(config.store) as store:
        try:
            return catalog.find(store, text)
        except NotFoundError as error:
            hint = "set --server or PVISOR_SERVER, or give a source such as docker://HOST/REPO:TAG"
            raise NotFoundError(error.message, hint=hint) from error


def _pull_from_server(config: Config, server: str, text: str, *, lazy: bool, progress: Progress) -> Acquired:
    from imaged.pull import pull_image as pull

    with ChunkStore.open(config.store) as store, _fetching(store, server) as (fetcher, upstream, tally):
        pulled = pull(fetcher, upstream, text, lazy=lazy, progress=progress, tally=tally)
        fetcher.drain()
    return Acquired(name=pulled.name or str(pulled.id), id=pulled.id, details=_counts(tally))


@contextmanager
def _fetching(store: ChunkStore, server: str) -> Iterator[tuple[Fetcher, HttpUpstream, Tally]]:
    """What a pull takes, with a command's patience."""
    from imaged.fetch import Fetcher, Tally

    upstream = command_upstream(server)
    fetcher = Fetcher(store, [upstream], retry=COMMAND_RETRY)
    try:
        yield fetcher, upstream, Tally()
    finally:
        fetcher.close()


def _counts(tally: Tally) -> dict[str, int]:
    counts = tally.to_dict()
    return {key: counts[key] for key in ("requests", "fetched_chunks", "fetched_bytes")}
