"""The small tables of a store: refs (names), layer memos, origins of pulled block images, startup profiles, fills."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from imaged.chunkstore.environment import NAMES, Txn
from imaged.chunkstore.index import Index
from imaged.chunkstore.nametable import NameTable, named, row_key
from imaged.errors import FormatError
from imaged.ids import ChunkId
from imaged.profile import Profile
from imaged.signature import Signature, added

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """What a name stands for: the id of an image record, and how it came here.

    `created_at` is in Unix seconds, `source` the text it was converted or pulled from, `origin` the server that can
    give chunks which are not here ("" when all are). `chunks` and `stored_bytes` are of the whole image. `signatures`
    are of this name and this image, as whoever published it says.
    """

    record: ChunkId
    created_at: int
    source: str
    origin: str
    chunks: int
    stored_bytes: int
    signatures: tuple[Signature, ...] = ()

    def to_json(self) -> dict[str, Any]:
        signatures = [signature.to_json() for signature in self.signatures]
        return {**asdict(self), "record": str(self.record), "signatures": signatures}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """FormatError when a field is missing or of another type."""
        if not isinstance(document, dict):
            raise FormatError("ref", expected="a JSON object", found=type(document).__name__)
        values: dict[str, Any] = {}
        for key, kind in _FIELDS.items():
            value = document.get(key)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise FormatError(f"ref, field {key}", expected=kind.__name__, found=repr(value)[:80])
            values[key] = value
        signatures = Signature.parse_all(document.get("signatures", []))  # older versions wrote none
        return cls(**{**values, "record": ChunkId.parse(values["record"]), "signatures": signatures})


_FIELDS: dict[str, type] = {
    "record": str,
    "created_at": int,
    "source": str,
    "origin": str,
    "chunks": int,
    "stored_bytes": int,
}


class RefTable(NameTable[Ref]):
    """Names of images, as `str(ImageName)`, with a copy in `refs.json`."""

    TABLE = "refs"
    COPY_NAME = "refs.json"
    WHAT = "a ref"
    HINT = "`pvisor image rm {name}`, or pull or convert it again"

    @classmethod
    def parse_row(cls, document: Any) -> Ref:
        return Ref.from_json(document)

    @named
    def sign(self, name: str, record: ChunkId, signatures: Sequence[Signature]) -> Ref | None:
        """Add signatures to a name, whose row this returns; None when it does not stand for this image (any more)."""
        self._before_change()
        with self._write("sign a name") as txn:
            raw = self._index.get(self.TABLE, row_key(name), txn=txn)
            held = None if raw is None else self._parse(name, raw)
            if held is None or held.record != record:
                return None
            signed = replace(held, signatures=added(held.signatures, signatures))
            self._update(txn, {name: signed})
        return signed

    @named
    def copy(self, name: str, new: str) -> Ref | None:
        """Let `new` stand for what `name` does, in one step, so that nothing of it can be collected before; its row,
        None when there is no such name (any more). Signatures are of a name: the new one has none."""
        self._before_change()
        with self._write("copy a name") as txn:
            raw = self._index.get(self.TABLE, row_key(name), txn=txn)
            if raw is None:
                return None
            ref = replace(self._parse(name, raw), signatures=())
            self._put(txn, new, ref)
        return ref

    def complete(self, record: ChunkId) -> None:
        """Every chunk of this image is here: its names need no server, and nothing of it is left to fill."""
        self._before_change()
        with self._write("note that an image is complete") as txn:
            lazy = {name: ref for name, ref in self._items(txn) if ref.record == record and ref.origin}
            self._index.delete(txn, "fills", record)
            self._update(txn, {name: replace(ref, origin="") for name, ref in lazy.items()})

    def _kept(self, held: Ref, row: Ref) -> Ref:
        """An image that is converted, pulled or published again under its name is as signed as it was."""
        return replace(row, signatures=added(held.signatures, row.signatures)) if held.record == row.record else row

    def _lost(self, txn: Txn, held: bytes | None) -> None:
        """What the name stood for is filled no longer if that was its last one."""
        if held is None:
            return
        try:
            record = self._parse("that was", held).record
        except FormatError as error:
            log.warning("%s", error.message)
            return
        wanted = self._index.get("fills", record, txn=txn) is not None
        if wanted and all(ref.record != record for _, ref in self._items(txn)):
            self._index.delete(txn, "fills", record)


class SharedRows(Protocol):
    """Where small tables of several servers are (imaged/s3/tables.py); the last writer wins."""

    def put(self, table: str, key: bytes, value: bytes) -> None: ...

    def drop(self, table: str, key: bytes) -> None: ...


class MemoTable:
    """diff_id of a layer -> block image id of its parsed form. Only a cache: any row may go at any time.

    A row promises that the layer's chunks are all here, so it is written after they are durable, and a chunk that is
    dropped as corrupt takes all rows with it.
    """

    shared: SharedRows | None = None

    def __init__(self, index: Index, before_change: Callable[[], None]) -> None:
        self._index, self._before_change = index, before_change

    def get(self, diff_id: str) -> ChunkId | None:
        raw = self._index.get("memos", row_key(diff_id))
        return None if raw is None else ChunkId(raw)

    def items(self) -> Iterator[tuple[str, ChunkId]]:
        for key, value in self._index.rows("memos"):
            yield key.decode(), ChunkId(value)

    def set(self, diff_id: str, layer: ChunkId) -> None:
        self._before_change()
        if self.shared is not None:
            self.shared.put("memos", row_key(diff_id), layer)
        with self._index.write("note a layer") as txn:
            self._index.put(txn, "memos", row_key(diff_id), layer)
            self._index.bump(txn, NAMES)

    def delete(self, diff_id: str) -> bool:
        self._before_change()
        if self.shared is not None:
            self.shared.drop("memos", row_key(diff_id))
        with self._index.write("forget a layer") as txn:
            return self._index.delete(txn, "memos", row_key(diff_id))


class OriginTable:
    """Block image id -> URL of the server it was pulled from."""

    shared: SharedRows | None = None

    def __init__(self, index: Index, before_change: Callable[[], None]) -> None:
        self._index, self._before_change = index, before_change

    def get(self, image: ChunkId) -> str | None:
        raw = self._index.get("origins", image)
        return None if raw is None else raw.decode()

    def items(self) -> Iterator[tuple[ChunkId, str]]:
        for key, value in self._index.rows("origins"):
            yield ChunkId(key), value.decode()

    def set(self, image: ChunkId, url: str) -> None:
        self._before_change()  # the image's root is then here, and a row that is here stays
        if self.get(image) == url:
            return
        if self.shared is not None:
            self.shared.put("origins", image, url.encode())
        with self._index.write("note an origin") as txn:
            self._index.put(txn, "origins", image, url.encode())

    @staticmethod
    def restore(index: Index, origins: Mapping[ChunkId, str]) -> None:
        """Put origins into an index that is being rebuilt."""
        with index.write("restore origins") as txn:
            for image, url in origins.items():
                index.put(txn, "origins", image, url.encode())

    def delete(self, image: ChunkId) -> bool:
        self._before_change()
        if self.shared is not None:
            self.shared.drop("origins", image)
        with self._index.write("forget an origin") as txn:
            return self._index.delete(txn, "origins", image)


class ProfileTable:
    """Block image id -> its startup profile. Only advice: any row may go at any time, and promises no chunk."""

    shared: SharedRows | None = None

    def __init__(
        self, index: Index, check_writable: Callable[[], None], *, table: str = "profiles", prefix: bytes = b""
    ) -> None:
        """`prefix` begins the keys of a table that is not one store's alone."""
        self._index, self._check_writable = index, check_writable
        self._table, self._prefix = table, prefix

    def raw(self, image: ChunkId) -> bytes | None:
        """As it is kept."""
        return self._index.get(self._table, self._prefix + image)

    def get(self, image: ChunkId) -> Profile | None:
        raw = self.raw(image)
        return None if raw is None else _profile(image, raw)

    def ids(self) -> list[ChunkId]:
        """The block images that have one."""
        rows = self._index.range(self._table, self._prefix, self._prefix)
        return [ChunkId(key[len(self._prefix) :]) for key, _ in rows]

    def offer(self, image: ChunkId, profile: Profile) -> None:
        """Keep a profile that came from elsewhere, unless the one that is here was made from more runs."""
        held = self.get(image)
        if held is not None and (held == profile or held.runs > profile.runs):
            return
        self._check_writable()
        with self._index.write("keep a profile") as txn:
            self._index.put(txn, self._table, self._prefix + image, profile.pack())
        self._share(image, profile)

    def _share(self, image: ChunkId, profile: Profile) -> None:
        if self.shared is not None:
            self.shared.put("profiles", image, profile.pack())

    def merge(self, image: ChunkId, touched: Sequence[ChunkId]) -> Profile:
        """Add one run, whoever else adds one at the same time; what is then kept."""
        self._check_writable()
        before = self.get(image) or Profile()
        known = list(dict.fromkeys([*before.chunks, *touched]))
        places = zip(known, self._index.find_many(known), strict=True)
        sizes = {chunk: place.stored_bytes for chunk, place in places if place is not None}
        with self._index.write("merge a profile") as txn:
            raw = self._index.get(self._table, self._prefix + image, txn=txn)
            held = _profile(image, raw) if raw is not None else None
            merged = (held or Profile()).merged(touched, sizes)
            self._index.put(txn, self._table, self._prefix + image, merged.pack())
        self._share(image, merged)
        return merged

    def delete(self, image: ChunkId) -> bool:
        self._check_writable()
        if self.shared is not None:
            self.shared.drop("profiles", image)
        with self._index.write("forget a profile") as txn:
            return self._index.delete(txn, self._table, self._prefix + image)


class FillTable:
    """Image id -> how many bytes a second may be spent on fetching what it lacks, by who serves it.

    A row is a wish, kept until the image is complete (`RefTable.complete`) or has lost its last name.
    """

    def __init__(self, index: Index, check_writable: Callable[[], None]) -> None:
        self._index, self._check_writable = index, check_writable

    def get(self, image: ChunkId) -> int | None:
        raw = self._index.get("fills", image)
        return None if raw is None else int(raw)

    def ids(self) -> list[ChunkId]:
        """The images that are to be filled."""
        return [ChunkId(key) for key, _ in self._index.rows("fills")]

    def set(self, image: ChunkId, bytes_per_s: int) -> None:
        self._check_writable()
        with self._index.write("note a fill") as txn:
            self._index.put(txn, "fills", image, b"%d" % bytes_per_s)

    def delete(self, image: ChunkId) -> bool:
        self._check_writable()
        with self._index.write("forget a fill") as txn:
            return self._index.delete(txn, "fills", image)


def _profile(image: ChunkId, raw: bytes) -> Profile | None:
    """None for a row that is no profile: the next run makes it anew."""
    try:
        return Profile.parse(raw)
    except FormatError as error:
        log.warning("profile of %s: %s", image, error.message)
        return None
