"""Guest disks: made, laid over a disk image after a restore, and captured as block images."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from imaged.blockformat import IMAGE_LIMIT_BYTES
from imaged.chunks import ChunkBatchWriter
from imaged.derive import CELL_BYTES, Change, derive
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.parentleaves import ParentLeaves
from vmm import qcow2
from vmm.captured import Captured
from vmm.errors import VmSetupError
from vmm.parentfile import ParentFile

SIZE_LEAST_BYTES = 4 << 20
_READ_BYTES = 16 * CELL_BYTES
_TIMEOUT_S = 300
_MKFS = ("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal", "-E", "assume_storage_prezeroed=1")
_CONVERT = ("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-o")
_PACKAGES = {"mkfs.ext4": "e2fsprogs", "qemu-img": "qemu-utils"}


def create_disk(path: Path, size_bytes: int) -> None:
    """An empty ext4 file system of this size in a new qcow2 file.

    It has no journal: a guest that is cut off is lost with its memory anyway, and the journal's blocks would be part
    of every capture. `size_bytes` is a whole number of blocks. VmSetupError says what is missing or failed.
    """
    if size_bytes % BLOCK_BYTES or not SIZE_LEAST_BYTES <= size_bytes <= IMAGE_LIMIT_BYTES:
        expected = f"a multiple of {BLOCK_BYTES} from {SIZE_LEAST_BYTES} to {IMAGE_LIMIT_BYTES} bytes"
        raise VmSetupError(f"a disk of {size_bytes} bytes can not be made", hint=f"the size is {expected}")
    raw = path.with_name(f"{path.name}.raw")
    try:
        with open(raw, "xb") as stream:
            stream.truncate(size_bytes)
        _run([*_MKFS, str(raw)])
        options = f"cluster_size={qcow2.CLUSTER_BYTES},extended_l2=on"
        _run([*_CONVERT, options, str(raw), str(path)])
    finally:
        raw.unlink(missing_ok=True)


def capture_disk(
    store: ChunkBatchWriter,
    path: Path,
    parent: ChunkId | None,
    size_bytes: int,
    *,
    before: ParentLeaves | None = None,
) -> Captured:
    """What the qcow2 file has over its backing file, which shows `parent` (None: no backing file), as a disk image.

    The guest is stopped and its writes are in the file (`Qemu.flush_disk`). `before` as of `capture_memory`. Nothing is
    durable before `store.flush`. FormatError when the file is not one of ours, or not of this size.
    """
    with open(path, "rb") as stream:
        disk = qcow2.Qcow2.read(stream)
        if disk.size_bytes != size_bytes or bool(disk.backing) != (parent is not None):
            expected = f"{size_bytes} bytes, {'no' if parent is None else 'a'} backing file"
            found = f"{disk.size_bytes} bytes, backing file {os.fsdecode(disk.backing)!r}"
            raise FormatError(f"disk {path}", expected=expected, found=found)
        parts = list(disk.parts(stream))
        with ParentFile.open(Path(os.fsdecode(disk.backing)) if disk.backing else None) as backing:
            image = derive(store, parent, size_bytes, _changes(stream, parts, backing), before=before)
    return Captured(id=image, dirty_bytes=sum(part.length_bytes for part in parts))


def _changes(file: BinaryIO, parts: Iterable[qcow2.Part], backing: ParentFile) -> Iterator[Change]:
    """What the parts are, data in pieces, without what is known to have been there before."""
    for part in parts:
        if part.file_offset is None:
            yield part.offset, part.length_bytes
            continue
        for start in range(0, part.length_bytes, _READ_BYTES):
            length_bytes = min(_READ_BYTES, part.length_bytes - start)
            # The file may end inside its last cluster: what follows reads as zeros.
            data = os.pread(file.fileno(), length_bytes, part.file_offset + start)
            yield from backing.different([(part.offset + start, length_bytes)], data.ljust(length_bytes, b"\0"))


def _run(command: Sequence[str]) -> None:
    """Run a program that says nothing when it succeeds; VmSetupError with what it said, or the package it is in."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        hint = f"install it: apt-get install {_PACKAGES[command[0]]}"
        raise VmSetupError(f"{command[0]} is not installed", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise VmSetupError(f"{command[0]} did not end in {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise VmSetupError(f"{' '.join(command)} failed: {said[-1] if said else f'exit {done.returncode}'}")
