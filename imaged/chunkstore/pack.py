"""Pack files: append-only files of frames, named by a number; see docs/formats/pack.md.

    offset  size  field
         0     4  magic "pvP1"
         4     4  number of this pack, little endian
         8     8  zero
        16     -  frames (imaged/frame.py), one after another

A pack alone says nothing about which of its frames count: the index does, and what lies past the index's committed
length is the torn tail of a process that was killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imaged.chunkstore.storelock import holders
from imaged.errors import ChunkCorruptError, FormatError
from imaged.flock import try_lock
from imaged.frame import HEADER_BYTES, MAGIC, Frame, FrameHeader
from imaged.publish import sync_directory

PACK_HEADER = struct.Struct("<4sI8s")
PACK_HEADER_BYTES = PACK_HEADER.size
PACK_MAGIC = b"pvP1"
PACK_LIMIT_BYTES = 256 << 20
"""A pack this long is sealed and never written again."""
PACKS_DIRECTORY = "packs"
_SUFFIX = ".pack"
_OPEN_FILES = 128
_SCAN_BYTES = 1 << 20
PUNCH_BYTES = 4096
"""Holes are whole blocks of this size."""
_STAT_BLOCK_BYTES = 512
FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_WRITE = 2


def pack_path(root: Path, number: int) -> Path:
    return root / PACKS_DIRECTORY / f"{number:08d}{_SUFFIX}"


def pack_numbers(root: Path) -> list[int]:
    """The packs that are there as files, in order."""
    try:
        names = [path.name for path in (root / PACKS_DIRECTORY).iterdir()]
    except FileNotFoundError:
        return []
    stems = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def pack_bytes(root: Path, number: int) -> int:
    """The length of a pack's file; 0 when it is gone."""
    try:
        return pack_path(root, number).stat().st_size
    except FileNotFoundError:
        return 0


def disk_bytes(root: Path, number: int) -> int:
    """What a pack takes on disk: its length without the holes that `PackWriter.punch` made; 0 when it is gone."""
    try:
        status = pack_path(root, number).stat()
    except FileNotFoundError:
        return 0
    # Some file systems count no blocks at all.
    return min(status.st_size, status.st_blocks * _STAT_BLOCK_BYTES or status.st_size)


def is_written(root: Path, number: int) -> bool:
    """Whether some writer holds a pack, as /proc/locks says: trying its lock would be in the way of the next writer."""
    try:
        return bool(holders(pack_path(root, number).stat()))
    except FileNotFoundError:
        return False


