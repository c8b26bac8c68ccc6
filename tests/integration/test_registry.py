"""Pulling from Debian's docker-registry, filled by skopeo: open, with a password, with tokens; skopeo's archives."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imaged.errors import RegistryAuthError, RegistryError, UnsupportedImageError
from imaged.names import SourceName
from imaged.oci.auth import Credentials
from imaged.oci.decompress import decompress
from imaged.oci.source import LayerSource, open_image
from tests.support import oci
from tests.support.registry import PASSWORD, USER, Registry, TokenServer, htpasswd_auth, run_registry, run_token_server

pytestmark = pytest.mark.network
FIRST = oci.make_tar(("etc/", b""), ("etc/motd", b"hello\n" * 50_000))
SECOND = oci.make_tar(("data", os.urandom(3 << 20)))
GOOD = Credentials(USER, PASSWORD)


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests' own home, so that what is logged in on this machine plays no part."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("layout")
    for compression in oci.COMPRESSORS:
        oci.write_layout(directory, [FIRST, SECOND], tag=compression, compression=compression, config={"Cmd": ["sh"]})
    oci.write_layout(directory, [FIRST], tag="arm", platform="linux/arm64/v8")
    return directory


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with run_registry() as running:
        yield running


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    with run_token_server() as server:
        yield server


def content(layer: LayerSource) -> bytes:
    with layer.open() as stream:
        plain = decompress(stream)
        return b"".join(iter(lambda: plain.read(1 << 18), b""))


def pull(source: str, *, auth: Credentials | None = None, platform: str = "linux/amd64") -> list[bytes]:
    with open_image(SourceName.parse(source), platform=platform, auth=auth) as image:
        found = [content(layer) for layer in image.layers]
        assert [oci.digest(one) for one in found] == [layer.diff_id for layer in image.layers]
        return found


# Docker manifests have no zstd: skopeo refuses to write one.
FORMS = [("oci", "none"), ("oci", "gzip"), ("oci", "zstd"), ("v2s2", "none"), ("v2s2", "gzip")]


@pytest.mark.parametrize(("form", "compression"), FORMS)
def test_pull(registry: Registry, layout: Path, compression: str, form: str) -> None:
    name = f"team/app-{compression}:{form}"
    registry.push(f"oci:{layout}:{compression}", name, "--format", form)
    assert pull(registry.source(name)) == [FIRST, SECOND]
    with open_image(SourceName.parse(registry.source(name)), platform="linux/amd64") as image:
        raw = subprocess.run(
            ["skopeo", "inspect", "--raw", "--tls-verify=false", registry.source(name)], capture_output=True, check=True
        ).stdout
        assert image.digest == oci.digest(raw)
        assert image.config["config"]["Cmd"] == ["sh"]
        by_digest = f"docker://{registry.address}/team/app-{compression}@{image.digest}"
    assert pull(by_digest) == [FIRST, SECOND]


def test_an_index(registry: Registry, layout: Path) -> None:
    platforms = {
        "arm": {"os": "linux", "architecture": "arm64", "variant": "v8"},
        "gzip": {"os": "linux", "architecture": "amd64"},
    }
    tagged = {one.pop("annotations")[oci.REF_NAME]: one for one in oci.read_index(layout)["manifests"]}
    entries = [{**tagged[tag], "platform": platform} for tag, platform in platforms.items()]
    attestation = oci.write_image(layout, [oci.make_tar(("proof", b"x"))], platform="unknown/unknown")
    entries.insert(0, {**attestation, "platform": {"os": "unknown", "architecture": "unknown"}})
    index = {"schemaVersion": 2, "mediaType": oci.OCI_INDEX, "manifests": entries}
    oci.add_manifest(layout, oci.write_json(layout, index, oci.OCI_INDEX), tag="multi")
    registry.push(f"oci:{layout}:multi", "multi:1", "--all")
    assert pull(registry.source("multi:1")) == [FIRST, SECOND]
    assert pull(registry.source("multi:1"), platform="linux/arm64") == [FIRST]
    with pytest.raises(UnsupportedImageError, match=r"it has: linux/arm64/v8, linux/amd64$"):
        pull(registry.source("multi:1"), platform="linux/s390x")


def test_what_is_not_there(registry: Registry, layout: Path) -> None:
    registry.push(f"oci:{layout}:gzip", "here:1")
    for name in ("here:2", "nowhere:1", "here@sha256:" + "0" * 64):
        with pytest.raises(RegistryError, match=r"does not have the manifest.*MANIFEST_UNKNOWN"):
            pull(registry.source(name))


def test_layers_can_be_read_at_once(registry: Registry, layout: Path) -> None:
    registry.push(f"oci:{layout}:none", "both:1", "--dest-decompress")
    with (
        open_image(SourceName.parse(registry.source("both:1")), platform="linux/amd64") as image,
        image.layers[0].open() as first,
        image.layers[1].open() as second,
    ):
        one, two = first.read(1000), second.read(1000)
        while piece := second.read(1 << 18):
            two += piece
        while piece := first.read(1 << 18):
            one += piece
    assert hashlib.sha256(one + two).digest()


def test_password(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_registry(auth=htpasswd_auth(tmp_path / "htpasswd")) as registry:
        registry.push(f"oci:{layout}:gzip", "a/b:1", "--dest-creds", f"{USER}:{PASSWORD}")
        source = registry.source("a/b:1")
        assert pull(source, auth=GOOD) == [FIRST, SECOND]
        with pytest.raises(RegistryAuthError, match="no anonymous access to a/b") as caught:
            pull(source)
        assert f"podman login {registry.address}" in caught.value.hint
        with pytest.raises(RegistryAuthError, match="refused access to a/b with the credentials of alice") as caught:
            pull(source, auth=Credentials(USER, "wrong-secret"))
        assert "wrong-secret" not in caught.value.message + caught.value.hint
        logged_in(tmp_path / "auth.json", registry.address)
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        assert pull(source) == [FIRST, SECOND]


def logged_in(path: Path, address: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    path.write_text(json.dumps({"auths": {address: {"auth": auth}}}))


def test_credentials_of_podman_login(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_registry(auth=htpasswd_auth(tmp_path / "htpasswd")) as registry:
        registry.push(f"oci:{layout}:gzip", "a/b:1", "--dest-creds", f"{USER}:{PASSWORD}")
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        subprocess.run(
            ["skopeo", "login", "--tls-verify=false", "-u", USER, "--password-stdin", registry.address],
            input=PASSWORD.encode(), check=True, capture_output=True,
        )  # fmt: skip
        assert pull(registry.source("a/b:1")) == [FIRST, SECOND]


def test_tokens(layout: Path, tokens: TokenServer, tmp_path: Path) -> None:
    with run_registry(auth=tokens.auth) as registry:
        registry.push(f"oci:{layout}:gzip", "a/b:1", "--dest-creds", f"{USER}:{PASSWORD}")
        source = registry.source("a/b:1")
        tokens.requests.clear()
        assert pull(source, auth=GOOD) == [FIRST, SECOND]
        assert len(tokens.requests) == 1, "one token serves the whole pull"
        assert tokens.requests[0]["query"]["scope"] == ["repository:a/b:pull"]
        logged_in(tmp_path / ".docker/config.json", registry.address)
        assert pull(source) == [FIRST, SECOND]
        (tmp_path / ".docker/config.json").unlink()
        with pytest.raises(RegistryAuthError, match="no anonymous access"):
            pull(source)
        with pytest.raises(RegistryAuthError, match="credentials of mallory"):
            pull(source, auth=Credentials("mallory", "x"))
        tokens.allow_anonymous = True
        assert pull(source) == [FIRST, SECOND]
        assert tokens.requests[-1]["authorization"] == ""


@pytest.mark.parametrize("changes", [{"token_key": "access_token"}, {"say_expiry": False}, {"lifetime_s": 5}])
def test_kinds_of_tokens(layout: Path, tokens: TokenServer, changes: dict[str, Any]) -> None:
    with run_registry(auth=tokens.auth) as registry:
        registry.push(f"oci:{layout}:gzip", "a/b:1", "--dest-creds", f"{USER}:{PASSWORD}")
        for name, value in changes.items():
            setattr(tokens, name, value)
        assert pull(registry.source("a/b:1"), auth=GOOD) == [FIRST, SECOND]


def test_an_identity_token(layout: Path, tokens: TokenServer) -> None:
    with run_registry(auth=tokens.auth) as registry:
        registry.push(f"oci:{layout}:gzip", "a/b:1", "--dest-creds", f"{USER}:{PASSWORD}")
        assert pull(registry.source("a/b:1"), auth=Credentials(identity_token=tokens.identity_token)) == [FIRST, SECOND]
        assert tokens.requests[-1]["method"] == "POST"
        with pytest.raises(RegistryAuthError, match="an identity token"):
            pull(registry.source("a/b:1"), auth=Credentials(identity_token="stale"))


def test_a_token_that_runs_out_during_the_pull(layout: Path, tokens: TokenServer) -> None:
    """The registry accepts a token until a minute after its end, so it is issued in the past: here it has seven seconds
    left at least, in which a busy host has to get the first layer."""
    with run_registry(auth=tokens.auth) as registry:
        registry.push(f"oci:{layout}:gzip", "a/b:1", "--dest-creds", f"{USER}:{PASSWORD}")
        tokens.say_expiry = False
        sign = tokens.sign
        tokens.sign = lambda access: sign(access, issued_at=time.time() - tokens.lifetime_s - 52)  # type: ignore[method-assign]
        tokens.requests.clear()
        with open_image(SourceName.parse(registry.source("a/b:1")), platform="linux/amd64", auth=GOOD) as image:
            assert content(image.layers[0]) == FIRST
            tokens.sign = sign  # type: ignore[method-assign]
            time.sleep(9.2)
            assert content(image.layers[1]) == SECOND
        assert len(tokens.requests) == 2


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
def test_archives_made_by_skopeo(layout: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image.tar"
    tag = "team/app:1" if kind == "docker-archive" else "1"
    subprocess.run(
        ["skopeo", "copy", "--quiet", "--insecure-policy", f"oci:{layout}:gzip", f"{kind}:{path}:{tag}"], check=True
    )
    assert pull(f"{kind}:{path}") == pull(f"{kind}:{path}:{tag}") == [FIRST, SECOND]
    subprocess.run(["gzip", "-1", str(path)], check=True)
    assert pull(f"{kind}:{path}.gz") == [FIRST, SECOND]
