"""`pvisor image`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from cli.common import Settings, age, command_options, human_bytes, store_options
from cli.listing import Described, asking, here_or_remote, readable, show
from cli.progress import progress
from imaged import catalog
from imaged.chunkstore.store import ChunkStore, Ref
from imaged.errors import FormatError, NotFoundError
from imaged.names import ImageName
from imaged.reach import Marker
from imaged.record import ImageRecord

_AGAIN = "`pvisor image verify {name}`, then pull or convert it again, or `pvisor image rm {name}`"


@click.group(short_help="List, inspect, tag, remove, verify and export images.")
def image() -> None:
    """Images of the local store, or of --store DIR.

    An image goes by its name, the unique end of it, its id, or the first 8 or more digits of its id.

    \b
    Examples:
      pvisor image ls
      pvisor image inspect debian:12
      pvisor image rm debian:12
    """


def describe(name: str, record: ImageRecord, *, chunks: int, stored_bytes: int, **more: Any) -> dict[str, Any]:
    """What `ls --json` and `inspect` show of an image."""
    return {
        "id": str(record.id),
        "name": name,
        "size": record.data_bytes,
        "metadata_bytes": record.metadata_bytes,
        "entries": record.entries,
        "chunks": chunks,
        "stored_bytes": stored_bytes,
        "source_digest": record.source_digest,
        "platform": record.platform,
        "config": record.config,
        "layers": list(record.layers),
        "metadata": str(record.metadata),
        "data": str(record.data),
        **more,
    }


def describe_entry(entry: catalog.Entry) -> dict[str, Any]:
    ref = entry.ref
    more = {
        "source": ref.source,
        "origin": ref.origin,
        "complete": not ref.origin,
        "created_at": ref.created_at,
        "signatures": [signature.to_json() for signature in ref.signatures],
    }
    return describe(entry.name, entry.record, chunks=ref.chunks, stored_bytes=ref.stored_bytes, **more)


def describe_profile(store: ChunkStore, entry: catalog.Entry) -> dict[str, Any] | None:
    """What starts of the image touch, in chunks; `bytes` as frames, of those that are here. None without a profile."""
    profile = store.profiles.get(entry.record.data)
    if profile is None:
        return None
    sizes = [store.sizes(chunk) for chunk in profile.chunks]
    return {
        "runs": profile.runs,
        "entries": len(sizes),
        "bytes": sum(size[1] for size in sizes if size is not None),
        "absent": sizes.count(None),
    }


def count_present(store: ChunkStore, entry: catalog.Entry) -> int:
    """How many of the image's chunks are here, its record, roots and leaves among them."""
    marker = Marker(store)
    marker.image(entry.ref.record)
    return len(marker.kept)


@image.command("ls")
@here_or_remote("images")
def list_images(settings: Settings, at: str | None) -> None:
    """List images.

    SIZE is uncompressed file data, STORED what all chunks of the image take in a store. STATE is complete, or how much
    of a lazy image is here; filling while the node daemon fetches the rest.

    \b
    Examples:
      pvisor image ls
      pvisor image ls --server http://store:7878
    """
    found = _local_images(settings) if at is None else _remote_images(at)
    show(settings, found, ["NAME", "ID", "AGE", "SIZE", "STORED", "STATE"], _row)


def _row(found: Described, now: float) -> list[str]:
    return [
        found["name"],
        found["id"][:12],
        age(now - found["created_at"]),
        human_bytes(found["size"]),
        human_bytes(found["stored_bytes"]),
        _state(found),
    ]


def _state(found: Described) -> str:
    """How much of an image is here, in words: 100% only when it is all."""
    if not found["origin"]:
        return "complete"
    share = 100 * found["present_chunks"] // max(found["chunks"], 1)
    return f"{'filling' if found['filling'] else 'lazy'} {share}%"


def _local_images(settings: Settings) -> list[dict[str, Any]]:
    if not settings.config.store.exists():
        return []
    with ChunkStore.open(settings.config.store, readonly=True) as store:

        def described(name: str, ref: Ref) -> dict[str, Any]:
            entry = catalog.load(store, name, ref)
            # Of a complete image nothing needs to be looked up.
            present = count_present(store, entry) if ref.origin else ref.chunks
            filling = store.fills.get(ref.record) is not None
            return {**describe_entry(entry), "present_chunks": present, "filling": filling}

        return list(readable(store.refs.items(), described, _AGAIN))


def _remote_images(at: str) -> list[dict[str, Any]]:
    with asking(at) as upstream:
        return [
            describe(
                found.name,
                found.record,
                chunks=found.chunks,
                stored_bytes=found.stored_bytes,
                source=found.source,
                origin="",
                created_at=found.created_at,
                signatures=[signature.to_json() for signature in found.signatures],
            )
            for found in upstream.images()
        ]


@image.command(short_help="Show everything known of an image.")
@click.argument("name")
@store_options
def inspect(settings: Settings, name: str) -> None:
    """Show everything known of an image; prints JSON.

    \b
    Example:
      pvisor image inspect debian:12
    """
    import json

    with ChunkStore.open(settings.config.store, readonly=True) as store:
        entry = catalog.find(store, name)
        document = {
            **describe_entry(entry),
            "present_chunks": count_present(store, entry),
            "filling": store.fills.get(entry.ref.record) is not None,
            "profile": describe_profile(store, entry),
        }
    settings.emit(document, lambda: json.dumps(document, indent=2))


