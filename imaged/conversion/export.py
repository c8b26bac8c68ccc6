"""Export an image as one EROFS file that needs no chunk store: metadata, then the data device behind it."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from imaged.blockimage import BlockImage, read_blob
from imaged.chunks import ChunkReader
from imaged.erofs import format as erofs
from imaged.erofs.reader import move_to_primary
from imaged.errors import FormatError, PvisorError
from imaged.ids import BLOCK_BYTES
from imaged.progress import NoProgress, Progress
from imaged.publish import published
from imaged.record import ImageRecord

_WINDOW_BYTES = 4 << 20
"""Read and written at once, which is also what is fetched in one request."""


def export_file(reader: ChunkReader, record: ImageRecord, path: Path, progress: Progress | None = None) -> int:
    """Write the image to `path` and return its size in bytes; holes of the data device stay holes.

    The data device's blocks become this file's own, behind the metadata, so the superblock and every file's chunk
    indexes change. `path` appears, or is replaced, when all is written and synced; of a symbolic link the target is.
    PvisorError when the file can not be written or `path` is no regular file (a device would be replaced by one, too),
    FormatError when the metadata is not ours, and what the reader raises.
    """
    progress = progress or NoProgress()
    path = _regular(path)
    metadata = bytearray(read_blob(reader, record.metadata))
    image = BlockImage.open(reader, record.data)
    superblock = erofs.Superblock.parse(memoryview(metadata)[:BLOCK_BYTES])
    data_offset = _data_offset(superblock, len(metadata), image.size_bytes)
    _merge_device(metadata, superblock)
    size_bytes = data_offset + image.size_bytes
    progress.start("export", image.size_bytes)
    try:
        with published(path) as stream:
            stream.write(metadata)
            stream.truncate(size_bytes)
            position = 0
            for start, end in _data_ranges(image):
                stream.seek(data_offset + start)
                stream.write(image.read(start, end - start))
                progress.advance(end - position)
                position = end
            progress.advance(image.size_bytes - position)
    except OSError as error:
        reason = error.strerror or str(error)
        hint = f"the image takes up to {size_bytes} bytes; give a path on a file system with room for it"
        raise PvisorError(f"can not write {path}: {reason}", hint=hint) from error
    return size_bytes


def _regular(path: Path) -> Path:
    """Where the links lead, which is a regular file or does not exist yet."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path.resolve()
    except OSError as error:
        raise PvisorError(f"can not write {path}: {error.strerror}", hint="give a path for a new file") from error
    if not stat.S_ISREG(mode):
        hint = "export to a file; `dd if=FILE of=DEVICE` then puts it on a disk" if stat.S_ISBLK(mode) else ""
        raise PvisorError(f"can not write {path}: not a regular file", hint=hint or "give a path for a new file")
    return path.resolve()


def _data_offset(superblock: erofs.Superblock, metadata_bytes: int, data_bytes: int) -> int:
    """Where the data device begins in the file; FormatError when metadata and data are not of one image."""
    device = superblock.device
    if device is None or device.mapped_block * BLOCK_BYTES < metadata_bytes:
        raise FormatError("EROFS metadata", expected="a data device behind the metadata", found=str(device))
    if device.blocks * BLOCK_BYTES != data_bytes:
        expected = f"a data device of {device.blocks * BLOCK_BYTES} bytes"
        raise FormatError("image", expected=expected, found=f"{data_bytes} bytes")
    return device.mapped_block * BLOCK_BYTES


def _merge_device(metadata: bytearray, superblock: erofs.Superblock) -> None:
    """Make the data device's blocks the primary device's own."""
    device = superblock.device
    assert device is not None  # _data_offset has refused it
    move_to_primary(metadata, superblock.root_nid, device)
    whole = replace(superblock, device=None, blocks=device.mapped_block + device.blocks)
    metadata[erofs.SUPERBLOCK_OFFSET : erofs.METADATA_OFFSET] = whole.pack()
    erofs.seal(metadata)


def _data_ranges(image: BlockImage) -> Iterator[tuple[int, int]]:
    """Start and end of each range that is not a hole, none longer than the window."""
    for window in range(0, image.size_bytes, _WINDOW_BYTES):
        begin = position = window
        for piece in image.pieces(window, _WINDOW_BYTES):
            if piece.chunk is None:
                if begin < position:
                    yield begin, position
                begin = position + piece.length
            position += piece.length
        if begin < position:
            yield begin, position
