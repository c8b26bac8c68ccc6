"""The small tables of a store, in its bucket and mirrored here: names, layer memos, profiles, origins.

The table `mirrored` of the index says which version of what is here:

    key "n", letter of the kind, BLAKE3 of the name     value JSON [name, last part of the version's key]
    key "e", key of an object                           value its ETag
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from blake3 import blake3

from imaged.chunkstore.environment import NAMES, Txn
from imaged.chunkstore.index import Index
from imaged.errors import FormatError, NameMovedError, ObjectMissingError
from imaged.flock import alone
from imaged.ids import ChunkId
from imaged.s3.names import (
    Document,
    Keep,
    Names,
    Version,
    current,
    directory,
    parse_document,
    parse_key,
)
from imaged.s3.objects import Entry, Objects, is_there
from imaged.slices import slices

KINDS = {"refs": "images", "snapshots": "snapshots"}
"""Tables of names, and how they are called in keys."""
_TABLES = {kind: table for table, kind in KINDS.items()}
BLOBS = ("profiles", "origins")
"""Tables of an id and some bytes; the last writer wins."""
MEMOS = "memos/"
_MIRRORED = "mirrored"
_UNKNOWN_TAG = b"?"
_LOCKS = 16
_THREADS = 8
_SLICE = 64
"""So many profiles or origins are in memory at once."""
log = logging.getLogger(__name__)


Guard = Callable[[str, Document | None], None]


class _Name(NamedTuple):
    kind: str
    name: str

    @property
    def table(self) -> str:
        return _TABLES[self.kind]

    @property
    def key(self) -> bytes:
        return b"n" + self.kind[:1].encode() + blake3(self.name.encode()).digest()


class SharedTables:
    """Of one store. Threads share it. `guard` is called before and after a name changes, with its table and what it
    is to stand for: it raises when it may not."""

    def __init__(self, root: Path, index: Index, objects: Objects, guard: Guard, settle_s: float | None) -> None:
        self._root, self._index, self._objects, self._guard = root, index, objects, guard
        self.names = Names(objects, settle_s=settle_s)

    # Names

    @contextmanager
    def transaction(self, table: str, what: str) -> Iterator[Txn]:
        """A change of names in the index, which becomes true in the bucket first.

        NameMovedError when the bucket has another version than the block went by; nothing has changed then.
        """
        changes: dict[str, tuple[bytes | None, bytes | None]] = {}
        with self._index.write(what) as txn:
            before = dict(self._index.rows(table, txn=txn))
            try:
                yield txn
                after = dict(self._index.rows(table, txn=txn))
            finally:
                txn.abort()
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key):
                changes[key.decode()] = (before.get(key), after.get(key))
        for name, (held, wanted) in sorted(changes.items()):
            self._change(_Name(KINDS[table], name), held, wanted)

    def _change(self, name: _Name, held: bytes | None, wanted: bytes | None) -> None:
        expected, document = _document(held), _document(wanted)

        def decide(found: Document | None) -> Document | None:
            if found == document:
                raise Keep
            if found != expected:
                raise NameMovedError(f"name {name.name}: it was changed by another server", hint="try again")
            return document

        self._guard(name.table, document)
        with self._claiming(name):
            known = self._version(name)
            try:
                now = self.names.change(name.kind, name.name, decide)
            except NameMovedError:
                self.look(name.table, name.name)
                raise
            self.names.tell()
            self._mirror({name: (now.version, now.document)}, {name: known})
        self._guard(name.table, document)

    def _version(self, name: _Name) -> str:
        raw = self._index.get(_MIRRORED, name.key)
        return "" if raw is None else str(json.loads(raw)[1])

    @contextmanager
    def _claiming(self, name: _Name) -> Iterator[None]:
        """One process of this host at a time: claims of several would only be in each other's way."""
        number = int.from_bytes(blake3(name.key).digest(2), "big") % _LOCKS
        with alone(self._root / f"claim-{number}.lock"):
            yield

    def look(self, table: str, name: str) -> None:
        """Have one name here as the bucket has it now."""
        wanted = _Name(KINDS[table], name)
        entries = self._objects.list(directory(wanted.kind, name))
        self._apply({wanted: current(_versions(entries))} if entries else {wanted: None})

    def sync_names(self, *, whole: bool) -> None:
        """Have all names here as the bucket has them; without `whole` as far as others have told of their changes."""
        with self.names.all(whole=whole) as entries:
            if entries is not None:
                self._apply_all(entries)

    def _apply_all(self, entries: Iterable[Entry]) -> None:
        listed: dict[_Name, list[Version]] = {}
        for entry in entries:
            found = parse_key(entry.key)
            if found is not None and found[0] in _TABLES:
                listed.setdefault(_Name(found[0], found[1]), []).append(found[2])
        wanted = {name: current(versions) for name, versions in listed.items()}
        for name in self._known():
            wanted.setdefault(name, None)
        self._apply(wanted)

    def _known(self) -> Mapping[_Name, str]:
        found = {}
        letters = {kind[:1]: kind for kind in _TABLES}
        for key, value in self._index.rows(_MIRRORED):
            if key[:1] == b"n":
                name, version = json.loads(value)
                found[_Name(letters[key[1:2].decode()], name)] = version
        return found

    def _apply(self, wanted: Mapping[_Name, Version | None]) -> None:
        known = self._known()
        changed = {
            name: version
            for name, version in wanted.items()
            if known.get(name, "") != ("" if version is None else version.key)
        }
        if not changed:
            return

        def fetch(item: tuple[_Name, Version | None]) -> tuple[_Name, tuple[str, Document | None] | None]:
            name, version = item
            place = directory(name.kind, name.name)
            held = known.get(name, "")
            try:
                if held and (version is None or version.key < held) and is_there(self._objects, place + held):
                    return name, None  # the listing is older than what is here
                found = self.names.read(place, version)
            except ObjectMissingError:
                return name, None  # superseded meanwhile: the next look finds what counts
            except FormatError as error:
                log.error("name %s: %s", name.name, error.message)
                return name, None
            return name, (found.version, found.document)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3-names") as pool:
            read = dict(pool.map(fetch, changed.items()))
        self._mirror({name: found for name, found in read.items() if found is not None}, known)

    def _mirror(self, found: Mapping[_Name, tuple[str, Document | None]], known: Mapping[_Name, str]) -> None:
        """`known` is what was here before the caller looked."""
        if not found:
            return
        with self._index.write("mirror names") as txn:
            for name, (version, document) in found.items():
                raw = self._index.get(_MIRRORED, name.key, txn=txn)
                held = "" if raw is None else str(json.loads(raw)[1])
                if held > version and held != known.get(name, ""):
                    continue  # somebody else had a later look
                row = name.name.encode()
                if document is None:
                    self._index.delete(txn, name.table, row)
                else:
                    self._index.put(txn, name.table, row, json.dumps(document, sort_keys=True).encode())
                if version:
                    self._index.put(txn, _MIRRORED, name.key, json.dumps([name.name, version]).encode())
                else:
                    self._index.delete(txn, _MIRRORED, name.key)
            self._index.bump(txn, NAMES)

    # Memos: the key of the object says all. Profiles and origins: the last writer wins.

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """A row of memos, profiles or origins, in the bucket. BucketUnavailableError, BucketError."""
        if table == "memos":
            self._objects.put(memo_key(key.decode(), ChunkId(value)), b"")
            return
        name = f"{table}/{key.hex()}"
        self._objects.put(name, value)
        with self._index.write("note what is mirrored") as txn:  # so that its removal by others is noticed
            self._index.put(txn, _MIRRORED, b"e" + name.encode(), _UNKNOWN_TAG)

    def drop(self, table: str, key: bytes) -> None:
        """As `put`; nothing happens when it is not there."""
        if table != "memos":
            self._objects.delete(f"{table}/{key.hex()}")
            return
        for entry in self._objects.list(f"{MEMOS}{quote(key.decode(), safe='')}/"):
            self._objects.delete(entry.key)

    def drop_memos(self) -> None:
        """All of them: one may promise what is damaged."""
        for entry in self._objects.list(MEMOS):
            self._objects.delete(entry.key)

    def listed_memos(self) -> dict[str, ChunkId]:
        found = {}
        for entry in self._objects.list(MEMOS):
            parts = entry.key.split("/")
            if len(parts) == 3 and ChunkId.is_id(parts[2]):
                found[unquote(parts[1])] = ChunkId.parse(parts[2])
        return found

    def sync_memos(self) -> None:
        """Those of the bucket, no others, as far as they are known here. A collection removes one before its chunks."""
        listed = self.listed_memos()
        held = {key.decode(): ChunkId(value) for key, value in self._index.rows("memos")}
        fresh = {diff_id: layer for diff_id, layer in listed.items() if held.get(diff_id) != layer}
        fresh = {diff_id: layer for diff_id, layer in fresh.items() if self._index.find(layer) is not None}
        stale = held.keys() - listed.keys()
        if fresh or stale:
            with self._index.write("mirror layer memos") as txn:
                for diff_id in stale:
                    self._index.delete(txn, "memos", diff_id.encode())
                for diff_id, layer in fresh.items():
                    self._index.put(txn, "memos", diff_id.encode(), layer)
                self._index.bump(txn, NAMES)

    def sync_blobs(self) -> None:
        for table in BLOBS:
            self._sync_blobs(table, {entry.key: entry for entry in self._objects.list(f"{table}/")})

    def _sync_blobs(self, table: str, listed: Mapping[str, Entry]) -> None:
        mark = f"e{table}/".encode()
        held = {key[1:].decode(): tag.decode() for key, tag in self._index.range(_MIRRORED, mark, mark)}
        changed = [key for key, entry in listed.items() if held.get(key) != entry.etag and _blob_id(key) is not None]
        gone = held.keys() - listed.keys()
        if changed:
            self._fetch_blobs(table, changed, listed)
        if not gone:
            return
        with self._index.write(f"mirror {table}") as txn:
            for key in gone:
                chunk = _blob_id(key)
                if chunk is not None:
                    self._index.delete(txn, table, chunk)
                self._index.delete(txn, _MIRRORED, b"e" + key.encode())

    def _fetch_blobs(self, table: str, keys: Iterable[str], listed: Mapping[str, Entry]) -> None:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="s3-blobs") as pool:
            for some in slices(keys, _SLICE):
                found = list(pool.map(self._fetch_blob, some))
                with self._index.write(f"mirror {table}") as txn:
                    for key, value in found:
                        chunk = _blob_id(key)
                        if chunk is not None and value is not None:
                            self._index.put(txn, table, chunk, value)
                            self._index.put(txn, _MIRRORED, b"e" + key.encode(), listed[key].etag.encode())

    def _fetch_blob(self, key: str) -> tuple[str, bytes | None]:
        try:
            return key, self._objects.get(key)
        except ObjectMissingError:
            return key, None


def memo_key(diff_id: str, layer: ChunkId) -> str:
    return f"{MEMOS}{quote(diff_id, safe='')}/{layer}"


def _blob_id(key: str) -> ChunkId | None:
    text = key.rpartition("/")[2]
    return ChunkId.parse(text) if ChunkId.is_id(text) else None


def _document(raw: bytes | None) -> Document | None:
    return None if raw is None else parse_document(b'{"value": ' + raw + b"}", "a name")


def _versions(entries: list[Entry]) -> list[Version]:
    return [found[2] for entry in entries if (found := parse_key(entry.key)) is not None]
