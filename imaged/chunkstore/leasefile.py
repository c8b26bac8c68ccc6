"""Files of leases: made, appended to, locked and read (docs/formats/lease.md has what is in them)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Collection
from pathlib import Path

from imaged.chunkstore.leaseformat import KEPT_TEXT_BYTES, LeaseState, parse
from imaged.chunkstore.pack import FALLOC_KEEP_SIZE, fallocate
from imaged.errors import FormatError
from imaged.faults import store_faults
from imaged.ids import ChunkId
from imaged.publish import sync_directory

LEASES_DIRECTORY = "leases"
LONGEST_TTL_S = 24 * 3600.0
LONG_BYTES = 64 << 10
_RESERVED_BYTES = 256 << 10
log = logging.getLogger(__name__)


def create(root: Path, first: bytes, *, durable: bool = False) -> tuple[Path, int]:
    """A new file in this store, locked, with its first line in it from the moment it is there. StoreError."""
    directory = root / LEASES_DIRECTORY
    with store_faults("make a lease", root):
        directory.mkdir(mode=0o700, exist_ok=True)
        while True:
            path = directory / secrets.token_hex(16)
            hidden = directory / f".{path.name}"
            fd = os.open(hidden, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                append(fd, first)
                if durable:
                    os.fsync(fd)
                hidden.rename(path)
                if durable:
                    sync_directory(directory)
                return path, fd
            except FileNotFoundError:
                os.close(fd)  # who looked at the leases found it before it was locked
            except BaseException:
                hidden.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                os.close(fd)
                raise


def append(fd: int, line: bytes) -> None:
    """In one write: who reads meanwhile sees all of it or takes no notice of it. OSError."""
    end = os.fstat(fd).st_size
    try:
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, end)
        raise


def is_long(size_bytes: int, keeps: Collection[ChunkId]) -> bool:
    """Whether a file of this size says little but what is over."""
    return size_bytes > LONG_BYTES + 2 * len(keeps) * KEPT_TEXT_BYTES


def reserve(fd: int) -> None:
    """Room for what will be kept: a full disk must not be why something that is used goes unnoticed."""
    try:
        fallocate(fd, FALLOC_KEEP_SIZE, 0, _RESERVED_BYTES)
    except OSError as error:
        log.info("no room is reserved for a lease: %s", error.strerror)


def peek(name: str, fd: int) -> LeaseState:
    """As `read`; what can not be read counts as a lease that holds back everything, and ends at the latest when the
    longest one would."""
    try:
        return read(name, fd)
    except FormatError as error:
        log.warning("%s", error.message)
        expires_at = os.fstat(fd).st_mtime + LONGEST_TTL_S
        return LeaseState(id=name, holder="unknown", epoch=0, keeps=frozenset(), expires_at=expires_at)


def read(name: str, fd: int) -> LeaseState:
    """FormatError."""
    raw = bytearray()
    while data := os.pread(fd, 1 << 20, len(raw)):
        raw += data
    return parse(name, bytes(raw))
