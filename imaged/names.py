"""Image names (`repo[:tag]`) and source texts (skopeo's transport names)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from imaged.errors import InvalidNameError, NotFoundError

TRANSPORTS = ("docker", "oci", "oci-archive", "docker-archive", "dir")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]+(?=/))?(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class ImageName:
    """`repo:tag`; the tag is `latest` when not given. A first component with a dot or a port is a registry host."""

    repo: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Self:
        head, colon, tag = text.rpartition(":")
        if not colon or "/" in tag:
            head, tag = text, "latest"
        if len(text) > 512 or _REPO.fullmatch(head) is None or _TAG.fullmatch(tag) is None:
            raise InvalidNameError(
                f"{text[:200]!r} is not an image name",
                hint="names look like debian, debian:12 or host:5000/team/app:v1",
            )
        return cls(head, tag)

    def __str__(self) -> str:
        return f"{self.repo}:{self.tag}"

    def find(self, names: Iterable[str]) -> str:
        """The one of `names` that this means: itself, or the only one that ends in `/` + itself.

        So `debian:12` finds `registry.example:5000/debian:12`. NotFoundError when none or several do.
        """
        wanted = str(self)
        suffix = "/" + wanted
        matches = []
        for name in names:
            if name == wanted:
                return name
            if name.endswith(suffix):
                matches.append(name)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise NotFoundError(
                f"image name {wanted} is ambiguous", hint="say which: " + ", ".join(sorted(matches)[:5])
            )
        raise NotFoundError(f"no image {wanted}", hint="`pvisor image ls` lists images, `pvisor pull` fetches one")


@dataclass(frozen=True, slots=True)
class SourceName:
    """Where an image comes from: transport, location (path or HOST/REPO) and tag or digest ("" when not given)."""

    transport: str
    location: str
    reference: str

    @classmethod
    def is_source(cls, text: str) -> bool:
        """Whether text begins with a transport; otherwise it is an image name or id."""
        transport, colon, rest = text.partition(":")
        if not colon or transport not in TRANSPORTS:
            return False
        return rest.startswith("//") if transport == "docker" else bool(rest)

    @classmethod
    def parse(cls, text: str) -> Self:
        if not cls.is_source(text):
            raise InvalidNameError(
                f"{text[:200]!r} is not an image source",
                hint="sources are docker://HOST/REPO:TAG, oci:DIR[:TAG], oci-archive:FILE[:TAG], "
                "docker-archive:FILE[:TAG] and dir:DIR",
            )
        transport, _, rest = text.partition(":")
        if transport == "docker":
            return cls._docker(rest.removeprefix("//"), text)
        if transport == "dir":
            return cls(transport, rest, "")
        path, colon, tag = rest.partition(":")
        if colon and not tag:
            raise InvalidNameError(
                f"{text[:200]!r} has an empty tag", hint=f"say {transport}:{path} or {transport}:{path}:TAG"
            )
        return cls(transport, path, tag)

    @classmethod
    def _docker(cls, rest: str, text: str) -> Self:
        location, at, digest = rest.partition("@")
        if at:
            head, colon, tag = location.rpartition(":")
            return cls("docker", head if colon and "/" not in tag else location, digest)
        name = ImageName.parse(location)
        if "/" not in name.repo:
            # As docker and podman read it: an unqualified name is in Docker Hub's library.
            return cls("docker", f"docker.io/library/{name.repo}", name.tag)
        host = name.repo.partition("/")[0]
        if "." not in host and ":" not in host and host != "localhost":
            return cls("docker", f"docker.io/{name.repo}", name.tag)
        return cls("docker", name.repo, name.tag)

    @property
    def default_name(self) -> ImageName:
        """The name an image gets when none is given: the repository, or the file or directory's own name."""
        if self.transport == "docker":
            tag = "latest" if ":" in self.reference else self.reference
            return ImageName.parse(f"{self.location}:{tag}")
        stem = Path(self.location).absolute().name
        if self.transport.endswith("-archive"):
            stem = stem.split(".")[0]
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "image"
        return ImageName.parse(f"{stem}:{self.reference or 'latest'}")

    def __str__(self) -> str:
        if self.transport == "docker":
            return f"docker://{self.location}{'@' if ':' in self.reference else ':'}{self.reference}"
        return f"{self.transport}:{self.location}" + (f":{self.reference}" if self.reference else "")
