"""Image manifests and indexes: OCI 1.0/1.1 and Docker schema 2 (image-spec manifest.md, image-index.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from imaged.document import parse_json
from imaged.errors import FormatError, UnsupportedImageError
from imaged.oci.descriptor import Descriptor, Platform, take

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
MANIFEST_TYPES = (OCI_MANIFEST, DOCKER_MANIFEST)
INDEX_TYPES = (OCI_INDEX, DOCKER_LIST)
ACCEPTED_TYPES = (*MANIFEST_TYPES, *INDEX_TYPES)
_SCHEMA1_PREFIX = "application/vnd.docker.distribution.manifest.v1+"
_CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
_LAYER_TYPES = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    DOCKER_LAYER,
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)
_LAYER_SUFFIXES = ("", "+gzip", "+zstd", ".gzip", ".zstd")
_ATTESTATION_KEY = "vnd.docker.reference.type"
_INDEX_DEPTH_LIMIT = 4
_INNER_INDEX_LIMIT = 16
_UNKNOWN = Platform("unknown", "unknown")


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest or index as fetched: its bytes, what they are, and their digest."""

    raw: bytes
    media_type: str
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image of one platform. `digest` names the manifest itself."""

    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Manifests to choose from."""

    manifests: tuple[Descriptor, ...]


def parse(document: Document, what: str) -> Manifest | Index:
    """A manifest or an index. UnsupportedImageError for what is neither, FormatError for nonsense."""
    content = parse_json(document.raw, what)
    media_type = _media_type(content, document.media_type, what)
    if media_type in INDEX_TYPES:
        entries = take(content, "manifests", list, what, [])
        return Index(tuple(Descriptor.parse(entry, f"{what}, manifest {at}") for at, entry in enumerate(entries)))
    config = Descriptor.parse(content.get("config"), f"{what}, config")
    if config.media_type not in _CONFIG_TYPES:
        raise UnsupportedImageError(
            f"{what} is an artifact with config type {config.media_type[:100]!r}, not a container image",
            hint="give the name of a container image",
        )
    described = take(content, "layers", list, what, [])
    layers = tuple(Descriptor.parse(layer, f"{what}, layer {at}") for at, layer in enumerate(described))
    known = {kind + suffix for kind in _LAYER_TYPES for suffix in _LAYER_SUFFIXES}
    for at, layer in enumerate(layers):
        if layer.media_type not in known:
            raise UnsupportedImageError(
                f"layer {at} of {what} has the unknown media type {layer.media_type[:100]!r}",
                hint="layers can be OCI or Docker tar layers: plain, gzip or zstd, not encrypted",
            )
    return Manifest(document.digest, config, layers)


def _media_type(content: dict[str, Any], stated: str, what: str) -> str:
    """What a document is: its own mediaType, else what the source states, else what its fields say.

    A document that could be read as two kinds is refused, or one digest would name two images (CVE-2021-41190).
    """
    kind = take(content, "mediaType", str, what, "") or stated.partition(";")[0].strip().lower()
    if content.get("schemaVersion") == 1 or kind.startswith(_SCHEMA1_PREFIX):
        raise UnsupportedImageError(
            f"{what} is a Docker schema 1 manifest, which has no digests of its layers",
            hint="push the image again with a current docker, podman or skopeo",
        )
    if "manifests" in content and ("layers" in content or "config" in content):
        raise FormatError(what, expected="a manifest or an index", found="one document with the fields of both")
    if kind not in ACCEPTED_TYPES:
        if kind not in ("", "application/json", "application/octet-stream", "text/plain"):
            raise UnsupportedImageError(
                f"{what} has the unknown media type {kind[:100]!r}", hint="give the name of a container image"
            )
        kind = OCI_INDEX if "manifests" in content else OCI_MANIFEST
    if (kind in INDEX_TYPES) != ("manifests" in content):
        raise FormatError(what, expected=f"the fields of {kind}", found="fields " + ", ".join(sorted(content))[:80])
    return kind


def select(document: Document, wanted: Platform, *, what: str, fetch: Callable[[Descriptor], Document]) -> Manifest:
    """The manifest for the wanted platform, through indexes and indexes in them.

    A document that is a manifest is taken as it is; its config tells its platform. UnsupportedImageError that lists
    the platforms when none matches. Attestations (`unknown/unknown`) are no images and are passed over.
    """
    found = parse(document, what)
    if isinstance(found, Manifest):
        return found
    choices = list(_choices(found, wanted, what, fetch, depth=1))
    matching = [one for one in choices if one.platform is not None and wanted.accepts(one.platform)]
    matching.sort(key=lambda one: one.platform is not None and not one.platform.is_usual)
    if not matching:
        matching = [one for one in choices if one.platform is None]
    if not matching:
        listed = ", ".join(dict.fromkeys(str(one.platform) for one in choices)) or "none"
        raise UnsupportedImageError(
            f"{what} has no image for {wanted}; it has: {listed}", hint="choose one of them with --platform"
        )
    chosen = parse(fetch(matching[0]), what)
    if isinstance(chosen, Index):
        raise FormatError(what, expected="a manifest", found=f"an index that is listed as {matching[0].media_type}")
    return chosen


def _choices(
    index: Index, wanted: Platform, what: str, fetch: Callable[[Descriptor], Document], depth: int
) -> Iterator[Descriptor]:
    """The images of an index and of the indexes in it that may hold the wanted platform."""
    if depth > _INDEX_DEPTH_LIMIT:
        raise UnsupportedImageError(f"{what} has indexes nested more than {_INDEX_DEPTH_LIMIT} deep")
    inner_indexes = 0
    for entry in index.manifests:
        if entry.platform == _UNKNOWN or _ATTESTATION_KEY in entry.annotations:
            continue
        if entry.media_type in MANIFEST_TYPES or (entry.platform is not None and not wanted.accepts(entry.platform)):
            yield entry
        elif entry.media_type in INDEX_TYPES:
            inner_indexes += 1
            if inner_indexes > _INNER_INDEX_LIMIT:
                raise UnsupportedImageError(f"{what} has an index of more than {_INNER_INDEX_LIMIT} indexes")
            inner = parse(fetch(entry), what)
            if isinstance(inner, Index):
                yield from _choices(inner, wanted, what, fetch, depth + 1)
