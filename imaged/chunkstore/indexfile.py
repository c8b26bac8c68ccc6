"""The files of an LMDB index, before LMDB opens them: what it would die of, or quietly take for empty."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

from imaged.chunkstore.pack import PACK_HEADER_BYTES, pack_numbers, pack_path
from imaged.errors import StoreError
from imaged.faults import REBUILD_HINT

MAX_READERS = 1024
_LOCK_FILE_BYTES = 4096 + 64 * MAX_READERS
LOCK_SUFFIX = "-lock"
_META = struct.Struct("<16xI20xI92xQQ")
"""Of LMDB's meta page: magic, page size, number of the last page, transaction."""
_META_MAGIC = 0xBEEFC0DE
_META_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
log = logging.getLogger(__name__)


def allocate_lock_file(path: Path) -> None:
    """LMDB makes its lock file sparse and writes to it through a mapping: on a full disk that ends us with SIGBUS."""
    fd = os.open(f"{path}{LOCK_SUFFIX}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)


def refuse_lost_index(root: Path) -> None:
    """StoreError when there are full packs: an empty index would let the next writer cut them away."""
    full = sum(1 for number in pack_numbers(root) if pack_path(root, number).stat().st_size > PACK_HEADER_BYTES)
    if full:
        raise StoreError(f"store {root}: the index is gone, {full} packs with chunks are there", hint=REBUILD_HINT)


def refuse_truncated(path: Path) -> None:
    """StoreError when the file ends before pages that count.

    LMDB does not write pages that one transaction took and gave back, so that a sound index may be short as well: only
    reading all of it, in a process that may die of it, tells.
    """
    try:
        with path.open("rb") as file:
            expected = _pages_bytes(file.read(2 * _META_PAGE_BYTES))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return
    if size >= expected:
        return
    from imaged.chunkstore.salvage import salvage  # it opens indexes itself

    try:
        salvage(path)
    except StoreError as error:
        message = f"store {path.parent}: the index is truncated: {size} bytes, its pages take {expected}"
        raise StoreError(message, hint=REBUILD_HINT) from error
    try:
        # Spare the next ones the reading. This never shortens a file that grows meanwhile.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, expected - 1, 1)
        finally:
            os.close(fd)
    except OSError as error:
        log.info("index %s stays short: %s", path, error.strerror)


def _pages_bytes(head: bytes) -> int:
    """What all pages take by the newer of LMDB's two meta pages; 0 when there is none, which LMDB itself refuses."""
    newest = (-1, 0)
    for start in (0, _META_PAGE_BYTES):
        if len(head) < start + _META.size:
            break
        magic, page_bytes, last_page, transaction = _META.unpack_from(head, start)
        if magic == _META_MAGIC:
            newest = max(newest, (transaction, (last_page + 1) * page_bytes))
    return newest[1]
