"""OCI image layouts written by hand from layer tars, for tests of everything that reads images.

`write_layout(directory, [tar, tar])` is enough for most; `write_blob`, `add_manifest` and `read_index` let a test
build what no tool would.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zstandard

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
REF_NAME = "org.opencontainers.image.ref.name"
COMPRESSORS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "none": ("", lambda data: data),
    "gzip": ("+gzip", lambda data: gzip.compress(data, 6, mtime=0)),
    "zstd": ("+zstd", lambda data: zstandard.ZstdCompressor(level=3).compress(data)),
}
Descriptor = dict[str, Any]


def digest(data: bytes) -> str:
    """`sha256:<hex>` of these bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def make_tar(*members: tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    """A tar of `(name or TarInfo, content)` pairs; a name that ends in / is a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name.rstrip("/")) if isinstance(name, str) else name
            if isinstance(name, str) and name.endswith("/"):
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return buffer.getvalue()


def write_blob(directory: Path, data: bytes, media_type: str) -> Descriptor:
    """Put a blob into the layout and return its descriptor."""
    name = digest(data)
    path = directory / "blobs" / "sha256" / name.partition(":")[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"mediaType": media_type, "digest": name, "size": len(data)}


def write_json(directory: Path, document: dict[str, Any], media_type: str) -> Descriptor:
    """Put a JSON blob into the layout and return its descriptor."""
    return write_blob(directory, json.dumps(document, sort_keys=True).encode(), media_type)


def blob_path(directory: Path, name: str) -> Path:
    """Where the layout keeps the blob with this digest."""
    return directory / "blobs" / Path(*name.split(":"))


def read_index(directory: Path) -> dict[str, Any]:
    """The layout's index.json; an empty index when there is none yet."""
    path = directory / "index.json"
    if not path.exists():
        return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    index: dict[str, Any] = json.loads(path.read_bytes())
    return index


def add_manifest(directory: Path, descriptor: Descriptor, *, tag: str | None) -> None:
    """Name a manifest in index.json, in place of what had that tag."""
    directory.mkdir(parents=True, exist_ok=True)
    index = read_index(directory)
    if tag is not None:
        index["manifests"] = [one for one in index["manifests"] if one.get("annotations", {}).get(REF_NAME) != tag]
        descriptor = {**descriptor, "annotations": {REF_NAME: tag}}
    index["manifests"].append(descriptor)
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def write_image(
    directory: Path,
    layers: Sequence[bytes],
    *,
    compression: str = "gzip",
    config: dict[str, Any] | None = None,
    platform: str = "linux/amd64",
    diff_ids: Sequence[str] | None = None,
) -> Descriptor:
    """Blobs, config and manifest of one image; the manifest's descriptor. `diff_ids` in place of the true ones."""
    suffix, compress = COMPRESSORS[compression]
    described = [write_blob(directory, compress(layer), OCI_LAYER + suffix) for layer in layers]
    os_name, architecture, *variant = platform.split("/")
    image = {
        "os": os_name,
        "architecture": architecture,
        **({"variant": variant[0]} if variant else {}),
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids or map(digest, layers))},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": write_json(directory, image, OCI_CONFIG),
        "layers": described,
    }
    return write_json(directory, manifest, OCI_MANIFEST)


def write_layout(
    directory: Path,
    layers: Sequence[bytes],
    *,
    tag: str = "latest",
    compression: str = "gzip",
    config: dict[str, Any] | None = None,
    platform: str = "linux/amd64",
    diff_ids: Sequence[str] | None = None,
) -> Path:
    """An OCI layout holding one image of these layer tars, lowest first; a second call adds an image with its tag.

    `compression` is "gzip", "zstd" or "none"; `config` the `config` object (Env, Cmd, ...) of the image
    configuration; `diff_ids` replaces the true ones, for tests of what must be refused.
    """
    descriptor = write_image(
        directory, layers, compression=compression, config=config, platform=platform, diff_ids=diff_ids
    )
    add_manifest(directory, descriptor, tag=tag)
    return directory