class PackWriter:
    """One pack open for appending, flocked so that no other writer has it. Not for sharing between threads.

    `length` is the end of the last whole frame: a write that fails leaves the file at that length.
    """

    def __init__(self, number: int, fd: int, length: int) -> None:
        self.number, self.length = number, length
        self._fd, self._begun = fd, length

    @classmethod
    def create(cls, root: Path, number: int) -> PackWriter | None:
        """A new pack, its header and name durable; None when the number is taken."""
        path = pack_path(root, number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        try:
            if not try_lock(fd):
                os.close(fd)
                return None
            _write_at(fd, [PACK_HEADER.pack(PACK_MAGIC, number, bytes(8))], 0)
            os.fsync(fd)
            sync_directory(path.parent)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(number, fd, PACK_HEADER_BYTES)

    @classmethod
    def lock(cls, root: Path, number: int) -> PackWriter | None:
        """An existing pack, flocked but not yet cut (see `cut`); None when another writer has it or it is gone."""
        try:
            fd = os.open(pack_path(root, number), os.O_RDWR)
        except FileNotFoundError:
            return None
        if not try_lock(fd):
            os.close(fd)
            return None
        return cls(number, fd, os.fstat(fd).st_size)

    def cut(self, length: int) -> None:
        """Drop the torn tail past `length`."""
        if self.length > length:
            os.ftruncate(self._fd, length)
            self.length = length

    def append(self, frames: Sequence[Frame]) -> list[int]:
        """The offsets at which these frames now lie. OSError when they do not fit; the pack is then as before.

        In one write: the page cache then holds them in large pieces, and who sends them takes a fifth less time.
        """
        start = end = self.length
        parts: list[bytes] = []
        offsets: list[int] = []
        for frame in frames:
            offsets.append(end)
            parts += (frame.header.pack(), frame.payload)
            end += frame.stored_bytes
        try:
            _write_at(self._fd, parts if len(frames) == 1 else [b"".join(parts)], start)
        except OSError:
            os.ftruncate(self._fd, start)
            raise
        self.length = end
        return offsets

    def punch(self, start: int, end: int) -> None:
        """Give the whole file system blocks between two offsets back; they read as zeros. For dead frames."""
        punch(self._fd, start, end)

    def empty(self) -> None:
        """Give all of it back, also what readers still have open."""
        os.ftruncate(self._fd, 0)
        self.length = 0

    def begin_sync(self) -> None:
        """Have the disk begin to write what was appended; `sync` then waits for less. It promises nothing."""
        begun, self._begun = self._begun, self.length
        if self.length > begun:
            _libc.sync_file_range(self._fd, begun, self.length - begun, _SYNC_WRITE)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def punch(fd: int, start: int, end: int) -> None:
    """As `PackWriter.punch`, of any file that is open for writing. OSError."""
    first, last = -(-start // PUNCH_BYTES) * PUNCH_BYTES, end // PUNCH_BYTES * PUNCH_BYTES
    if first < last:
        try:
            fallocate(fd, FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, first, last - first)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). OSError."""
    if _libc.fallocate(fd, mode, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write_at(fd: int, buffers: list[bytes], offset: int) -> None:
    done = os.pwritev(fd, buffers, offset)
    total = sum(map(len, buffers))
    if done == total:
        return
    # A short write: the disk is filling up. Go on until the kernel says why.
    rest = memoryview(b"".join(buffers))
    while done < total:
        done += os.pwrite(fd, rest[done:], offset + done)


class PackFile:
    """A descriptor that closes with its last user, so that eviction never closes it under a reader."""

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class PackReader:
    """Reads frames from the packs of one store; keeps recently used files open. Threads may share it."""

    def __init__(self, root: Path, *, open_files: int = _OPEN_FILES) -> None:
        self._root, self._open_files = root, open_files
        self._files: OrderedDict[int, PackFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, number: int, offset: int, length: int) -> bytes:
        """Bytes of a pack; shorter at its end. OSError."""
        file = self.file(number)
        data = os.pread(file.fd, length, offset)
        while 0 < len(data) < length and (more := os.pread(file.fd, length - len(data), offset + len(data))):
            data += more
        return data

    def read_cached(self, number: int, offset: int, length: int) -> bytes | None:
        """As `read`, from the page cache alone: None when that would have to wait for the disk, or fails."""
        buffer = bytearray(length)
        try:
            done = os.preadv(self.file(number).fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError:
            return None
        return bytes(buffer) if done == length else None

    def file(self, number: int) -> PackFile:
        """The file of a pack, open for as long as somebody has it. OSError."""
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = PackFile(pack_path(self._root, number))
                if len(self._files) > self._open_files:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(number)
        return file

    def forget(self, number: int) -> None:
        """Close the file of a pack that is about to be removed."""
        with self._lock:
            self._files.pop(number, None)

    def close(self) -> None:
        with self._lock:
            self._files.clear()


@dataclass(frozen=True, slots=True)
class Scanned:
    """What `scan` met at `offset`: a verified frame, or (`frame` None) `length` bytes that hold none, and why.

    `punched` says that among them is a whole block of zeros: dead frames that `PackWriter.punch` gave back.
    """

    offset: int
    length: int
    frame: Frame | None
    problem: str = ""
    punched: bool = False


def scan(path: Path) -> Iterator[Scanned]:
    """Every verified frame of a pack file, whatever the index says, and the ranges that hold none.

    After bad bytes it goes on at the next frame magic; a frame counts only when its bytes match its id, so chance or
    hostile magics inside payloads can not be taken for frames that were written there.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(PACK_HEADER_BYTES)
        if len(header) < PACK_HEADER_BYTES or not header.startswith(PACK_MAGIC):
            yield Scanned(0, len(header), None, f"pack header: expected magic {PACK_MAGIC!r}, found {header[:4]!r}")
        offset = PACK_HEADER_BYTES
        while offset < size:
            frame, problem = _frame_at(file.fileno(), offset)
            if frame is not None:
                yield Scanned(offset, frame.stored_bytes, frame)
                offset += frame.stored_bytes
                continue
            following = _next_frame(file.fileno(), offset + 1, size)
            punched = _has_zero_block(file.fileno(), offset, following)
            yield Scanned(offset, following - offset, None, problem, punched)
            offset = following


def _frame_at(fd: int, offset: int) -> tuple[Frame | None, str]:
    try:
        header = FrameHeader.parse(os.pread(fd, HEADER_BYTES, offset))
        payload = os.pread(fd, header.payload_bytes, offset + HEADER_BYTES)
        if len(payload) != header.payload_bytes:
            return None, f"frame of {header.payload_bytes} payload bytes ends after {len(payload)}"
        frame = Frame(header, payload)
        frame.open()
    except (FormatError, ChunkCorruptError) as error:
        return None, error.message
    return frame, ""


def _next_frame(fd: int, offset: int, size: int) -> int:
    """Where the next verified frame begins, or `size`."""
    while offset < size:
        window = os.pread(fd, _SCAN_BYTES, offset)
        found = window.find(MAGIC)
        while found >= 0:
            if _frame_at(fd, offset + found)[0] is not None:
                return offset + found
            found = window.find(MAGIC, found + 1)
        if len(window) < _SCAN_BYTES:
            return size
        offset += len(window) - len(MAGIC) + 1
    return size


def _has_zero_block(fd: int, start: int, end: int) -> bool:
    zeros = bytes(PUNCH_BYTES)
    first = -(-start // PUNCH_BYTES) * PUNCH_BYTES
    return any(os.pread(fd, PUNCH_BYTES, at) == zeros for at in range(first, end - PUNCH_BYTES + 1, PUNCH_BYTES))
