"""Brings sealed packs of this host into the bucket: the pack, then its table of contents, which makes it count."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PACK_HEADER_BYTES, PackWriter, pack_path
from imaged.chunkstore.rows import FOREIGN_PACKS, Location, PackRow
from imaged.errors import ChunkCorruptError, FormatError, StoreError
from imaged.faults import store_faults
from imaged.frame import HEADER_BYTES, Frame, FrameHeader
from imaged.s3 import packindex
from imaged.s3.objects import Objects
from imaged.s3.packindex import Row
from imaged.s3.packtable import REMOTE, UPLOADING, PackTable, index_key, new_id, pack_key

_AT_ONCE = 2
_POLL_S = 0.05
_WAIT_S = 600.0
log = logging.getLogger(__name__)


class Uploads:
    """Of one process. Threads share it; processes of a host too, by the locks of the packs."""

    def __init__(self, root: Path, index: Index, objects: Objects, packs: PackTable) -> None:
        self._root, self._index, self._objects, self._packs = root, index, objects, packs
        self._lock = threading.Lock()

    def waiting(self) -> list[int]:
        """Packs with chunks that are not in the bucket: sealed ones, and others that no process writes any more."""
        found = []
        for number, row in self._index.packs().items():
            if number >= FOREIGN_PACKS or row.committed_bytes <= PACK_HEADER_BYTES or self._packs.is_safe(number):
                continue
            if row.sealed or self._is_left(number):
                found.append(number)
        return found

    def _is_left(self, number: int) -> bool:
        pack = PackWriter.lock(self._root, number)
        if pack is not None:
            pack.close()
        return pack is not None

    def run(self) -> int:
        """Upload all that wait; how many this process did. Returns when those that were sealed before are in the
        bucket, whoever brings them there. BucketUnavailableError and other StoreErrors; what was done stays done."""
        with self._lock:
            waiting = self.waiting()
            if len(waiting) < 2:
                return sum(self._bring(number) for number in waiting)
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="s3-upload") as pool:
                return sum(pool.map(self._bring, waiting))

    def _bring(self, number: int) -> bool:
        """Upload one pack, or wait for who does."""
        deadline = time.monotonic() + _WAIT_S
        while not self._packs.is_safe(number):
            pack = PackWriter.lock(self._root, number)
            if pack is not None:
                with closing(pack):
                    row = self._index.pack(number)
                    if self._packs.is_safe(number) or row is None:
                        return False
                    return self._upload(number, row, pack)
            if not pack_path(self._root, number).exists():
                log.error("pack %d was never uploaded, and its file is gone", number)
                return False
            if time.monotonic() > deadline:
                raise StoreError(f"pack {number} was not uploaded by the process that holds it", hint="try again")
            time.sleep(_POLL_S)
        return False

    def _upload(self, number: int, row: PackRow, pack: PackWriter) -> bool:
        if not row.sealed:  # its writer was killed
            pack.cut(row.committed_bytes)
            self._index.commit([], {number: (row.committed_bytes, True)})
        path = pack_path(self._root, number)
        known = self._packs.find(number)
        # The same objects again after a kill, not a second copy of them.
        name = known.id if known is not None else new_id()
        if known is None:
            self._packs.set(number, name, UPLOADING)
        rows = self._rows(path, number, row.committed_bytes)
        contents = packindex.pack(row.committed_bytes, rows)
        if rows:
            self._objects.upload(pack_key(name), path, row.committed_bytes)
            self._packs.keep_contents(name, contents)
            self._objects.put(index_key(name), contents)
        self._packs.set(number, name, REMOTE)
        log.info("pack %d: %d chunks, %d bytes uploaded as %s", number, len(rows), row.committed_bytes, name)
        return True

    def _rows(self, path: Path, number: int, length: int) -> list[Row]:
        """Every frame that verifies: the last look at them before others rely on them. What the index has of the pack
        besides is dropped, wherever the damage is: it would count as in the bucket, and nobody would put it again."""
        rows: list[Row] = []
        is_sound = True
        with store_faults("read a pack for its upload", self._root), path.open("rb") as file:
            offset = PACK_HEADER_BYTES
            while offset < length:
                try:
                    header = FrameHeader.parse(os.pread(file.fileno(), HEADER_BYTES, offset))
                except FormatError as error:
                    log.error("pack %d at %d: the rest is not uploaded: %s", number, offset, error.message)
                    is_sound = False
                    break
                payload = os.pread(file.fileno(), header.payload_bytes, offset + HEADER_BYTES)
                row = Row(header.id, offset, header.size_bytes, header.payload_bytes, header.codec)
                offset = row.end
                try:
                    if len(payload) != header.payload_bytes:
                        raise FormatError("frame", expected=f"{header.payload_bytes} bytes", found=f"{len(payload)}")
                    Frame(header, payload).open()
                except (FormatError, ChunkCorruptError) as error:
                    log.error("pack %d at %d: not uploaded: %s", number, row.offset, error.message)
                    is_sound = False
                    continue
                rows.append(row)
        if not is_sound:
            self._drop_others(number, rows)
        return rows

    def _drop_others(self, number: int, rows: Iterable[Row]) -> None:
        verified = {(row.chunk, Location(number, *row[1:])) for row in rows}
        lost = [one for one in self._index.chunks() if one[1].pack == number and one not in verified]
        self._index.drop(lost, forget_memos=True)
        log.error("pack %d: %d chunks are lost", number, len(lost))
