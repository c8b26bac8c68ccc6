"""Which local pack is which object: the table `remotes` of the index, and the tables of contents beside it.

    key     number of the pack, 4 bytes big endian; those of other servers count from FOREIGN_PACKS
    value   state ("u" is being uploaded, "i" being imported, "r" is in the bucket and in the index), id of the object

A pack counts as safe when it is in the bucket: what only this host has, no other server may be told to rely on.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from imaged.chunkstore.index import Index
from imaged.chunkstore.rows import FOREIGN_PACKS, Location
from imaged.errors import FormatError
from imaged.faults import store_faults
from imaged.ids import ChunkId
from imaged.publish import published
from imaged.s3 import packindex
from imaged.s3.packindex import PackIndex

UPLOADING, IMPORTING, REMOTE = b"u", b"i", b"r"
PACKS = "packs/"
INDEXES_DIRECTORY = "indexes"
_TABLE = "remotes"
_FOREIGN_COUNTER = b"foreign_packs"
_FORGOTTEN_COUNTER = b"forgotten_packs"
_NUMBER = struct.Struct(">I")
_AGE_DIGITS = 10


class RemotePack(NamedTuple):
    """`id` names the objects packs/ID.pack and packs/ID.idx."""

    number: int
    id: str
    state: bytes


def new_id() -> str:
    """Begins with the time, so that a listing from about now on has the newest."""
    return f"{int(time.time()):0{_AGE_DIGITS}x}{secrets.token_hex(8)}"


def id_before(seconds: float) -> str:
    """Less than every id that was made since then."""
    return f"{max(int(seconds), 0):0{_AGE_DIGITS}x}"


def pack_key(pack: str) -> str:
    return f"{PACKS}{pack}.pack"


def index_key(pack: str) -> str:
    return f"{PACKS}{pack}.idx"


class PackTable:
    """Threads share it, and so do processes: what others changed is looked up again when a pack is not known."""

    def __init__(self, root: Path, index: Index) -> None:
        self._root, self._index = root, index
        self._lock = threading.Lock()
        self._known: dict[int, RemotePack] = {}

    def find(self, number: int) -> RemotePack | None:
        """None for a pack that only this host has."""
        found = self._known.get(number)
        if found is None or found.state != REMOTE:
            raw = self._index.get(_TABLE, _NUMBER.pack(number))
            if raw is None:
                return None
            found = _parse(number, raw)
            with self._lock:
                self._known[number] = found
        return found

    def is_safe(self, number: int) -> bool:
        """Whether the pack is in the bucket, and counts there."""
        found = self._known.get(number) or self.find(number)
        return found is not None and (found.state == REMOTE or self._is_now(number))

    def _is_now(self, number: int) -> bool:
        found = self.find(number)
        return found is not None and found.state == REMOTE

    def all(self) -> list[RemotePack]:
        return [_parse(_NUMBER.unpack(key)[0], raw) for key, raw in self._index.rows(_TABLE)]

    def set(self, number: int, pack: str, state: bytes) -> None:
        with self._index.write("note where a pack is") as txn:
            self._index.put(txn, _TABLE, _NUMBER.pack(number), state + pack.encode())

    def set_all(self, packs: Iterable[RemotePack], state: bytes) -> None:
        with self._index.write("note where packs are") as txn:
            for pack in packs:
                self._index.put(txn, _TABLE, _NUMBER.pack(pack.number), state + pack.id.encode())

    def import_new(self, packs: Iterable[str]) -> list[RemotePack]:
        """Numbers for packs of other servers, durable, before anything of them is in the index."""
        found = []
        with self._index.write("note packs of other servers") as txn:
            for pack in packs:
                number = FOREIGN_PACKS + self._index.bump(txn, _FOREIGN_COUNTER)
                self._index.put(txn, _TABLE, _NUMBER.pack(number), IMPORTING + pack.encode())
                found.append(RemotePack(number, pack, IMPORTING))
        return found

    def forget(self, number: int) -> None:
        """The pack is gone from the bucket and from the index."""
        with self._index.write("forget a pack") as txn:
            self._index.delete(txn, _TABLE, _NUMBER.pack(number))
            self._index.bump(txn, _FORGOTTEN_COUNTER)
        with self._lock:
            self._known.pop(number, None)

    def forgotten(self) -> int:
        """Another number after each `forget`: what was listed before may name a pack that is forgotten."""
        return self._index.counter(_FORGOTTEN_COUNTER)

    # Tables of contents, kept so that nobody has to ask for one twice

    def contents(self, pack: str) -> PackIndex | None:
        """None when it is not kept here, or damaged."""
        try:
            return packindex.parse(self._contents_path(pack).read_bytes())
        except (FileNotFoundError, FormatError):
            return None

    def keep_contents(self, pack: str, raw: bytes) -> None:
        with store_faults("keep the contents of a pack", self._root):
            (self._root / INDEXES_DIRECTORY).mkdir(exist_ok=True)
            with published(self._contents_path(pack)) as file:
                file.write(raw)

    def drop_contents(self, pack: str) -> None:
        self._contents_path(pack).unlink(missing_ok=True)

    def _contents_path(self, pack: str) -> Path:
        return self._root / INDEXES_DIRECTORY / f"{pack}.idx"


def locations(number: int, contents: PackIndex) -> list[tuple[ChunkId, Location]]:
    """Where the chunks of a pack are, as the index has it."""
    return [
        (row.chunk, Location(number, row.offset, row.size_bytes, row.payload_bytes, row.codec)) for row in contents.rows
    ]


def _parse(number: int, raw: bytes) -> RemotePack:
    return RemotePack(number, raw[1:].decode(), raw[:1])
