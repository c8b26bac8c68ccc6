"""The docker-archive format, as `docker save`, `podman save` and `skopeo copy` write it.

`manifest.json` lists images as {"Config": name, "RepoTags": [...], "Layers": [names]}. Layers are tars, plain more
often than not, under any name; old writers repeat a layer as a symlink to its first copy. Blob digests are only known
where a name is one; the diff_ids in the config cover the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from imaged.errors import DigestMismatchError, FormatError, InvalidNameError, NotFoundError, SourceError
from imaged.ids import OciDigest
from imaged.names import ImageName
from imaged.oci.archive import TarFiles, choose_tag
from imaged.oci.blob import ByteStream, VerifiedStream
from imaged.oci.descriptor import Platform
from imaged.oci.image import ImageConfig, LayerSource, SourceImage, usable_name
from imaged.oci.layout import read_file
from imaged.oci.manifest import DOCKER_LAYER


@dataclass(frozen=True, slots=True)
class _Entry:
    """One image of manifest.json."""

    config: str
    tags: tuple[str, ...]
    layers: tuple[str, ...]


def docker_image(files: TarFiles, reference: str, wanted: Platform) -> SourceImage:
    """The image of the archive that the reference names; its digest is the image id, that of its config."""
    where = files.where
    entries = _entries(files)
    entry = entries[choose_tag(reference, [one.tags for one in entries], where)]
    raw = _read(files, entry.config)
    digest = OciDigest("sha256", hashlib.sha256(raw).hexdigest())
    stated = _digest_in_name(entry.config)
    if stated not in (None, digest):
        raise DigestMismatchError(
            f"config {entry.config[:200]} of {where} has digest {digest}", hint="export the archive again"
        )
    what = f"config of {where}"
    config = ImageConfig.parse(raw, what, layer_count=len(entry.layers))
    layers = []
    for name, diff_id in zip(entry.layers, config.diff_ids, strict=True):
        layers.append(_layer(files, name, diff_id))
    return SourceImage(
        digest=str(digest),
        platform=config.check_platform(wanted, where),
        config=config.document,
        layers=tuple(layers),
        name=_name(entry.tags, reference),
    )


def _name(tags: tuple[str, ...], reference: str) -> str:
    """The one name of an image, or of several the one that the reference means; "" when that is none."""
    names = {usable_name(tag) for tag in tags} - {""}
    if len(names) < 2:
        return "".join(names)
    try:
        return ImageName.parse(reference).find(names)
    except (InvalidNameError, NotFoundError):
        return ""


def _entries(files: TarFiles) -> list[_Entry]:
    what = f"manifest.json of {files.where}"
    try:
        document = json.loads(_read(files, "manifest.json"))
    except (ValueError, RecursionError) as error:
        raise FormatError(what, expected="JSON", found=str(error)) from error
    if not isinstance(document, list) or not document:
        raise FormatError(what, expected="a list of images", found=repr(document)[:80])
    entries = []
    for at, one in enumerate(document):
        fields = one if isinstance(one, dict) else {}
        config, tags, layers = fields.get("Config"), fields.get("RepoTags") or [], fields.get("Layers") or []
        names = [config, *tags, *layers] if isinstance(tags, list) and isinstance(layers, list) else [None]
        if not all(isinstance(name, str) for name in names):
            raise FormatError(f"{what}, image {at}", expected="Config, RepoTags and Layers", found=repr(one)[:80])
        entries.append(_Entry(str(config), tuple(tags), tuple(layers)))
    return entries


def _read(files: TarFiles, name: str) -> bytes:
    try:
        return read_file(files, name, files.where)
    except FileNotFoundError:
        hint = "`docker save` and `skopeo copy ... docker-archive:FILE` make such files"
        if name == "manifest.json" and "index.json" in files:
            hint = f"it is an OCI archive: use oci-archive:{files.where}"
        raise SourceError(f"{files.where} is not a docker archive: it has no {name[:200]}", hint=hint) from None


def _layer(files: TarFiles, name: str, diff_id: str) -> LayerSource:
    digest = _digest_in_name(name) if name.startswith("blobs/") else None
    try:
        with files.open(name) as stream:
            size_bytes = stream.size_bytes
    except FileNotFoundError:
        raise SourceError(
            f"{files.where} has no layer {name[:200]}", hint="the archive is incomplete: export it again"
        ) from None
    return LayerSource(
        diff_id=diff_id,
        digest=str(digest or ""),
        media_type=DOCKER_LAYER,
        size_bytes=size_bytes,
        open=_opener(files, name, digest, size_bytes),
    )


def _opener(
    files: TarFiles, name: str, digest: OciDigest | None, size_bytes: int
) -> Callable[[], AbstractContextManager[ByteStream]]:
    @contextmanager
    def open_layer() -> Iterator[ByteStream]:
        with files.open(name) as stream:
            what = f"layer {name[:200]} of {files.where}"
            yield VerifiedStream(stream, digest=digest, size_bytes=size_bytes, what=what)

    return open_layer


def _digest_in_name(name: str) -> OciDigest | None:
    match = re.fullmatch(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?", name)
    return OciDigest("sha256", match[1]) if match else None
