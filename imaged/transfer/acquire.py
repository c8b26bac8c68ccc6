"""Getting an image or snapshot into the local store, or onto the server, by whichever way the configuration gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from imaged import catalog, snapshots
from imaged.chunks import ChunkReader
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config, server_urls
from imaged.errors import InvalidNameError, NotFoundError, SignatureError
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.tiers import first, tiers
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.names import ImageName, SourceName
from imaged.progress import Progress
from imaged.record import ImageRecord
from imaged.signature import SigningKey, Trust
from imaged.snapshots import Snapshot, snapshot_origin

if TYPE_CHECKING:
    from imaged.fetching.fetch import Fetcher
    from imaged.fetching.tally import Tally
    from imaged.transfer.pull import Pulled
    from imaged.transfer.snapshotpull import PulledSnapshot

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
    config: Config,
    source: SourceName,
    *,
    name: str | None,
    platform: str | None,
    progress: Progress,
    key: SigningKey | None = None,
) -> Acquired:
    """Convert into the local store; with a server, into the server's.

    A registry image is converted by the server itself. Other sources are files of this host: they are converted here
    and the chunks that the server lacks are sent to it. Without a name the image gets its own, or its source's.
    With a `key` the result is signed, here: what a server converted is signed as the server says it is.
    """
    wanted = ImageName.parse(name) if name is not None else None
    if config.origin is not None and source.transport == "docker":
        acquired = _convert_at_server(config.origin, source, name=wanted, platform=platform, progress=progress)
        if key is not None:
            _sign_at_server(config.origin, acquired.name, acquired.id, key)
        return acquired
    acquired = _convert_here(config, source, name=wanted, platform=platform, progress=progress)
    if key is not None:
        with ChunkStore.open(config.store) as store:
            _sign_here(store, acquired.name, acquired.id, key)
    if config.origin is None:
        return acquired
    from imaged.transfer.push import push_image

    with ChunkStore.open(config.store) as store, command_upstream(config.origin) as upstream:
        push_image(store, upstream, catalog.find(store, acquired.name), progress)
    return acquired


@dataclass(frozen=True, slots=True)
class Offered:
    """An image that a server has under this name or id, or one of several (`Config.server`)."""

    name: str
    server: str
    warnings: tuple[str, ...] = ()
    """Of the conversion that brought it there just now."""


def pull_image(config: Config, text: str, *, lazy: bool, platform: str | None, progress: Progress) -> Acquired:
    """Pull a name from the server, or a source through the server or, without one, by converting it here.

    Without a server, a name that was pulled before comes from where it came from.
    """
    found = locate(config, text, platform=platform, progress=progress)
    if isinstance(found, Acquired):
        return found
    pulled = _pull_from_server(config, found.server, found.name, lazy=lazy, progress=progress)
    return replace(pulled, warnings=(*found.warnings, *pulled.warnings))


def sign_image(config: Config, text: str, key: SigningKey, *, server: str | None) -> Acquired:
    """Sign an image under its full name: in the local store when it is there, and at a server when one is given.

    What is signed at the server is what this host has under the name; SignatureError when the server has another image.
    Only of an image that is not here at all the server is believed what the name stands for. NotFoundError.
    """
    local: catalog.Entry | None = None
    if server is None or config.store.exists():
        with ChunkStore.open(config.store) as store:
            try:
                local = catalog.find(store, text)
                _sign_here(store, local.name, local.ref.record, key)
            except NotFoundError:
                if server is None:
                    raise
    if server is None:
        assert local is not None  # else it was not found
        return Acquired(name=local.name, id=local.ref.record, details={"key": key.public.id})
    asked = local.name if local is not None else str(ImageName.parse(text))
    with command_upstream(server) as upstream:
        there = upstream.image(asked)
    if there.name != asked:
        raise SignatureError(f"{server} has {there.name or there.id}, not {asked}", hint="give its whole name")
    if local is not None and there.id != local.ref.record:
        raise SignatureError(
            f"image {asked} is signed here only: it is {local.ref.record}, but {there.id} at {server}",
            hint="pull it, or convert it with --server, so that both are the image you mean",
        )
    _sign_at_server(server, there.name, there.id, key)
    return Acquired(name=there.name, id=there.id, details={"key": key.public.id, "server": server})


def _sign_here(store: ChunkStore, name: str, image: ChunkId, key: SigningKey) -> None:
    if store.refs.sign(name, image, [key.sign(name, image)]) is None:
        raise NotFoundError(f"image {name} was removed or replaced just now")


def _sign_at_server(server: str, name: str, image: ChunkId, key: SigningKey) -> None:
    """The key stays here: the server gets the signature."""
    with command_upstream(server) as upstream:
        upstream.publish(name, image, [key.sign(name, image)])


def locate(config: Config, text: str, *, platform: str | None, progress: Progress) -> Acquired | Offered:
    """Where the image that `pull_image` means can be had; a source is converted, and is here already if that was done
    here. SignatureError for one that is here, and not signed as the configuration requires."""
    trust = Trust.read(config.require_signature)
    if not SourceName.is_source(text):
        local = _local(config, text, trust) if config.server is None else None
        server = local.ref.origin if local is not None else config.server
        if server:
            return Offered(text, server)
        assert local is not None
        return Acquired(name=local.name, id=local.ref.record)
    source = SourceName.parse(text)
    if config.origin is None or source.transport != "docker":
        if trust:
            hint = "`pvisor convert` it, `pvisor image sign` the result, and give the name of that"
            raise SignatureError(f"a signature is required, and {source} is a source: it has none", hint=hint)
        return _convert_here(config, source, name=None, platform=platform, progress=progress)
    done = _convert_at_server(config.origin, source, name=None, platform=platform, progress=progress)
    return Offered(done.name, config.origin, done.warnings)


@contextmanager
def image_reader(store: ChunkStore, entry: catalog.Entry) -> Iterator[ChunkReader]:
    """A reader for all chunks of an image: the store, and its origin for what is not here."""
    origins = [entry.ref.origin] if entry.ref.origin else []
    with _reader(store, entry.record.data, origins) as reader:
        yield reader


@contextmanager
def snapshot_reader(store: ChunkStore, snapshot: Snapshot) -> Iterator[ChunkReader]:
    """As `image_reader`: memory, disk and image of a snapshot may be of different servers. ChunkError, FormatError."""
    origins: list[str] = []
    if snapshot.ref is None or snapshot_origin(store, snapshot):
        origins = _part_origins(store, snapshot)
    with _reader(store, snapshot.record.memory, origins) as reader:
        yield reader


def _part_origins(store: ChunkStore, snapshot: Snapshot) -> list[str]:
    """The servers that memory, disk and image of a snapshot came from. ChunkError, FormatError."""
    record = snapshot.record
    image = ImageRecord.parse(store.get(record.image))
    roots = (record.memory, *record.block_images, image.metadata, image.data)
    return list(dict.fromkeys(origin for root in roots if (origin := store.origins.get(root))))


@contextmanager
def _reader(store: ChunkStore, block_image: ChunkId, origins: Sequence[str]) -> Iterator[ChunkReader]:
    if not origins:
        yield store
        return
    from imaged.fetching.fetch import Fetcher, Tally

    fetcher = Fetcher(store, [command_upstream(origin) for origin in origins], retry=COMMAND_RETRY)
    try:
        yield fetcher.reader(block_image, Tally())
    finally:
        fetcher.close()


def push_snapshot(config: Config, text: str, *, progress: Progress, replace: bool = False) -> Acquired:
    """Send a snapshot of this host to the server; its name there moves as `imaged.transfer.push.push_snapshot` says."""
    from imaged.transfer import push

    server = require_server(config)
    with ChunkStore.open(config.store) as store, command_upstream(server) as upstream:
        snapshot = snapshots.find(store, text)
        with snapshot_reader(store, snapshot) as reader:
            sent = push.push_snapshot(store, reader, upstream, snapshot, progress, replace=replace)
    return Acquired(name=snapshot.label, id=snapshot.id, details={"pushed_chunks": sent})


def pull_snapshot(config: Config, text: str, *, lazy: bool, progress: Progress) -> Acquired:
    """Pull a snapshot from the server; without one, from where it came from, unless it is all here."""
    from imaged.transfer.snapshotpull import pull_snapshot as pull

    with ChunkStore.open(config.store) as store:
        server = config.server
        if server is None:
            snapshot = _local_snapshot(store, text)
            server = snapshot_origin(store, snapshot)
            if not server:
                return Acquired(name=snapshot.label, id=snapshot.id)
            if _is_own(snapshot):
                return _complete_snapshot(store, snapshot, lazy=lazy, progress=progress)
        with _fetching(store, server) as (fetcher, tally):

            def attempt(upstream: HttpUpstream) -> PulledSnapshot:
                last = fetcher.upstreams[-1].url
                return pull(fetcher, upstream, text, lazy=lazy, progress=progress, tally=tally, last=last)

            try:
                pulled = first(tiers(fetcher.upstreams, COMMAND_RETRY), attempt)
            except NotFoundError:
                if not snapshots.knows(store, text) or not _is_own(snapshot := snapshots.find(store, text)):
                    raise
                return _complete_snapshot(store, snapshot, lazy=lazy, progress=progress)
            fetcher.drain(pulled.published)
    return Acquired(name=pulled.name, id=pulled.id, details=_counts(tally))


def _is_own(snapshot: Snapshot) -> bool:
    """It was made here, and no server has it: at most what it shares with what was pulled."""
    return snapshot.ref is not None and not snapshot.ref.server


def _complete_snapshot(store: ChunkStore, snapshot: Snapshot, *, lazy: bool, progress: Progress) -> Acquired:
    """One of this host is here, but for what it shares with a parent or an image that was pulled lazily."""
    counts: dict[str, int] = {}
    if not lazy:
        from imaged.transfer.snapshotpull import complete_snapshot

        with _fetching(store, ",".join(_part_origins(store, snapshot))) as (fetcher, tally):
            complete_snapshot(fetcher, snapshot, progress=progress, tally=tally)
        counts = _counts(tally)
    return Acquired(name=snapshot.label, id=snapshot.id, details=counts)


def require_server(config: Config) -> str:
    """The URL of the server that is written to and listed: the last. InvalidNameError when none is set."""
    if config.origin is None:
        raise InvalidNameError("no server is set", hint="give --server URL or set PVISOR_SERVER")
    return config.origin


def _local_snapshot(store: ChunkStore, text: str) -> Snapshot:
    try:
        return snapshots.find(store, text)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint="set --server or PVISOR_SERVER to the server that has it") from error


def _convert_here(
    config: Config, source: SourceName, *, name: ImageName | None, platform: str | None, progress: Progress
) -> Acquired:
    from imaged.conversion.convert import convert

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
    """JobGoesOn after Ctrl-C."""
    from imaged.transfer.serverjob import convert_there

    with command_upstream(server) as upstream:
        wanted = name or source.default_name
        done = convert_there(upstream, source, name=wanted, platform=platform, progress=progress)
    return Acquired(name=done.name, id=done.id, warnings=done.warnings, details={"job": done.job})


def _local(config: Config, text: str, trust: Trust) -> catalog.Entry:
    """Without a server a name can only be an image that is here; where it came from is asked for a signature."""
    with ChunkStore.open(config.store) as store:
        try:
            entry = catalog.find(store, text)
            if not entry.ref.origin:
                catalog.require_signed(store, text, entry, trust)
            return entry
        except NotFoundError as error:
            hint = "set --server or PVISOR_SERVER, or give a source such as docker://HOST/REPO:TAG"
            raise NotFoundError(error.message, hint=hint) from error


def _pull_from_server(config: Config, server: str, text: str, *, lazy: bool, progress: Progress) -> Acquired:
    from imaged.transfer.pull import pull_image as pull

    with ChunkStore.open(config.store) as store, _fetching(store, server) as (fetcher, tally):
        trust = Trust.read(config.require_signature)

        def attempt(upstream: HttpUpstream) -> Pulled:
            last = fetcher.upstreams[-1].url
            return pull(fetcher, upstream, text, lazy=lazy, progress=progress, tally=tally, trust=trust, last=last)

        pulled = first(tiers(fetcher.upstreams, COMMAND_RETRY), attempt)
        fetcher.drain(pulled.published)
    return Acquired(name=pulled.name or str(pulled.id), id=pulled.id, details=_counts(tally))


@contextmanager
def _fetching(store: ChunkStore, server: str) -> Iterator[tuple[Fetcher, Tally]]:
    """What a pull from this server, or from several, takes, with a command's patience."""
    from imaged.fetching.fetch import Fetcher, Tally

    fetcher = Fetcher(store, [command_upstream(url) for url in server_urls(server)], retry=COMMAND_RETRY)
    try:
        yield fetcher, Tally()
    finally:
        fetcher.close()


def _counts(tally: Tally) -> dict[str, int]:
    counts = tally.to_dict()
    return {key: counts[key] for key in ("requests", "fetched_chunks", "fetched_bytes")}
