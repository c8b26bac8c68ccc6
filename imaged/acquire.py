"""Getting an image into the local store, or onto the server, by whichever way the configuration gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from imaged import catalog
from imaged.chunks import ChunkReader
from imaged.config import Config
from imaged.errors import NotFoundError, PvisorError
from imaged.ids import ChunkId
from imaged.names import ImageName, SourceName
from imaged.progress import Progress
from imaged.store import ChunkStore
from imaged.upstream import HttpUpstream, Job, RetryPolicy

_POLL_S = 0.1
COMMAND_RETRY = RetryPolicy(total_s=3.0)
"""Somebody waits at a terminal; the node daemon is more patient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """An image that is there now. `details` are facts for the user, such as how many layers were reused."""

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
    if not entry.ref.origin:
        yield store
        return
    from imaged.fetch import Fetcher, Tally

    fetcher = Fetcher(store, [command_upstream(entry.ref.origin)], retry=COMMAND_RETRY)
    try:
        yield fetcher.reader(entry.record.data, Tally())
    finally:
        fetcher.close()


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
    from imaged.fetch import Fetcher, Tally
    from imaged.pull import pull_image as pull

    with ChunkStore.open(config.store) as store:
        upstream = command_upstream(server)
        fetcher = Fetcher(store, [upstream], retry=COMMAND_RETRY)
        tally = Tally()
        try:
            pulled = pull(fetcher, upstream, text, lazy=lazy, progress=progress, tally=tally)
            fetcher.drain()
        finally:
            fetcher.close()
    counts = tally.to_dict()
    return Acquired(
        name=pulled.name or str(pulled.id),
        id=pulled.id,
        details={key: counts[key] for key in ("requests", "fetched_chunks", "fetched_bytes")},
    )
