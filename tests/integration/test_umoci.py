"""The tree that the kernel shows of our image, against the one that `umoci` unpacks, entry by entry."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.blockimage import BlockImage, read_blob
from imaged.chunkstore.store import ChunkStore
from imaged.conversion.convert import convert
from imaged.names import SourceName
from imaged.record import ImageRecord
from scripts.debian import TAG, debian_layout
from tests.support import corpus, erofs, trees
from tests.support.oci import write_layout
from tests.support.tars import archive, member

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci not installed"),
]
Rows = dict[bytes, tuple[object, ...]]
MODE, UID, GID, MTIME, LINKS, FIRST, KIND, XATTRS = range(8)
RANDOM_IMAGES = 40


@contextlib.contextmanager
def ours(layout: Path, tag: str, work: Path) -> Iterator[Path]:
    """The image converted by us and mounted by the kernel, without the daemon in between."""
    with ChunkStore.open(work / "store") as store:
        done = convert(store, SourceName.parse(f"oci:{layout}:{tag}"))
        metadata, device = _devices(store, done.record, work)
    erofs.fsck(metadata, device)
    with erofs.mounted(metadata, device, work / "ours") as top:
        yield top


def _devices(store: ChunkStore, record: ImageRecord, work: Path) -> tuple[Path, Path]:
    """The metadata and the data device as files; holes stay holes."""
    metadata, device = work / "metadata.erofs", work / "data.img"
    metadata.write_bytes(read_blob(store, record.metadata))
    image = BlockImage.open(store, record.data)
    with open(device, "wb") as stream:
        stream.truncate(image.size_bytes)
        for start in range(0, image.size_bytes, 1 << 20):
            data = image.read(start, min(1 << 20, image.size_bytes - start))
            if data.strip(b"\0"):
                os.pwrite(stream.fileno(), data, start)
    return metadata, device


def umoci(layout: Path, tag: str, work: Path) -> Path:
    """The root directory that umoci unpacks as root."""
    target = work / "umoci"
    subprocess.run(
        ["umoci", "raw", "unpack", "--image", f"{layout}:{tag}", str(target)],
        check=True,
        timeout=300,
        capture_output=True,
        umask=0o022,
    )
    return target


def differences(found: Rows, wanted: Rows, untimed: frozenset[bytes]) -> list[object]:
    rows: list[object] = [("names", path) for path in found.keys() ^ wanted.keys()]
    for path in found.keys() & wanted.keys():
        mine, theirs = list(found[path]), list(wanted[path])
        if path in untimed:
            mine[MTIME] = theirs[MTIME] = None
        if mine != theirs:
            rows.append((path, mine, theirs))
    return rows


def compare(image: corpus.Image, work: Path) -> None:
    layout = write_layout(work / "layout", image.layers)
    wanted = trees.found(umoci(layout, "latest", work))
    with ours(layout, "latest", work) as top:
        assert differences(trees.found(top), wanted, image.untimed) == []


@pytest.mark.parametrize("image", list(corpus.handmade()), ids=lambda image: image.name.replace(" ", "_"))
def test_handmade_images(image: corpus.Image, tmp_path: Path) -> None:
    compare(image, tmp_path)


@pytest.mark.parametrize("seed", range(RANDOM_IMAGES))
def test_random_images(seed: int, tmp_path: Path) -> None:
    compare(corpus.random_image(seed), tmp_path)


def test_old_gnu_sparse_against_gnu_tar(tmp_path: Path) -> None:
    """umoci refuses this form ("unknown typeflag"), though its tar package reads it: here GNU tar is the judge."""
    image = corpus.old_gnu_sparse()
    layout = write_layout(tmp_path / "layout", image.layers)
    theirs = tmp_path / "tar"
    theirs.mkdir()
    for layer in image.layers:
        subprocess.run(["tar", "-xpf", "-", "-C", str(theirs)], input=layer, check=True, timeout=60)
    # Putting the second layer's file into the root changed the time that the first one gave it.
    os.utime(theirs, (corpus.TIME, corpus.TIME))
    with ours(layout, "latest", tmp_path) as top:
        assert differences(trees.found(top), trees.found(theirs), image.untimed) == []


def test_empty_attributes_are_kept(tmp_path: Path) -> None:
    """umoci loses xattrs with an empty value: its tar package reads them as "no such attribute" records."""
    layers = (corpus.ROOT, archive(corpus.x((b"user.empty", b""), (b"user.full", b"1")) + member(b"file")))
    layout = write_layout(tmp_path / "layout", layers)
    assert os.listxattr(umoci(layout, "latest", tmp_path) / "file") == ["user.full"]
    with ours(layout, "latest", tmp_path) as top:
        assert os.getxattr(top / "file", "user.empty") == b""


@pytest.mark.slow
def test_debian(tmp_path: Path) -> None:
    layout = debian_layout()
    wanted = trees.found(umoci(layout, TAG, tmp_path))
    assert len(wanted) > 5000
    with ours(layout, TAG, tmp_path) as top:
        assert differences(trees.found(top), wanted, frozenset()) == []
