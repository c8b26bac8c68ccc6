"""Build, check and mount EROFS images in tests: with the kernel and with fsck.erofs, the outside judges."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuse import linux
from imaged.blockbuilder import BlockImageBuilder
from imaged.blockimage import BlockImage
from imaged.chunks import ChunkReadWriter
from imaged.erofs import layout, writer
from imaged.erofs.tree import Inode
from imaged.ids import ChunkId


@dataclass(frozen=True, slots=True)
class Built:
    """A metadata image and its data device, as bytes, as files and as a block image."""

    metadata: Path
    data: Path
    data_id: ChunkId
    placement: layout.Placement


def build(store: ChunkReadWriter, root: Inode, work: Path) -> Built:
    """Place and write a tree; the two images become sparse files in `work`."""
    builder = BlockImageBuilder(store)
    placement = layout.place(root, builder)
    metadata = work / "metadata.erofs"
    metadata.write_bytes(writer.metadata_image(root, placement))
    data_id = builder.finish()
    data = work / "data.img"
    image = BlockImage.open(store, data_id)
    with open(data, "wb") as stream:
        stream.truncate(image.size_bytes)
        position = 0
        while position < image.size_bytes:
            for piece in image.pieces(position, 16 << 20):
                if piece.chunk is not None:
                    chunk = store.get(piece.chunk)[piece.chunk_offset : piece.chunk_offset + piece.length]
                    stream.seek(position)
                    stream.write(chunk)
                position += piece.length
    return Built(metadata, data, data_id, placement)


def fsck(metadata: Path, data: Path | None = None, *, extract: Path | None = None) -> None:
    """fsck.erofs, quiet when it accepts the image; its output is in the AssertionError otherwise."""
    command = ["fsck.erofs"]
    command += [f"--device={data}"] if data is not None else []
    command += [f"--extract={extract}"] if extract is not None else []
    result = subprocess.run([*command, str(metadata)], capture_output=True, text=True, timeout=120, check=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "<E>" not in output, output


@contextlib.contextmanager
def mounted(metadata: Path, data: Path | None, top: Path) -> Iterator[Path]:
    """Mount without loop devices, as kernels from 6.12 on can."""
    top.mkdir(exist_ok=True)
    linux.mount(metadata, top, "erofs", linux.MS_RDONLY, f"device={data}" if data is not None else b"")
    try:
        yield top
    finally:
        linux.umount(top, linux.MNT_DETACH)


@contextlib.contextmanager
def loop_device(path: Path) -> Iterator[Path]:
    """A read-only loop device of a file."""
    command = ["losetup", "--find", "--show", "--read-only", str(path)]
    name = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    try:
        yield Path(name)
    finally:
        subprocess.run(["losetup", "--detach", name], check=True, timeout=30)