@image.command(short_help="Give an image one more name.")
@click.argument("name")
@click.argument("new")
@store_options
def tag(settings: Settings, name: str, new: str) -> None:
    """Give an image one more name; a name that is taken moves to it. A signature is of a name: it has none.

    \b
    Example:
      pvisor image tag debian:12 debian:stable
    """
    target = str(ImageName.parse(new))
    with ChunkStore.open(settings.config.store) as store:
        entry = catalog.find(store, name)
        ref = store.refs.copy(entry.name, target)
        if ref is None:
            raise NotFoundError(f"image {entry.name} was removed just now")
    settings.emit({"name": target, "id": str(ref.record)}, target)


@image.command(short_help="Send an image of this host to the server.")
@click.argument("name")
@command_options
def push(settings: Settings, name: str) -> None:
    """Send an image to the server, where its full name and its signatures then are as here; only the chunks that the
    server lacks go. A push that was cut off goes on where it was.

    \b
    Examples:
      pvisor image push app:v1 --server http://store:7878
    """
    from imaged.transfer.acquire import command_upstream, require_server
    from imaged.transfer.push import push_image

    server = require_server(settings.config)
    with ChunkStore.open(settings.config.store) as store, command_upstream(server) as upstream:
        entry = catalog.find(store, name)
        with progress(settings) as line:
            sent = push_image(store, upstream, entry, line)
    document = {"name": entry.name, "id": str(entry.ref.record), "pushed_chunks": sent}
    settings.emit(document, f"{entry.name}  {entry.ref.record}")


@image.command(short_help="Sign an image, here and at a server.")
@click.argument("name")
@click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="An Ed25519 private key in PEM. It stays on this host.",
)
@click.option("--server", metavar="URL", help="Sign it at this server, too.")
@store_options
def sign(settings: Settings, name: str, key_file: Path, server: str | None) -> None:
    """Sign an image under its full name, in the local store, and with --server URL at that server as well.

    At the server it signs what this host has under the name, and fails when the server has another image there. Only of
    an image that is not on this host the server is believed which one it is: see that the id printed is the one meant.
    The public half of the key goes to `run` and `pull` as --require-signature.

    \b
    Examples:
      openssl genpkey -algorithm ed25519 -out team.key
      openssl pkey -in team.key -pubout -out team.pub
      pvisor image sign app:v1 --key team.key --server http://store:7878
    """
    from imaged.signature import SigningKey
    from imaged.transfer.acquire import require_server, sign_image

    at = server or settings.server
    if at is not None and settings.store is not None:
        raise click.UsageError("--store is for images of this host: it does not go with --server")
    config = replace(settings, server=at).config  # not PVISOR_SERVER: what is signed where is said in so many words
    key, there = SigningKey.read(key_file), require_server(config) if at is not None else None
    signed = sign_image(config, name, key, server=there)
    document = {"name": signed.name, "id": str(signed.id), **signed.details}
    settings.emit(document, f"{signed.name}  {signed.id}")


@image.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@here_or_remote("names")
def rm(settings: Settings, names: tuple[str, ...], at: str | None) -> None:
    """Remove names. `pvisor store gc` then frees what no name and no stage keeps; at a server its next collection does.

    \b
    Examples:
      pvisor image rm debian:12 app:v1
      pvisor image rm debian:12 --server http://store:7878
    """
    if at is not None:
        with asking(at) as upstream:
            gone = [upstream.remove_image(name) for name in names]
        settings.emit({"removed": gone}, "\n".join(gone))
        return
    removed = []
    with ChunkStore.open(settings.config.store) as store:
        for name in names:
            try:
                full, _ = catalog.resolve(store, name)
            except FormatError:  # a damaged row, or one in the way of short names: a full name still goes
                full = str(ImageName.parse(name))
            if not store.refs.delete(full):
                raise NotFoundError(f"image {full} was removed just now")
            removed.append(full)
    settings.emit({"removed": removed}, "\n".join(removed))


@image.command(short_help="Check every chunk of an image.")
@click.argument("name")
@store_options
def verify(settings: Settings, name: str) -> int:
    """Check every chunk of an image that is here against its id. Exit code 1 when something is corrupt or lost.

    Nothing is fetched: of a lazy image it says how many chunks are not here yet.

    \b
    Example:
      pvisor image verify debian:12
    """
    from imaged.verify import verify_image

    with ChunkStore.open(settings.config.store) as store, progress(settings) as line:
        entry = catalog.find(store, name)
        report = verify_image(store, entry, line)
    document = {"name": entry.name, "id": str(entry.ref.record), "sound": report.sound, **asdict(report)}
    settings.emit(document, lambda: report.text(entry.name))
    return 0 if report.sound else 1


@image.command(short_help="Write an image to a file or a directory.")
@click.argument("name")
@click.argument("target", metavar="FILE|DIR")
@store_options
def export(settings: Settings, name: str, target: str) -> None:
    """Write an image to one EROFS file, or its files into a directory.

    An existing directory, or a name that ends in /, gets the files (which needs root); it must be empty. Anything
    else is the name of the EROFS file, which `mount -t erofs` and VMs can use without pVisor. A file of that name is
    replaced. Prints nothing on success.

    \b
    Examples:
      pvisor image export debian:12 debian.erofs
      pvisor image export debian:12 ./root/
    """
    path = Path(target)
    if target.endswith("/") or path.is_dir():
        from cli.run import open_image
        from fuse.imagemount import mount_image
        from imaged.conversion.copy import copy_tree

        mounted = mount_image(settings.config, open_image(settings, name))
        with progress(settings) as line:
            copy_tree(mounted, path, line)
    else:
        from imaged.conversion.export import export_file
        from imaged.transfer.acquire import image_reader

        with ChunkStore.open(settings.config.store) as store, progress(settings) as line:
            entry = catalog.find(store, name)
            with image_reader(store, entry) as reader:
                export_file(reader, entry.record, path, line)
    settings.emit({"name": name, "path": str(path)}, "")
