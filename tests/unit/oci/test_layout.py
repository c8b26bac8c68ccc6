"""OCI layouts and archives: choosing an image, verified blobs, case 21, compressed and cut archives."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from imaged.errors import (
    DigestMismatchError,
    FormatError,
    InvalidNameError,
    NotFoundError,
    PvisorError,
    SourceError,
    UnsupportedImageError,
)
from imaged.names import SourceName
from imaged.oci.archive import choose_tag
from imaged.oci.decompress import decompress
from imaged.oci.source import LayerSource, open_image
from tests.support import oci

FIRST = oci.make_tar(("etc/", b""), ("etc/motd", b"hello\n" * 5000))
SECOND = oci.make_tar(("bin/tool", b"\x7fELF" * 900))


def content(layer: LayerSource) -> bytes:
    with layer.open() as stream:
        plain = decompress(stream)
        return b"".join(iter(lambda: plain.read(10_000), b""))


def layers_of(source: str, platform: str = "linux/amd64") -> list[bytes]:
    with open_image(SourceName.parse(source), platform=platform) as image:
        found = [content(layer) for layer in image.layers]
        assert [oci.digest(one) for one in found] == [layer.diff_id for layer in image.layers]
        return found


def tar_of(directory: Path, path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for one in sorted(directory.rglob("*")):
            archive.add(one, one.relative_to(directory), recursive=False)
    return path


@pytest.mark.parametrize("compression", oci.COMPRESSORS)
def test_an_image(tmp_path: Path, compression: str) -> None:
    directory = oci.write_layout(tmp_path / "l", [FIRST, SECOND], compression=compression, config={"Cmd": ["sh"]})
    with open_image(SourceName.parse(f"oci:{directory}"), platform="linux/amd64") as image:
        index = oci.read_index(directory)
        assert image.digest == index["manifests"][0]["digest"]
        assert (image.platform, image.config["config"]) == ("linux/amd64", {"Cmd": ["sh"]})
        assert image.total_bytes == sum(layer.size_bytes or 0 for layer in image.layers) > 0
        assert [content(layer) for layer in image.layers] == [FIRST, SECOND]
        assert content(image.layers[0]) == FIRST, "a layer can be opened again"
        assert image.layers[0].digest == oci.digest(oci.COMPRESSORS[compression][1](FIRST))


def test_an_image_without_layers(tmp_path: Path) -> None:
    assert layers_of(f"oci:{oci.write_layout(tmp_path, [])}") == []


def test_many_tags(tmp_path: Path) -> None:
    oci.write_layout(tmp_path, [FIRST], tag="one")
    oci.write_layout(tmp_path, [SECOND], tag="two")
    assert layers_of(f"oci:{tmp_path}:one") == [FIRST]
    assert layers_of(f"oci:{tmp_path}:two") == [SECOND]
    digest = oci.read_index(tmp_path)["manifests"][1]["digest"]
    assert layers_of(f"oci:{tmp_path}:{digest}") == [SECOND]
    with pytest.raises(NotFoundError, match="has 2 images") as caught:
        layers_of(f"oci:{tmp_path}")
    assert "one, two" in caught.value.hint
    with pytest.raises(NotFoundError, match="no image 'three'") as caught:
        layers_of(f"oci:{tmp_path}:three")
    assert "one, two" in caught.value.hint


def test_one_image_under_two_tags_needs_no_choice(tmp_path: Path) -> None:
    descriptor = oci.write_image(tmp_path, [FIRST])
    oci.add_manifest(tmp_path, descriptor, tag="one")
    oci.add_manifest(tmp_path, descriptor, tag="two")
    assert layers_of(f"oci:{tmp_path}") == [FIRST]


@pytest.mark.parametrize("nested", [True, False], ids=["index blob", "index.json is the index"])
def test_platforms(tmp_path: Path, nested: bool) -> None:
    entries = []
    for name, layer in (("linux/arm64", FIRST), ("linux/amd64", SECOND)):
        os_name, architecture = name.split("/")
        descriptor = oci.write_image(tmp_path, [layer], platform=name)
        entries.append({**descriptor, "platform": {"os": os_name, "architecture": architecture}})
    if nested:
        index = {"schemaVersion": 2, "mediaType": oci.OCI_INDEX, "manifests": entries}
        oci.add_manifest(tmp_path, oci.write_json(tmp_path, index, oci.OCI_INDEX), tag="latest")
    else:
        for entry in entries:
            oci.add_manifest(tmp_path, entry, tag=None)
    assert layers_of(f"oci:{tmp_path}") == [SECOND]
    assert layers_of(f"oci:{tmp_path}", "linux/arm64") == [FIRST]
    with pytest.raises(UnsupportedImageError, match="linux/arm64, linux/amd64"):
        layers_of(f"oci:{tmp_path}", "linux/riscv64")


def test_a_single_image_for_another_platform(tmp_path: Path) -> None:
    oci.write_layout(tmp_path, [FIRST], platform="linux/s390x")
    with pytest.raises(UnsupportedImageError, match="is for linux/s390x, not linux/amd64"):
        layers_of(f"oci:{tmp_path}")
    assert layers_of(f"oci:{tmp_path}", "linux/s390x") == [FIRST]


def damage(data: bytes, how: str) -> bytes:
    return {"flipped": bytes([data[0] ^ 1]) + data[1:], "longer": data + b"x", "shorter": data[:-1]}[how]


@pytest.mark.parametrize("how", ["flipped", "longer", "shorter"])
@pytest.mark.parametrize("part", ["manifest", "config", "layer"])
@pytest.mark.parametrize("archived", [False, True], ids=["layout", "archive"])
def test_damaged_blobs(tmp_path: Path, how: str, part: str, archived: bool) -> None:
    directory = oci.write_layout(tmp_path / "l", [FIRST, SECOND])
    name = oci.read_index(directory)["manifests"][0]["digest"]
    manifest = json.loads(oci.blob_path(directory, name).read_bytes())
    names = {"manifest": name, "config": manifest["config"]["digest"], "layer": manifest["layers"][1]["digest"]}
    path = oci.blob_path(directory, names[part])
    path.write_bytes(damage(path.read_bytes(), how))
    source = f"oci-archive:{tar_of(directory, tmp_path / 'a.tar')}" if archived else f"oci:{directory}"
    with pytest.raises(DigestMismatchError, match=names[part]):
        layers_of(source)


def test_a_missing_blob(tmp_path: Path) -> None:
    oci.write_layout(tmp_path, [FIRST])
    with open_image(SourceName.parse(f"oci:{tmp_path}"), platform="linux/amd64") as image:
        oci.blob_path(tmp_path, image.layers[0].digest).unlink()
        with pytest.raises(SourceError, match="has no blob sha256"):
            content(image.layers[0])


def test_file_not_found_in_the_reader_is_not_taken_for_a_missing_blob(tmp_path: Path) -> None:
    oci.write_layout(tmp_path, [FIRST])
    with (
        open_image(SourceName.parse(f"oci:{tmp_path}"), platform="linux/amd64") as image,
        pytest.raises(FileNotFoundError, match="elsewhere"),
        image.layers[0].open(),
    ):
        raise FileNotFoundError("elsewhere")


def test_a_fifo_in_place_of_a_blob_does_not_hang(tmp_path: Path) -> None:
    oci.write_layout(tmp_path, [FIRST])
    path = oci.blob_path(tmp_path, oci.read_index(tmp_path)["manifests"][0]["digest"])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceError, match="not a regular file"):
        layers_of(f"oci:{tmp_path}")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("prepare", "error", "fact"),
    [
        (lambda path: None, SourceError, "No such file"),
        (lambda path: path.write_text("x"), SourceError, "is not a directory"),
        (lambda path: path.mkdir(), SourceError, "it has no oci-layout"),
        (lambda path: write(path / "oci-layout", '{"imageLayoutVersion": "1.0.0"}'), SourceError, "has no index.json"),
        (lambda path: broken(path, "oci-layout", '{"imageLayoutVersion": "2.0.0"}'), SourceError, "version '2.0.0'"),
        (lambda path: broken(path, "oci-layout", "x"), FormatError, "oci-layout"),
        (lambda path: broken(path, "index.json", "<html>"), FormatError, "index.json"),
        (
            lambda path: broken(path, "index.json", '{"schemaVersion": 2, "manifests": []}'),
            NotFoundError,
            "has 0 images",
        ),
        (lambda path: broken(path, "index.json", " " * (5 << 20)), SourceError, "4194304 are allowed"),
    ],
)
def test_what_is_no_layout(
    tmp_path: Path, prepare: Callable[[Path], object], error: type[PvisorError], fact: str
) -> None:
    prepare(tmp_path / "l")
    with pytest.raises(error, match=fact):
        layers_of(f"oci:{tmp_path / 'l'}")


def broken(path: Path, name: str, text: str) -> None:
    oci.write_layout(path, [FIRST])
    (path / name).write_text(text)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress,
}  # fmt: skip


@pytest.mark.parametrize("packed", PACKERS)
def test_oci_archives(tmp_path: Path, packed: str) -> None:
    directory = oci.write_layout(tmp_path / "l", [FIRST, SECOND])
    path = tar_of(directory, tmp_path / "a.tar")
    path.write_bytes(PACKERS[packed](path.read_bytes()))
    assert layers_of(f"oci-archive:{path}") == [FIRST, SECOND]
    assert layers_of(f"oci-archive:{path}:latest") == [FIRST, SECOND]
    with pytest.raises(NotFoundError, match="no image 'other'"):
        layers_of(f"oci-archive:{path}:other")


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
def test_what_is_no_archive(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tar"
    with pytest.raises(SourceError, match="No such file"):
        layers_of(f"{kind}:{path}")
    for data, fact in (
        (b"", "not a tar archive"),
        (b"x" * 2000, "not a tar archive"),
        (gzip.compress(b"x" * 100_000)[:-9], "ends in the middle of a gzip member"),
        (bz2.compress(b"x" * 100), "compressed with bzip2"),
        (oci.make_tar(("a", b"b")), "is not an? (OCI layout|docker archive): it has no"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=fact):
            layers_of(f"{kind}:{path}")
    with pytest.raises(SourceError, match="is a directory"):
        layers_of(f"{kind}:{tmp_path}")


def test_a_cut_archive(tmp_path: Path) -> None:
    directory = oci.write_layout(tmp_path / "l", [os.urandom(50_000)])
    data = tar_of(directory, tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:15_000])
    with pytest.raises(SourceError, match=r"cut off|has no"):
        layers_of(f"oci-archive:{tmp_path / 'a.tar'}")


Member = tuple[str | tarfile.TarInfo, bytes]


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


def image_config(layers: list[bytes], **fields: Any) -> bytes:
    rootfs = {"type": "layers", "diff_ids": [oci.digest(layer) for layer in layers]}
    return json.dumps({"os": "linux", "architecture": "amd64", "rootfs": rootfs, **fields}).encode()


def docker_archive(path: Path, manifest: object, *members: Member) -> str:
    path.write_bytes(oci.make_tar(*members, ("manifest.json", json.dumps(manifest).encode())))
    return f"docker-archive:{path}"


def test_docker_archive_with_symlinked_and_repeated_layers(tmp_path: Path) -> None:
    raw = image_config([FIRST, SECOND, FIRST, FIRST, SECOND])
    names = ["a/layer.tar", "b/layer.tar", "c/layer.tar", "a/layer.tar", "d/layer.tar"]
    config_name = hashlib.sha256(raw).hexdigest() + ".json"
    source = docker_archive(
        tmp_path / "d.tar",
        [{"Config": config_name, "RepoTags": None, "Layers": names}],
        (config_name, raw),
        link("c/layer.tar", "../a/layer.tar"),
        ("./a/layer.tar", FIRST),
        ("b/layer.tar", gzip.compress(SECOND)),
        link("d/layer.tar", "b/layer.tar", tarfile.LNKTYPE),
    )
    assert layers_of(source) == [FIRST, SECOND, FIRST, FIRST, SECOND]
    with open_image(SourceName.parse(source), platform="linux/amd64") as image:
        assert image.digest == oci.digest(raw)
        assert image.layers[0].size_bytes == len(FIRST)


def test_docker_archive_choice_by_tag(tmp_path: Path) -> None:
    source = docker_archive(
        tmp_path / "d.tar",
        [
            {"Config": "1.json", "RepoTags": ["host.example/team/app:v1", "app:old"], "Layers": ["first.tar"]},
            {"Config": "2.json", "RepoTags": ["app:latest"], "Layers": ["second.tar"]},
        ],
        ("1.json", image_config([FIRST])),
        ("2.json", image_config([SECOND])),
        ("first.tar", FIRST),
        ("second.tar", SECOND),
    )
    for reference in ("host.example/team/app:v1", "team/app:v1", "app:v1", "v1", "app:old", "@0"):
        assert layers_of(f"{source}:{reference}") == [FIRST]
    for reference in ("app", "app:latest", "latest", "@1"):
        assert layers_of(f"{source}:{reference}") == [SECOND]
    for reference in ("", ":app:v2", ":@2", ":@x"):
        with pytest.raises(NotFoundError):
            layers_of(source + reference)


def name_of(source: str) -> str:
    with open_image(SourceName.parse(source), platform="linux/amd64") as image:
        return image.name


@pytest.mark.parametrize(
    ("tags", "reference", "name"),
    [
        (["app:v1"], "", "app:v1"),
        (["host.example/team/app:v1"], ":v1", "host.example/team/app:v1"),
        (["app:v1"], ":@0", "app:v1"),
        (["app"], "", "app:latest"),
        (["app:v1", "<none>:<none>"], "", "app:v1"),
        (["host.example/app:v1", "app:old"], "", ""),
        (["host.example/app:v1", "app:old"], ":app:v1", "host.example/app:v1"),
        (["host.example/app:v1", "app:old"], ":v1", ""),
        (["not a name"], "", ""),
        (None, "", ""),
    ],
)
def test_the_name_of_a_docker_archive(tmp_path: Path, tags: list[str] | None, reference: str, name: str) -> None:
    entry = {"Config": "1.json", "RepoTags": tags, "Layers": []}
    assert name_of(docker_archive(tmp_path / "d.tar", [entry], ("1.json", image_config([]))) + reference) == name


@pytest.mark.parametrize(
    ("tags", "reference", "name"),
    [
        (["v1"], "", "img:v1"),
        (["v1"], ":v1", "img:v1"),
        (["team/app:v1"], "", "team/app:v1"),
        (["team/app:v1"], ":team/app:v1", "team/app:v1"),
        (["v1", "v2"], "", ""),
        (["v1", "v2"], ":v2", "img:v2"),
        (["v1", "v2"], ":DIGEST", ""),
        (["v1"], ":DIGEST", "img:v1"),
        ([None], "", ""),
        (["no tag"], "", ""),
    ],
)
@pytest.mark.parametrize("archived", [False, True], ids=["layout", "archive"])
def test_the_name_of_a_layout(
    tmp_path: Path, tags: list[str | None], reference: str, name: str, archived: bool
) -> None:
    directory = tmp_path / "img"
    descriptor = oci.write_image(directory, [])
    for tag in tags:
        oci.add_manifest(directory, descriptor, tag=tag)
    source = f"oci-archive:{tar_of(directory, tmp_path / 'img.tar')}" if archived else f"oci:{directory}"
    assert name_of(source + reference.replace("DIGEST", descriptor["digest"])) == name


def test_an_ambiguous_tag() -> None:
    with pytest.raises(InvalidNameError, match="names 2 images"):
        choose_tag("v1", [("a:v1",), ("b:v1",)], "d.tar")


def test_docker_archive_that_is_broken(tmp_path: Path) -> None:
    path, raw = tmp_path / "d.tar", image_config([FIRST])
    entry = {"Config": "c.json", "Layers": ["l.tar"]}
    config: Member = ("c.json", raw)
    cases: list[tuple[object, list[Member], type[PvisorError], str]] = [
        ([entry], [config], SourceError, "has no layer l.tar"),
        ([entry], [("l.tar", FIRST)], SourceError, "has no c.json"),
        ([entry], [config, link("l.tar", "l.tar")], SourceError, "link that leads to itself"),
        ([entry], [config, link("l.tar", "../../../etc/passwd")], SourceError, "has no layer"),
        ([{**entry, "Layers": []}], [config], FormatError, "expected 0 layers, found 1"),
        ([{**entry, "Layers": [3]}], [config], FormatError, "image 0"),
        ([{"Layers": []}], [config], FormatError, "image 0"),
        ({"a": 1}, [config], FormatError, "a list of images"),
        ([], [config], FormatError, "a list of images"),
        ([{**entry, "Config": "0" * 64 + ".json"}], [("0" * 64 + ".json", raw)], DigestMismatchError, "has digest"),
    ]
    for manifest, members, error, fact in cases:
        with pytest.raises(error, match=fact):
            layers_of(docker_archive(path, manifest, *members))


def test_docker_archive_in_the_new_form_verifies_named_blobs(tmp_path: Path) -> None:
    raw = image_config([FIRST])
    names = [f"blobs/sha256/{hashlib.sha256(data).hexdigest()}" for data in (raw, FIRST)]
    manifest = [{"Config": names[0], "RepoTags": ["a:b"], "Layers": names[1:]}]
    assert layers_of(docker_archive(tmp_path / "d.tar", manifest, (names[0], raw), (names[1], FIRST))) == [FIRST]
    bad = docker_archive(tmp_path / "d.tar", manifest, (names[0], raw), (names[1], FIRST[:-1] + b"x"))
    with pytest.raises(DigestMismatchError):
        layers_of(bad)


def test_an_oci_archive_given_as_docker_archive_says_so(tmp_path: Path) -> None:
    path = tar_of(oci.write_layout(tmp_path / "l", [FIRST]), tmp_path / "a.tar")
    with pytest.raises(SourceError, match=r"no manifest\.json") as caught:
        layers_of(f"docker-archive:{path}")
    assert "oci-archive:" in caught.value.hint


def test_layers_of_an_archive_can_be_read_at_once(tmp_path: Path) -> None:
    path = tar_of(oci.write_layout(tmp_path / "l", [FIRST, SECOND], compression="none"), tmp_path / "a.tar")
    with (
        open_image(SourceName.parse(f"oci-archive:{path}"), platform="linux/amd64") as image,
        image.layers[0].open() as first,
        image.layers[1].open() as second,
    ):
        mixed = [first.read(100), second.read(100), first.read(100), second.read(100)]
    assert mixed == [FIRST[:100], SECOND[:100], FIRST[100:200], SECOND[100:200]]


def test_dir_sources_have_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="not an OCI source"):
        layers_of(f"dir:{tmp_path}")


def test_importing_the_sources_needs_no_http() -> None:
    import subprocess
    import sys

    code = "import sys, imaged.oci.source; print(any(m in sys.modules for m in ('urllib3', 'http.client', 'tarfile')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_stream_of_an_archive_through_a_pipe(tmp_path: Path) -> None:
    import threading

    data = tar_of(oci.write_layout(tmp_path / "l", [FIRST]), tmp_path / "a.tar").read_bytes()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(data,))
    writer.start()
    try:
        assert layers_of(f"oci-archive:{fifo}") == [FIRST]
    finally:
        writer.join(10)
    assert io.BytesIO(data).read(1)
