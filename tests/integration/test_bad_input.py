"""Bad input as a user meets it: what `pvisor` says of it, and what it leaves behind.

What every component makes of such input in detail is in the unit tests; here each kind is seen once at the command.
"""

from __future__ import annotations

import base64
import json
import lzma
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imaged.chunkstore.fsck import check
from tests.support import oci
from tests.support.bad import GZIP, PLAIN, TAR, ZSTD, flipped, image, listing, names, says, tree_of
from tests.support.chunkserver import chunk_server
from tests.support.command import Host, host
from tests.support.flaky import Content, Fault, Flaky, cut, instead, run_flaky, status
from tests.support.registry import (
    PASSWORD,
    USER,
    run_registry,
    run_token_server,
)
from tests.support.tars import archive, directory, hard_link, member, symlink

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.network]
BASE = archive(directory(b"etc"), member(b"etc/name", b"lower\n"))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture(scope="module")
def layout(scratch: Path) -> Path:
    return oci.write_layout(scratch / "good", [archive(member(b"kept", b"kept\n"))], tag="v1")


@pytest.fixture(scope="module")
def made(scratch: Path, layout: Path) -> Iterator[Host]:
    """A host that has kept:v1, and still has after all that is refused."""
    with host(scratch / "host") as running:
        running.run("convert", f"oci:{layout}:v1", "--name", "kept:v1")
        before = running.json("image", "ls")
        yield running
        kept = [image for image in running.json("image", "ls") if image["name"] == "kept:v1"]
        assert kept == before
        running.assert_sound()


def refused(made: Host, source: str, *words: str) -> None:
    """Converting this into the name that is taken fails, says why, and changes nothing that can be seen."""
    before = names(made)
    says(made.error("convert", source, "--name", "kept:v1", "--platform", "linux/amd64"), *words)
    assert names(made) == before
    assert check(made.root / "home/store").errors == []


def tar_of(*members: bytes) -> Callable[[Path], str]:
    """An image with one good layer, and one of these members."""
    return lambda path: f"oci:{oci.write_layout(path, [BASE, archive(*members)], tag='bad')}:bad"


def blob_of(blob: bytes, media_type: str = TAR, diff_id: str = "") -> Callable[[Path], str]:
    return lambda path: image(path, blob, media_type=media_type, diff_id=diff_id)


