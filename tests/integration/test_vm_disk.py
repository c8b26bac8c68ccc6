"""Disks that qemu-img and qemu-io wrote, captured and laid over one another, against plain bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.derive import derive
from imaged.errors import FormatError
from imaged.ids import ChunkId
from vmm.disk import capture_disk, create_disk
from vmm.errors import VmSetupError
from vmm.qcow2 import create_overlay

pytestmark = pytest.mark.skipif(
    any(shutil.which(program) is None for program in ("qemu-img", "qemu-io", "mkfs.ext4")),
    reason="needs qemu-utils and e2fsprogs",
)
MIB = 1 << 20
SIZE_BYTES = 40 * MIB


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore.open(tmp_path / "store") as store:
        yield store


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def create(path: Path, *options: str, size_bytes: int = SIZE_BYTES) -> None:
    run("qemu-img", "create", "-q", "-f", "qcow2", *options, str(path), str(size_bytes))


def change(path: Path, seed: int, *, cache: str = "writeback") -> None:
    """Some writes and zeros of many sizes, at random places, most at block boundaries as a file system does."""
    random = Random(seed)
    commands = []
    for _ in range(40):
        unit = random.choice([512, 4096, 4096, 4096, 65536])
        length = unit * random.choice([1, 1, 2, 7])
        at = random.randrange(SIZE_BYTES - length) // unit * unit
        if random.random() < 0.25:
            commands.append(f"write -z{random.choice(['', ' -u'])} {at} {length}")
        elif random.random() < 0.1:
            commands.append(f"discard {at} {length}")
        else:
            commands.append(f"write -P {random.randrange(256)} {at} {length}")
    run("qemu-io", "-t", cache, "-d", "unmap", "-f", "qcow2", *(f"-c{one}" for one in commands), str(path))


def content(path: Path, work: Path) -> bytes:
    """What a guest would read, by qemu-img."""
    raw = work / "content.raw"
    run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(path), str(raw))
    return raw.read_bytes()


def image_bytes(store: ChunkStore, image: ChunkId) -> bytes:
    found = BlockImage.open(store, image)
    return b"".join(found.read(at, 4 * MIB) for at in range(0, found.size_bytes, 4 * MIB))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-o", "cluster_size=4k"),
        ("-o", "cluster_size=128k,extended_l2=on"),
        ("-o", "cluster_size=2M,extended_l2=on"),
        ("-o", "lazy_refcounts=on"),
        ("-o", "preallocation=metadata"),
    ],
    ids=" ".join,
)
def test_what_qemu_wrote_is_captured(store: ChunkStore, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "disk.qcow2"
    create(path, *options)
    change(path, seed=1)
    captured = capture_disk(store, path, None, SIZE_BYTES)
    assert image_bytes(store, captured.id) == content(path, tmp_path)
    assert captured.dirty_bytes > 0


def test_generations_of_overlays(store: ChunkStore, tmp_path: Path) -> None:
    """Each over the image captured from the one before, which stands as a plain file as the FUSE file would."""
    path = tmp_path / "disk0.qcow2"
    create(path)
    change(path, seed=10)
    captured = capture_disk(store, path, None, SIZE_BYTES)
    images = [(captured.id, content(path, tmp_path))]
    for generation in range(1, 5):
        backing = tmp_path / f"backing{generation}"
        backing.write_bytes(image_bytes(store, captured.id))
        path = tmp_path / f"disk{generation}.qcow2"
        create_overlay(path, backing, SIZE_BYTES)
        empty = capture_disk(store, path, captured.id, SIZE_BYTES)
        assert (empty.id, empty.dirty_bytes) == (captured.id, 0)
        change(path, seed=10 + generation)
        run("qemu-img", "check", "-q", str(path))
        captured = capture_disk(store, path, captured.id, SIZE_BYTES)
        assert captured.dirty_bytes < SIZE_BYTES // 8
        images.append((captured.id, content(path, tmp_path)))
    for image, expected in images:
        assert image_bytes(store, image) == expected


@pytest.mark.parametrize("size_bytes", [4 * MIB, 4 * MIB + 4096, 511 << 30])
def test_qemu_accepts_an_overlay(tmp_path: Path, size_bytes: int) -> None:
    backing, path = tmp_path / "backing \u00fc,file", tmp_path / "disk.qcow2"
    with open(backing, "xb") as stream:
        stream.truncate(size_bytes)
    create_overlay(path, backing, size_bytes)
    told = json.loads(run("qemu-img", "info", "--output=json", str(path)))
    assert (told["virtual-size"], told["backing-filename"]) == (size_bytes, str(backing))
    assert (told["backing-filename-format"], told["cluster-size"]) == ("raw", 128 << 10)
    assert told["format-specific"]["data"]["extended-l2"] is True
    run("qemu-img", "check", "-q", str(path))
    run("qemu-io", "-f", "qcow2", f"-cwrite -P 7 {size_bytes - 4096} 4096", str(path))
    run("qemu-img", "check", "-q", str(path))
    with ChunkStore.open(tmp_path / "store") as store:
        parent = derive(store, None, size_bytes, [])
        captured = capture_disk(store, path, parent, size_bytes)
        assert captured.dirty_bytes == 4096
        image = BlockImage.open(store, captured.id)
        assert image.read(size_bytes - 8192, 8192) == bytes(4096) + b"\x07" * 4096


def test_a_new_disk_is_an_empty_file_system(store: ChunkStore, tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    create_disk(path, 1 << 30)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["disk.qcow2", "store"]
    captured = capture_disk(store, path, None, 1 << 30)
    raw = tmp_path / "raw"
    with open(raw, "xb") as stream:
        image = BlockImage.open(store, captured.id)
        for at in range(0, 1 << 30, 16 * MIB):
            data = image.read(at, 16 * MIB)
            if data.strip(b"\0"):
                stream.seek(at)
                stream.write(data)
        stream.truncate(1 << 30)
    run("e2fsck", "-f", "-n", str(raw))
    assert captured.dirty_bytes < 4 * MIB


def test_a_disk_of_another_size_or_base_is_refused(store: ChunkStore, tmp_path: Path) -> None:
    path, over = tmp_path / "disk.qcow2", tmp_path / "over.qcow2"
    create(path)
    create_overlay(over, path, SIZE_BYTES)
    image = capture_disk(store, path, None, SIZE_BYTES).id
    for disk, parent, size_bytes in [(path, None, MIB), (path, image, SIZE_BYTES), (over, None, SIZE_BYTES)]:
        with pytest.raises(FormatError, match="backing file"):
            capture_disk(store, disk, parent, size_bytes)


def test_files_that_are_not_as_ours_are_refused(store: ChunkStore, tmp_path: Path) -> None:
    path, packed = tmp_path / "disk.qcow2", tmp_path / "packed.qcow2"
    create(path)
    change(path, seed=3)
    run("qemu-img", "convert", "-c", "-O", "qcow2", str(path), str(packed))
    with pytest.raises(FormatError, match="compress"):
        capture_disk(store, packed, None, SIZE_BYTES)
    fine = tmp_path / "fine.qcow2"
    create(fine, "-o", "cluster_size=16k,extended_l2=on")
    with pytest.raises(FormatError, match="found 512 bytes"):
        capture_disk(store, fine, None, SIZE_BYTES)


def test_a_size_that_no_file_system_has_is_refused(tmp_path: Path) -> None:
    for size_bytes in (0, 4096, (64 << 20) + 1, 1 << 40):
        with pytest.raises(VmSetupError, match="can not be made"):
            create_disk(tmp_path / "disk.qcow2", size_bytes)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        create_overlay(path, tmp_path / "backing", SIZE_BYTES)
    assert path.read_bytes() == b"mine"
