"""Content descriptors and platforms of the OCI image specification (image-spec descriptor.md, image-index.md)."""

from __future__ import annotations

import platform as host_platform
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from imaged.errors import FormatError, InvalidNameError
from imaged.ids import OciDigest

DOCUMENT_LIMIT_BYTES = 4 << 20
"""Manifests, indexes and configs above this are refused; registries enforce the same limit."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "armv6l": "arm", "i686": "386", "i386": "386"}
_DEFAULT_VARIANTS = {"arm64": "v8", "arm": "v7"}
T = TypeVar("T")


def take(document: dict[str, Any], key: str, kind: type[T], what: str, default: T | None = None) -> T:
    """The value under key, of this kind; a default makes it optional. FormatError that names the field."""
    value = document.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError(f"{what}, field {key}", expected=kind.__name__, found=repr(value)[:80])
    return value


@dataclass(frozen=True, slots=True)
class Platform:
    """`os/architecture[/variant]` in Go's names. An empty field is unknown."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"([a-z0-9._-]+)/([a-z0-9._-]+)(?:/([a-z0-9._-]+))?", text.lower())
        if match is None:
            raise InvalidNameError(
                f"{text[:80]!r} is not a platform", hint="platforms are OS/ARCH[/VARIANT], such as linux/arm64"
            )
        return cls(match[1], match[2], match[3] or "")

    @classmethod
    def host(cls) -> Self:
        """The platform of this machine."""
        machine = host_platform.machine()
        variant = {"armv6l": "v6", "armv7l": "v7"}.get(machine, "")
        return cls(sys.platform, _ARCHITECTURES.get(machine, machine), variant)

    @classmethod
    def from_document(cls, document: dict[str, Any], what: str) -> Self:
        """From an index entry's `platform` or from an image config; missing fields are unknown."""
        return cls(*(take(document, key, str, what, "") for key in ("os", "architecture", "variant")))

    def accepts(self, other: Platform) -> bool:
        """Whether an image for `other` is what is asked for here.

        Without a variant here any variant will do; a missing variant there is the architecture's usual one.
        """
        if (self.os, self.architecture) != (other.os, other.architecture):
            return False
        usual = _DEFAULT_VARIANTS.get(self.architecture, "")
        return not self.variant or self.variant == (other.variant or usual)

    @property
    def is_usual(self) -> bool:
        """Whether this names no variant, or the architecture's usual one."""
        return self.variant in ("", _DEFAULT_VARIANTS.get(self.architecture, ""))

    def __str__(self) -> str:
        parts = [self.os or "unknown", self.architecture or "unknown"]
        return "/".join([*parts, self.variant] if self.variant else parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What names a blob: media type, digest and size; `urls` are other places to fetch it from."""

    media_type: str
    digest: OciDigest
    size_bytes: int
    urls: tuple[str, ...] = ()
    platform: Platform | None = None
    annotations: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: object, what: str) -> Self:
        """From its JSON object; FormatError that names the field."""
        if not isinstance(document, dict):
            raise FormatError(what, expected="a descriptor object", found=repr(document)[:80])
        size_bytes = take(document, "size", int, what)
        if size_bytes < 0:
            raise FormatError(f"{what}, field size", expected="0 or more", found=str(size_bytes))
        platform = document.get("platform")
        return cls(
            media_type=take(document, "mediaType", str, what),
            digest=OciDigest.parse(take(document, "digest", str, what)),
            size_bytes=size_bytes,
            urls=tuple(url for url in take(document, "urls", list, what, []) if isinstance(url, str)),
            platform=Platform.from_document(platform, f"{what}, platform") if isinstance(platform, dict) else None,
            annotations=take(document, "annotations", dict, what, {}),
        )
