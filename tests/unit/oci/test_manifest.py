"""Descriptors, platforms, manifests and indexes: cases 20 and 21."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imaged.errors import FormatError, InvalidNameError, UnsupportedImageError
from imaged.oci.descriptor import Descriptor, Platform
from imaged.oci.image import ImageConfig
from imaged.oci.manifest import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Document,
    Index,
    Manifest,
    parse,
    select,
)
from tests.support.oci import OCI_CONFIG, OCI_LAYER, digest

AMD64 = Platform.parse("linux/amd64")
DESCRIPTOR = {"mediaType": OCI_LAYER, "digest": digest(b"layer"), "size": 5}
CONFIG = {"mediaType": OCI_CONFIG, "digest": digest(b"config"), "size": 6}


def document(content: object, media_type: str = "") -> Document:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Document(raw, media_type, digest(raw))


def manifest(**changes: Any) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": CONFIG, "layers": [DESCRIPTOR], **changes}


class Shelf:
    """Manifests by digest."""

    def __init__(self) -> None:
        self.documents: dict[str, Document] = {}
        self.fetched: list[str] = []

    def add(self, content: dict[str, Any], platform: str | None = None, **extra: Any) -> dict[str, Any]:
        media_type = content["mediaType"]
        made = document(content, media_type)
        self.documents[made.digest] = made
        entry = {"mediaType": media_type, "digest": made.digest, "size": len(made.raw), **extra}
        if platform is not None:
            parts = platform.split("/")
            entry["platform"] = dict(zip(("os", "architecture", "variant"), parts, strict=False))
        return entry

    def image(self, platform: str | None, **extra: Any) -> dict[str, Any]:
        return self.add(manifest(annotations={"made-for": str(platform)}), platform, **extra)

    def fetch(self, descriptor: Descriptor) -> Document:
        self.fetched.append(str(descriptor.digest))
        return self.documents[str(descriptor.digest)]

    def choose(self, entries: list[dict[str, Any]], wanted: str = "linux/amd64", kind: str = OCI_INDEX) -> str:
        index = document({"schemaVersion": 2, "mediaType": kind, "manifests": entries})
        return select(index, Platform.parse(wanted), what="img", fetch=self.fetch).digest


@pytest.mark.parametrize("media_type", [OCI_MANIFEST, DOCKER_MANIFEST])
def test_manifest(media_type: str) -> None:
    found = parse(document(manifest(mediaType=media_type)), "img")
    assert isinstance(found, Manifest)
    assert [str(layer.digest) for layer in found.layers] == [digest(b"layer")]
    assert found.config.size_bytes == 6


def test_the_media_type_may_come_from_the_source_or_the_fields() -> None:
    bare = manifest()
    del bare["mediaType"]
    for stated in (OCI_MANIFEST, f"{DOCKER_MANIFEST}; charset=utf-8", "", "application/json", "text/plain"):
        assert isinstance(parse(document(bare, stated), "img"), Manifest)
    assert isinstance(parse(document({"schemaVersion": 2, "manifests": []}), "img"), Index)


@pytest.mark.parametrize(
    ("content", "stated"),
    [
        ({"schemaVersion": 1, "name": "x", "fsLayers": []}, ""),
        ({"schemaVersion": 1}, "application/vnd.docker.distribution.manifest.v1+prettyjws"),
        ({}, "application/vnd.docker.distribution.manifest.v1+json"),
    ],
)
def test_schema_1(content: dict[str, Any], stated: str) -> None:
    with pytest.raises(UnsupportedImageError, match="schema 1") as caught:
        parse(document(content, stated), "img")
    assert "push the image again" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        manifest(mediaType="application/vnd.example.thing+json"),
        manifest(config={**CONFIG, "mediaType": "application/vnd.cncf.helm.config.v1+json"}),
        manifest(layers=[{**DESCRIPTOR, "mediaType": OCI_LAYER + "+gzip+encrypted"}]),
        manifest(layers=[{**DESCRIPTOR, "mediaType": "application/vnd.wasm"}]),
    ],
)
def test_unknown_media_types(content: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedImageError):
        parse(document(content), "img")


@pytest.mark.parametrize(
    "content",
    [
        b"<html>login</html>", b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        {**manifest(), "manifests": []},
        {"schemaVersion": 2, "mediaType": OCI_INDEX, "layers": []},
        manifest(config=None),
        manifest(layers="many"),
        manifest(layers=[{**DESCRIPTOR, "size": -1}]),
        manifest(layers=[{**DESCRIPTOR, "size": True}]),
        manifest(layers=[{**DESCRIPTOR, "size": "5"}]),
        manifest(layers=[{**DESCRIPTOR, "digest": "sha256:../../etc/passwd"}]),
        manifest(layers=[{**DESCRIPTOR, "digest": "md5:d41d8cd98f00b204e9800998ecf8427e"}]),
        manifest(layers=[None]),
        {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": ["x"]},
    ],
)  # fmt: skip
def test_nonsense(content: object) -> None:
    with pytest.raises(FormatError):
        parse(document(content), "img")


def test_platform_choice() -> None:
    shelf = Shelf()
    entries = [
        shelf.image(name) for name in ("linux/arm64/v8", "linux/amd64", "linux/arm/v6", "linux/arm/v7", "windows/amd64")
    ]
    by_name = dict(zip(("arm64", "amd64", "v6", "v7", "windows"), (one["digest"] for one in entries), strict=True))
    for kind in (OCI_INDEX, DOCKER_LIST):
        assert shelf.choose(entries, "linux/amd64", kind) == by_name["amd64"]
    assert shelf.choose(entries, "linux/arm64") == by_name["arm64"]
    assert shelf.choose(entries, "linux/arm64/v8") == by_name["arm64"]
    assert shelf.choose(entries, "linux/arm") == by_name["v7"], "the usual variant, not the first"
    assert shelf.choose(entries, "linux/arm/v6") == by_name["v6"]
    assert shelf.choose(entries, "Windows/AMD64") == by_name["windows"]


def test_the_plain_architecture_wins_over_a_variant() -> None:
    shelf = Shelf()
    entries = [shelf.image("linux/amd64/v3"), shelf.image("linux/amd64")]
    assert shelf.choose(entries) == entries[1]["digest"]
    assert shelf.choose(entries, "linux/amd64/v3") == entries[0]["digest"]
    assert shelf.choose(entries[:1]) == entries[0]["digest"]


def test_attestations_are_passed_over() -> None:
    shelf = Shelf()
    attestations = [
        shelf.image("unknown/unknown"),
        shelf.image("linux/amd64", annotations={"vnd.docker.reference.type": "attestation-manifest"}),
    ]
    real = shelf.image("linux/amd64")
    assert shelf.choose([*attestations, real]) == real["digest"]
    with pytest.raises(UnsupportedImageError, match="it has: none"):
        shelf.choose(attestations)


def test_no_matching_platform_lists_them() -> None:
    shelf = Shelf()
    entries = [shelf.image(name) for name in ("linux/arm64", "linux/s390x", "unknown/unknown", "linux/arm64")]
    with pytest.raises(UnsupportedImageError, match=r"no image for linux/amd64; it has: linux/arm64, linux/s390x$"):
        shelf.choose(entries)


def test_an_index_in_an_index() -> None:
    shelf = Shelf()
    deep = shelf.image("linux/amd64")
    inner = shelf.add({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [shelf.image("linux/arm64"), deep]})
    outer = shelf.add({"schemaVersion": 2, "mediaType": DOCKER_LIST, "manifests": [inner]})
    assert shelf.choose([shelf.image("linux/s390x"), outer]) == deep["digest"]
    with pytest.raises(UnsupportedImageError, match="linux/s390x, linux/arm64, linux/amd64"):
        shelf.choose([shelf.image("linux/s390x"), outer], "linux/riscv64")


def test_an_index_for_another_platform_is_not_fetched() -> None:
    shelf = Shelf()
    inner = shelf.add({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}, "linux/arm64")
    real = shelf.image("linux/amd64")
    assert shelf.choose([inner, real]) == real["digest"]
    assert shelf.fetched == [real["digest"]]


def test_nesting_is_bounded() -> None:
    shelf = Shelf()
    entry = shelf.image("linux/amd64")
    for _ in range(6):
        entry = shelf.add({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]})
    with pytest.raises(UnsupportedImageError, match="nested"):
        shelf.choose([entry])
    with pytest.raises(UnsupportedImageError, match="more than 16 indexes"):
        shelf.choose([shelf.add({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []})] * 17)


def test_a_manifest_without_platform_is_taken_when_nothing_else_matches() -> None:
    shelf = Shelf()
    unnamed, other, right = shelf.image(None), shelf.image("linux/arm64"), shelf.image("linux/amd64")
    assert shelf.choose([unnamed, other]) == unnamed["digest"]
    assert shelf.choose([unnamed, other, right]) == right["digest"]


@pytest.mark.parametrize("text", ["", "linux", "linux/", "/amd64", "linux/amd64/v1/x", "linux amd64", "a/b\n"])
def test_platforms_that_do_not_parse(text: str) -> None:
    with pytest.raises(InvalidNameError, match="not a platform"):
        Platform.parse(text)


def test_the_host_platform() -> None:
    host = Platform.host()
    assert host.os == "linux"
    assert host.accepts(host)


def config(**fields: Any) -> bytes:
    return json.dumps(
        {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [digest(b"1")]}, **fields}
    ).encode()


def test_image_config() -> None:
    made = ImageConfig.parse(config(config={"Env": ["A=b"]}), "config", layer_count=1)
    assert made.diff_ids == (digest(b"1"),)
    assert made.check_platform(AMD64, "img") == "linux/amd64"
    assert made.document["config"] == {"Env": ["A=b"]}


def test_an_image_of_another_platform_is_refused_with_the_way_to_take_it() -> None:
    made = ImageConfig.parse(config(architecture="arm64", variant="v8"), "config", layer_count=1)
    with pytest.raises(UnsupportedImageError, match="img is for linux/arm64/v8, not linux/amd64") as caught:
        made.check_platform(AMD64, "img")
    assert "--platform linux/arm64/v8" in caught.value.hint
    assert made.check_platform(Platform.parse("linux/arm64"), "img") == "linux/arm64/v8"


def test_a_config_that_states_no_platform_matches_any() -> None:
    made = ImageConfig.parse(config(os="", architecture=None), "config", layer_count=1)
    assert made.check_platform(AMD64, "img") == "linux/amd64"


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"no",
        config(rootfs={"diff_ids": []}),
        config(rootfs={"diff_ids": ["x"]}),
        config(rootfs=[]),
        config(os=3),
    ],
)
def test_configs_that_do_not_fit(raw: bytes) -> None:
    with pytest.raises(FormatError):
        ImageConfig.parse(raw, "config", layer_count=1)