def damaged_blob(change: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    """The layer's file is no longer what its descriptor says."""

    def build(path: Path) -> str:
        source = image(path, GZIP)
        blob = oci.blob_path(path, oci.digest(GZIP))
        blob.write_bytes(change(GZIP))
        return source

    return build


def lost_blob(path: Path) -> str:
    source = image(path, GZIP)
    oci.blob_path(path, oci.digest(GZIP)).unlink()
    return source


def manifest_of(document: dict[str, object], media_type: str = oci.OCI_MANIFEST) -> Callable[[Path], str]:
    def build(path: Path) -> str:
        oci.add_manifest(path, oci.write_json(path, document, media_type), tag="bad")
        return f"oci:{path}:bad"

    return build


def raw_manifest(raw: bytes) -> Callable[[Path], str]:
    def build(path: Path) -> str:
        oci.add_manifest(path, oci.write_blob(path, raw, oci.OCI_MANIFEST), tag="bad")
        return f"oci:{path}:bad"

    return build


def other_platforms(path: Path) -> str:
    entries = []
    for name in ("linux/arm64/v8", "windows/amd64"):
        os_name, architecture = name.split("/")[:2]
        entry = oci.write_image(path, [PLAIN], platform=name)
        entries.append({**entry, "platform": {"os": os_name, "architecture": architecture}})
    index = {"schemaVersion": 2, "mediaType": oci.OCI_INDEX, "manifests": entries}
    oci.add_manifest(path, oci.write_json(path, index, oci.OCI_INDEX), tag="bad")
    return f"oci:{path}:bad"


def one_platform(path: Path) -> str:
    return f"oci:{oci.write_layout(path, [PLAIN], platform='linux/s390x', tag='bad')}:bad"


def cut_archive(kind: str) -> Callable[[Path], str]:
    def build(path: Path) -> str:
        oci.write_layout(path / "layout", [PLAIN], tag="bad", compression="none")
        command = ["skopeo", "copy", "--quiet", "--insecure-policy", f"oci:{path}/layout:bad"]
        subprocess.run([*command, f"{kind}:{path}/image.tar:bad:bad"], check=True, capture_output=True)
        with (path / "image.tar").open("r+b") as file:
            file.truncate(200_000)
        return f"{kind}:{path}/image.tar"

    return build


LONG = b"n" * 5000
CHART = {"mediaType": "application/vnd.test.chart", "digest": oci.digest(b"{}"), "size": 2}
BAD: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    # a truncated or corrupt layer, whose blob is what the manifest says
    "gzip cut off": (blob_of(GZIP[:-5000], TAR + "+gzip"), ("layer sha256:", "gzip", "ends")),
    "zstd cut off": (blob_of(ZSTD[:-5000], TAR + "+zstd"), ("layer sha256:", "zstd", "ends")),
    "tar cut off": (blob_of(PLAIN[:-5000], diff_id=oci.digest(PLAIN[:-5000])), ("layer sha256:", "etc/noise")),
    "gzip corrupt": (blob_of(flipped(GZIP, 100_000), TAR + "+gzip"), ("layer sha256:",)),
    "zstd corrupt": (blob_of(flipped(ZSTD, 100_000), TAR + "+zstd"), ("layer sha256:",)),
    "tar header corrupt": (
        blob_of(flipped(PLAIN, 600), diff_id=oci.digest(flipped(PLAIN, 600))),
        ("layer sha256:", "header"),
    ),
    "no tar": (blob_of(b"no archive" * 500, diff_id=oci.digest(b"no archive" * 500)), ("layer sha256:",)),
    "xz": (blob_of(lzma.compress(PLAIN), TAR + "+gzip"), ("layer sha256:", "xz")),
    # digests and sizes
    "blob flipped": (damaged_blob(lambda raw: flipped(raw, 1000)), (oci.digest(GZIP), "digest")),
    "blob shorter": (damaged_blob(lambda raw: raw[:-1]), (oci.digest(GZIP), f"{len(GZIP)}")),
    "blob longer": (damaged_blob(lambda raw: raw + b"x"), (oci.digest(GZIP), f"{len(GZIP)}")),
    "blob lost": (lost_blob, (oci.digest(GZIP),)),
    "wrong diff_id": (blob_of(GZIP, diff_id=oci.digest(b"other")), ("diff_id", oci.digest(PLAIN))),
    # names and links
    "hard link to nothing": (tar_of(hard_link(b"a", b"nothing")), ("'a'", "nothing", "not in the image")),
    "hard link outside": (tar_of(hard_link(b"a", b"../../../etc/hostname")), ("'a'", "not in the image")),
    "hard link to itself": (tar_of(hard_link(b"a", b"a")), ("'a'", "not in the image")),
    "empty name": (tar_of(member(b"")), ("empty",)),
    "long component": (tar_of(member(LONG)), ("5000 bytes",)),
    "long path": (tar_of(member(b"/".join([b"n" * 199] * 25))), ("4999 bytes", "4095")),
    "long link target": (tar_of(symlink(b"a", LONG)), ("'a'", "5000")),
    "long hard link": (tar_of(hard_link(b"a", LONG)), ("'a'", "5000 bytes")),
    "below a file": (tar_of(member(b"etc/name/below")), ("etc/name",)),
    "endless symlink": (tar_of(symlink(b"a", b"a"), member(b"a/b")), ("a/b", "symlinks")),
    # manifests
    "unknown layer type": (blob_of(GZIP, "application/x-unheard-of"), ("unknown media type", "x-unheard-of")),
    "encrypted layer": (blob_of(GZIP, TAR + "+gzip+encrypted"), ("unknown media type", "encrypted")),
    "unknown manifest type": (
        manifest_of({"schemaVersion": 2, "mediaType": "application/x-unheard-of"}),
        ("unknown media type", "x-unheard-of"),
    ),
    "an artifact": (
        manifest_of({"schemaVersion": 2, "config": CHART, "layers": []}),
        ("artifact", "vnd.test.chart"),
    ),
    "schema 1": (manifest_of({"schemaVersion": 1, "name": "x", "tag": "y", "fsLayers": []}), ("schema 1",)),
    "manifest is no JSON": (raw_manifest(b"\x00\x01nonsense"), ("JSON",)),
    "manifest nested without end": (raw_manifest(b"[" * 100_000), ("JSON",)),
    "manifest of wrong types": (manifest_of({"schemaVersion": 2, "config": [], "layers": 7}), ("config",)),
    "other platforms": (other_platforms, ("linux/amd64", "linux/arm64", "windows/amd64", "--platform")),
    "another platform": (one_platform, ("linux/amd64", "linux/s390x")),
    # archives and paths
    "docker-archive cut off": (cut_archive("docker-archive"), ("image.tar", "cut off")),
    "oci-archive cut off": (cut_archive("oci-archive"), ("image.tar", "cut off")),
    "no layout": (lambda path: f"oci:{path}/none:v1", ("none", "No such file")),
    "a layout name too long": (lambda path: f"oci:{path}/{'n' * 300}", ("nnn: File name too long",)),
    "no archive": (lambda path: f"docker-archive:{path}/none.tar", ("none.tar",)),
    "no directory": (lambda path: f"dir:{path}/none", ("none",)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_converted_is_refused(made: Host, tmp_path: Path, name: str) -> None:
    build, words = BAD[name]
    refused(made, build(tmp_path), *words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("ftp://host/x", ("not an image source", "docker://")),
        ("oci:" + "x" * 5000, ("5004 bytes", "oci:xxx")),
        ("docker://" + "x" * 3000, ("xxx", "not an image name")),
    ],
    ids=["scheme", "path", "repository"],
)
def test_names_that_can_not_be_sources(made: Host, source: str, words: tuple[str, ...]) -> None:
    says(made.error("convert", source, code=2), *words)


def tree(made: Host, tmp_path: Path, *layers: bytes) -> Path:
    """The files of an image of these layers, by `image export` to a directory."""
    oci.write_layout(tmp_path / "layout", layers, tag="v1")
    made.run("convert", f"oci:{tmp_path}/layout:v1", "--name", "treated:v1")
    top = tree_of(made, tmp_path, "treated:v1")
    made.run("image", "rm", "treated:v1")
    return top


def test_no_path_leads_outside_the_root(made: Host, tmp_path: Path) -> None:
    """Absolute names and `..` stop at the root, and symlinked parents are followed inside it, as in a chroot."""
    target = tmp_path / "outside"
    target.mkdir()
    inside = os.fsencode(target.relative_to("/"))
    found = tree(
        made,
        tmp_path,
        archive(member(os.fsencode(target / "absolute"), b"1"), member(b"../" * 30 + inside + b"/dots", b"2")),
        archive(
            symlink(b"out", os.fsencode(target)),
            symlink(b"up", b"../" * 30 + inside),
            member(b"out/through", b"3"),
            member(b"up/through-dots", b"4"),
            hard_link(b"out/linked", b"../" * 30 + inside + b"/dots"),
            member(b"out/../../../../beside", b"5"),
        ),
    )
    assert list(target.iterdir()) == []
    kept = {name: data for name, data in listing(found).items() if isinstance(data, bytes)}
    where = os.fsdecode(inside)
    assert kept == {
        f"{where}/absolute": b"1",
        f"{where}/dots": b"2",
        f"{where}/through": b"3",
        f"{where}/through-dots": b"4",
        f"{where}/linked": b"2",
        "beside": b"5",
    }
    assert (found / where / "linked").stat().st_nlink == 2


def test_the_last_of_equal_names_wins(made: Host, tmp_path: Path) -> None:
    found = tree(
        made,
        tmp_path,
        archive(
            member(b"twice", b"first", mode=0o600),
            member(b"./twice", b"second", mode=0o640),
            member(b"kind", b"a file"),
            directory(b"kind/", mode=0o711),
            directory(b"emptied"),
            member(b"emptied/gone", b"x"),
            symlink(b"emptied", b"twice"),
            directory(b"same", mode=0o700),
            member(b"same/stays", b"x"),
            directory(b"same", mode=0o755),
        ),
    )
    assert listing(found) == {"twice": b"second", "kind": None, "emptied": "twice", "same": None, "same/stays": b"x"}
    modes = {name: (found / name).stat().st_mode & 0o777 for name in ("twice", "kind", "same")}
    assert modes == {"twice": 0o640, "kind": 0o711, "same": 0o755}


@pytest.fixture(scope="module")
def registry() -> Iterator[Flaky]:
    with run_flaky() as running:
        yield running


def test_a_schema1_manifest_of_a_registry(made: Host, registry: Flaky) -> None:
    raw = json.dumps({"schemaVersion": 1, "name": "old", "tag": "v1", "fsLayers": [], "history": []}).encode()
    registry.add_manifest("old", raw, "application/vnd.docker.distribution.manifest.v1+prettyjws", tag="v1")
    refused(made, registry.source("old:v1"), "schema 1", registry.address)


HTML = b"<!DOCTYPE html><title>Sign in</title>"
NONSENSE: dict[str, tuple[str, Fault, tuple[str, ...]]] = {
    "a login page": (
        "/manifests/",
        instead(HTML, media_type="text/html"),
        ("127.0.0.1:", "text/html", "is a registry"),
    ),
    "an empty manifest": ("/manifests/", instead(b""), ("manifest",)),
    "a manifest of numbers": ("/manifests/", instead(b'{"schemaVersion": 2, "layers": 5, "config": 7}'), ("config",)),
    "not found": ("/manifests/", status(404, body=HTML), ("does not have",)),
    "forbidden": ("/manifests/", status(403), ("access",)),
    "gone": ("/manifests/", status(410, body=b"\xff" * 3000), ("410",)),
    "a config of HTML": ("/blobs/", instead(HTML), ("blob sha256:", "37 bytes")),
    "a layer of HTML": (oci.digest(GZIP), instead(HTML * 50, chunked=True), ("layer sha256:", "corrupt header")),
    "a token server of HTML": (
        "/manifests/",
        lambda handler, content: handler.answer(
            401, b"", {"WWW-Authenticate": f'Bearer realm="http://{handler.flaky.address}/login",service="x"'}
        ),
        ("token server", "JSON"),
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_registry_that_answers_nonsense(made: Host, registry: Flaky, tmp_path: Path, name: str) -> None:
    path, fault, words = NONSENSE[name]
    image(tmp_path / "layout", GZIP, media_type=TAR + "+gzip")
    registry.serve(tmp_path / "layout", "app")
    registry.content["/login?service=x&scope=repository%3Aapp%3Apull"] = Content(HTML, "text/html")
    registry.plan(path, fault)
    refused(made, registry.source("app:bad"), *words)
    registry.forget_faults()


def test_a_registry_that_is_down_or_never_well(made: Host, registry: Flaky, tmp_path: Path) -> None:
    """All at once, as each is tried again for some seconds first."""
    image(tmp_path / "layout", GZIP, media_type=TAR + "+gzip")
    for name in ("ill", "cut"):
        registry.serve(tmp_path / "layout", name)
    registry.plan("/v2/ill/manifests/", *[status(503)] * 6)
    registry.plan(f"/v2/cut/blobs/{oci.digest(GZIP)}", *[cut(100)] * 6)
    before = names(made)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen: nobody else can meanwhile
        down = f"127.0.0.1:{held.getsockname()[1]}"
        cases = {
            f"docker://{down}/app:v1": (down, "can not be reached", "hint: "),
            registry.source("ill:bad"): (registry.address, "503"),
            registry.source("cut:bad"): (oci.digest(GZIP), "100"),
        }
        running = {source: made.start("convert", source, "--name", "kept:v1") for source in cases}
        started = made.start("run", f"docker://{down}/app:v1", "--", "true")
        for source, process in running.items():
            out, said = process.communicate(timeout=60)
            assert (process.returncode, out) == (1, b""), said
            says(said.decode(), *cases[source])
        says(started.communicate(timeout=60)[1].decode(), down)
        assert started.returncode == 125
    assert names(made) == before
    made.assert_sound()


def secrets_of(*texts: str) -> list[bytes]:
    """Each as it is, and in an Authorization header."""
    encoded = [base64.b64encode(f"{USER}:{text}".encode()).rstrip(b"=") for text in texts]
    return [text.encode() for text in texts] + encoded


def test_secrets_are_in_no_output(layout: Path, tmp_path: Path) -> None:
    """Neither passwords nor tokens, in errors, tracebacks, logs of the daemon and the server, or on a command line."""
    wrong = "wrong-password-8731"
    auth = tmp_path / "auth.json"
    with run_token_server() as tokens, run_registry(auth=tokens.auth) as registry:
        good = ["--dest-creds", f"{USER}:{PASSWORD}"]
        registry.push(f"oci:{layout}:v1", "team/app:v1", *good)
        source = registry.source("team/app:v1")
        issued = tokens.sign([{"type": "repository", "name": "team/app", "actions": ["pull"]}])
        outputs = []

        def log_in(password: str) -> None:
            entry = {"auth": base64.b64encode(f"{USER}:{password}".encode()).decode()}
            auth.write_text(json.dumps({"auths": {registry.address: entry}}))

        with (
            chunk_server(tmp_path / "store", environ={"REGISTRY_AUTH_FILE": str(auth)}) as server,
            host(tmp_path / "alone", REGISTRY_AUTH_FILE=str(auth)) as alone,
            host(tmp_path / "client", server.url) as client,
        ):
            log_in(wrong)
            says(alone.error("convert", source), registry.address, USER)
            says(client.error("pull", source), registry.address, USER)
            outputs.append(alone.run("-v", "convert", source, code=1))
            outputs.append(client.run("-v", "run", source, "--", "true", code=125))
            log_in(PASSWORD)
            outputs.append(alone.run("-v", "convert", registry.source("team/app:v9"), code=1))
            outputs.append(alone.run("-v", "--json", "convert", source, "--name", "got:v1"))
            outputs.append(client.run("-v", "pull", source))
            outputs.append(alone.run("-v", "image", "inspect", "got:v1"))
        logs = [path.read_bytes() for path in tmp_path.rglob("*.log")]
    assert any(request["authorization"] for request in tokens.requests)
    written = b"".join([*logs, *(done.stdout + done.stderr for done in outputs)])
    for secret in (*secrets_of(wrong, PASSWORD), issued[:40].encode(), b"Bearer ey", b"Basic "):
        assert secret not in written, secret
