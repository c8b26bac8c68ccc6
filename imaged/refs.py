"""The small tables of a store: refs (names), layer memos, origins of pulled block images, startup profiles, fills."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from imaged.errors import FormatError
from imaged.ids import ChunkId
from imaged.index import Index, Txn
from imaged.nametable import NameTable, row_key
from imaged.profile import Profile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """What a name stands for: the id of an image record, and how it came here.

    `created_at` is in Unix seconds, `source` the text it was converted or pulled from, `origin` the server that can
    give chunks which are not here ("" when all are). `chunks` and `stored_bytes` are of the whole image.
    """

    record: ChunkId
    created_at: int
    source: str
    origin: str
    chunks: int
    stored_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "record": str(self.record)}

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
        return cls(**{**values, "record": ChunkId.parse(values["record"])})


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

    def complete(self, record: ChunkId) -> None:
        """Every chunk of this image is here: its names need no server, and nothing of it is left to fill."""
        self._before_change()
        with self._index.write("note that an image is complete") as txn:
            lazy = {name: ref for name, ref in self._items(txn) if ref.record == record and ref.origin}
            self._index.delete(txn, "fills", record)
            self._update(txn, {name: replace(ref, origin="") for name, ref in lazy.items()})

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


class MemoTable:
    """diff_id of a layer -> block image id of its parsed form. Only a cache: any row may go at any time.

    A row promises that the layer's chunks are all here, so it is written after they are durable, and a chunk that is
    dropped as corrupt takes all rows with it.
    """

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
        with self._index.write("note a layer") as txn:
            self._index.put(txn, "memos", row_key(diff_id), layer)

    def delete(self, diff_id: str) -> bool:
        self._before_change()
        with self._index.write("forget a layer") as txn:
            return self._index.delete(txn, "memos", row_key(diff_id))


class OriginTable:
    """Block image id -> URL of the server it was pulled from."""

    def __init__(self, index: Index, before_change: Callable[[], None]) -> None:
        self._index, self._before_change = index, before_change

    def get(self, image: ChunkId) -> str | None:
        raw = self._index.get("origins", image)
        return None if raw is None else raw.decode()

    def items(self) -> Iterator[tuple[ChunkId, str]]:
        for key, value in self._index.rows("origins"):
            yield ChunkId(key), value.decode()

    def set(self, image: ChunkId, url: str) -> None:
        if self.get(image) == url:
            return
        self._before_change()
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
        with self._index.write("forget an origin") as txn:
            return self._index.delete(txn, "origins", image)


class ProfileTable:
    """Block image id -> its startup profile. Only advice: any row may go at any time, and promises no chunk."""

    def __init__(self, index: Index, check_writable: Callable[[], None]) -> None:
        self._index, self._check_writable = index, check_writable

    def raw(self, image: ChunkId) -> bytes | None:
        """As it is kept."""
        return self._index.get("profiles", image)

    def get(self, image: ChunkId) -> Profile | None:
        raw = self.raw(image)
        return None if raw is None else _profile(image, raw)

    def ids(self) -> list[ChunkId]:
        """The block images that have one."""
        return [ChunkId(key) for key, _ in self._index.rows("profiles")]

    def offer(self, image: ChunkId, profile: Profile) -> None:
        """Keep a profile that came from elsewhere, unless the one that is here was made from more runs."""
        held = self.get(image)
        if held is not None and (held == profile or held.runs > profile.runs):
            return
        self._check_writable()
        with self._index.write("keep a profile") as txn:
            self._index.put(txn, "profiles", image, profile.pack())

    def merge(self, image: ChunkId, touched: Sequence[ChunkId]) -> Profile:
        """Add one run, whoever else adds one at the same time; what is then kept."""
        self._check_writable()
        before = self.get(image) or Profile()
        known = list(dict.fromkeys([*before.chunks, *touched]))
        places = zip(known, self._index.find_many(known), strict=True)
        sizes = {chunk: place.stored_bytes for chunk, place in places if place is not None}
        with self._index.write("merge a profile") as txn:
            raw = self._index.get("profiles", image, txn=txn)
            held = _profile(image, raw) if raw is not None else None
            merged = (held or Profile()).merged(touched, sizes)
            self._index.put(txn, "profiles", image, merged.pack())
        return merged

    def delete(self, image: ChunkId) -> bool:
        self._check_writable()
        with self._index.write("forget a profile") as txn:
            return self._index.delete(txn, "profiles", image)


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
