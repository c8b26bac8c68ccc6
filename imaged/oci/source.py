"""Opening an image wherever it is: the one way from a source name to verified layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from imaged.errors import SourceError
from imaged.names import SourceName
from imaged.oci.blob import ByteStream, VerifiedStream, read_document
from imaged.oci.descriptor import Descriptor, Platform
from imaged.oci.image import ImageConfig, LayerSource, SourceImage, usable_name
from imaged.oci.layout import DirectoryFiles, Layout
from imaged.oci.manifest import Document, select

if TYPE_CHECKING:
    from imaged.oci.auth import Credentials
    from imaged.oci.http import RetryPolicy

__all__ = ["LayerSource", "SourceImage", "open_image"]


class ImageProvider(Protocol):
    """Where one image's documents and blobs come from: a registry or a layout."""

    def root(self) -> Document:
        """The manifest or index the source names."""
        ...

    def manifest(self, descriptor: Descriptor) -> Document:
        """Another manifest or index, verified."""
        ...

    def blob(self, descriptor: Descriptor) -> AbstractContextManager[ByteStream]:
        """A blob, not verified."""
        ...


@contextmanager
def open_image(
    source: SourceName,
    *,
    platform: str | None = None,
    auth: Credentials | None = None,
    retries: RetryPolicy | None = None,
) -> Iterator[SourceImage]:
    """The image a source names, for `platform` (default: this host's).

    Its layers can be opened until the context ends. `auth` and `retries` are for registries; without `auth` the
    credentials of the usual files and helpers are used. SourceError and its kinds, NotFoundError, FormatError,
    InvalidNameError.
    """
    wanted = Platform.parse(platform) if platform else Platform.host()
    match source.transport:
        case "docker":
            from imaged.oci.registry import open_repository

            with open_repository(source, auth=auth, policy=retries) as repository:
                yield _assemble(repository, str(source), wanted)
        case "oci":
            path = Path(source.location)
            yield _of_layout(Layout(DirectoryFiles(path), str(path), source.reference), source, wanted)
        case "oci-archive" | "docker-archive":
            from imaged.oci.archive import open_tar
            from imaged.oci.docker_archive import docker_image

            with open_tar(Path(source.location)) as files:
                if source.transport == "docker-archive":
                    yield docker_image(files, source.reference, wanted)
                else:
                    yield _of_layout(Layout(files, files.where, source.reference), source, wanted)
        case _:
            raise SourceError(f"{source} is not an OCI source", hint="dir: sources have no manifest or layers")


def _of_layout(layout: Layout, source: SourceName, wanted: Platform) -> SourceImage:
    """The image under the layout's own name for it, which is a whole name, or a tag of what the file is called."""
    name = layout.tag
    if name and not set(name) & set(":/"):
        name = f"{replace(source, reference='').default_name.repo}:{name}"
    return replace(_assemble(layout, str(source), wanted), name=usable_name(name))


def _assemble(provider: ImageProvider, what: str, wanted: Platform) -> SourceImage:
    manifest = select(provider.root(), wanted, what=what, fetch=provider.manifest)
    with provider.blob(manifest.config) as stream:
        raw = read_document(stream, manifest.config, f"config of {what}")
    config = ImageConfig.parse(raw, f"config of {what}", layer_count=len(manifest.layers))
    return SourceImage(
        digest=manifest.digest,
        platform=config.check_platform(wanted, what),
        config=config.document,
        layers=tuple(
            LayerSource(
                diff_id=diff_id,
                digest=str(layer.digest),
                media_type=layer.media_type,
                size_bytes=layer.size_bytes,
                open=_opener(provider, layer, f"layer {layer.digest} of {what}"),
            )
            for layer, diff_id in zip(manifest.layers, config.diff_ids, strict=True)
        ),
    )


def _opener(provider: ImageProvider, layer: Descriptor, what: str) -> Callable[[], AbstractContextManager[ByteStream]]:
    @contextmanager
    def open_layer() -> Iterator[ByteStream]:
        with provider.blob(layer) as stream:
            yield VerifiedStream.of(stream, layer, what)

    return open_layer
