"""Image names (`repo[:tag]`) and source texts (skopeo's transport names)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from imaged.errors import InvalidNameError, NotFoundError

TRANSPORTS = ("docker", "oci", "oci-archive", "docker-archive", "dir")
VM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_SNAPSHOT = re.compile(r"(?![0-9a-f]{64}$)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SOURCE_LIMIT_BYTES = 4096
"""As PATH_MAX: no path that can be opened is longer."""
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]+(?=/))?(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NAME_LIMIT = 511
"""Characters of a whole name, tag included: what a store takes as a key."""
_NO_TEXT = "[\0\ud800-\udfff]"
"""NUL ends a path; bytes that are not UTF-8 come as surrogates, and no list of images could show them."""
_DIGEST = r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}"


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
        too_long = len(head) + 1 + len(tag) > _NAME_LIMIT
        if too_long or _REPO.fullmatch(head) is None or _TAG.fullmatch(tag) is None:
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
        matches, known = [], list(names)
        for name in known:
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
        tags = sorted(name for name in known if f"/{name}".rpartition(":")[0].endswith(f"/{self.repo}"))
        there = (
            f"there is {', '.join(tags[:5])}" if tags else "`pvisor image ls` lists images, with --remote the server's"
        )
        raise NotFoundError(f"no image {wanted}", hint=f"{there}; docker://HOST/REPO:TAG is an image of a registry")


def snapshot_name(text: str) -> str:
    """The text, when a snapshot can have it as its name. InvalidNameError; what looks like an id is none."""
    if _SNAPSHOT.fullmatch(text) is None:
        hint = "up to 128 letters, digits, dots, dashes and underscores; the first is a letter or a digit"
        raise InvalidNameError(f"{text[:200]!r} is not a snapshot name", hint=hint)
    return text


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
        size_bytes = len(text.encode(errors="surrogatepass"))
        if size_bytes > _SOURCE_LIMIT_BYTES:
            raise InvalidNameError(
                f"an image source of {size_bytes} bytes is more than the {_SOURCE_LIMIT_BYTES} allowed: "
                f"{text[:60]!r}...",
                hint="check the name",
            )
        if re.search(_NO_TEXT, text) is not None:
            raise InvalidNameError(
                f"{text[:200]!r} is not an image source: it is not UTF-8 text",
                hint="rename or link the file or directory",
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
        name = ImageName.parse(location)
        repo = name.repo
        host, slash, _ = repo.partition("/")
        if not slash:
            # As docker and podman read it: an unqualified name is in Docker Hub's library.
            repo = f"docker.io/library/{repo}"
        elif "." not in host and ":" not in host and host != "localhost":
            repo = f"docker.io/{repo}"
        if not at:
            return cls("docker", repo, ImageName.parse(f"{repo}:{name.tag}").tag)
        if re.fullmatch(_DIGEST, digest) is None:
            raise InvalidNameError(
                f"{text[:200]!r} is not an image source: expected sha256:<64 hex digits> after the @",
                hint="sha512:<128 hex digits> is a digest too; names without one end in a tag, as HOST/REPO:TAG",
            )
        return cls("docker", ImageName.parse(repo).repo, digest)

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
        tag = self.reference if _TAG.fullmatch(self.reference) else "latest"
        return ImageName.parse(f"{stem}:{tag}")

    def __str__(self) -> str:
        if self.transport == "docker":
            return f"docker://{self.location}{'@' if ':' in self.reference else ':'}{self.reference}"
        return f"{self.transport}:{self.location}" + (f":{self.reference}" if self.reference else "")
