"""What every source gives: one image of one platform, its config and its layers, lowest first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from imaged.document import parse_json
from imaged.errors import FormatError, InvalidNameError, UnsupportedImageError
from imaged.ids import OciDigest
from imaged.names import ImageName
from imaged.oci.blob import ByteStream
from imaged.oci.descriptor import Platform, take


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """One layer as stored, compressed or not.

    `open()` gives a fresh stream; several may be open at once, in different threads. Its reads raise
    DigestMismatchError when the blob is not what its descriptor says. `digest` is the blob's ("" in a docker archive,
    which states none), `diff_id` that of the uncompressed tar, which is the caller's to check.
    """

    diff_id: str
    digest: str
    media_type: str
    size_bytes: int | None
    open: Callable[[], AbstractContextManager[ByteStream]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceImage:
    """`digest` is the platform's manifest digest (a docker archive has no manifest: its config's, the image id).

    `config` is the whole OCI image configuration document; what runs is under its key `config`. `name` is the one name
    that a layout or archive has for the image, "" when it has none or several.
    """

    digest: str
    platform: str
    config: dict[str, Any]
    layers: tuple[LayerSource, ...]
    name: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers as stored, as far as they are known."""
        return sum(layer.size_bytes or 0 for layer in self.layers)


def usable_name(text: str) -> str:
    """A name as a source states it, in full; "" when it is none that a store takes."""
    try:
        return str(ImageName.parse(text))
    except InvalidNameError:
        return ""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """An image configuration document, as far as it matters before conversion."""

    document: dict[str, Any]
    diff_ids: tuple[str, ...]
    platform: Platform

    @classmethod
    def parse(cls, raw: bytes, what: str, *, layer_count: int) -> ImageConfig:
        """FormatError when it is no image configuration or lists another number of layers than the manifest."""
        document = parse_json(raw, what)
        rootfs = take(document, "rootfs", dict, what)
        diff_ids = tuple(str(OciDigest.parse(str(one))) for one in take(rootfs, "diff_ids", list, what, []))
        if len(diff_ids) != layer_count:
            raise FormatError(f"{what}, rootfs.diff_ids", expected=f"{layer_count} layers", found=str(len(diff_ids)))
        return cls(document, diff_ids, Platform.from_document(document, what))

    def check_platform(self, wanted: Platform, what: str) -> str:
        """The platform's text; UnsupportedImageError when the image is for another one. Unknown fields match."""
        known = Platform(
            self.platform.os or wanted.os, self.platform.architecture or wanted.architecture, self.platform.variant
        )
        if not wanted.accepts(known):
            raise UnsupportedImageError(
                f"{what} is for {known}, not {wanted}", hint=f"`--platform {known}` takes it all the same"
            )
        return str(known)
