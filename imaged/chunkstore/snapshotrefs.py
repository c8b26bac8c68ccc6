"""The names of snapshots in a store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from imaged.chunkstore.nametable import NameTable, named, row_key
from imaged.errors import FormatError
from imaged.ids import ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRef:
    """What a name stands for: the id of a snapshot record, and how it came here.

    `created_at` is when it got the name, in Unix seconds. `origin` is the server that can give chunks which are not
    here ("" when all are), `server` the one that it was pulled from or pushed to as it is ("" while only this host has
    it: a pull then leaves it its name). `chunks` and `stored_bytes` are of the whole snapshot, its image among them;
    None while nobody has counted them: who parks a machine does not wait for that.
    """

    record: ChunkId
    created_at: int
    origin: str = ""
    chunks: int | None = None
    stored_bytes: int | None = None
    server: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "record": str(self.record)}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """FormatError when a field is missing or of another type."""
        if not isinstance(document, dict):
            raise FormatError("snapshot ref", expected="a JSON object", found=type(document).__name__)
        for key, kinds in _FIELDS.items():
            value = document.get(key, "" if key == "server" else None)
            if not isinstance(value, kinds) or isinstance(value, bool):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise FormatError(f"snapshot ref, field {key}", expected=expected, found=repr(value)[:80])
        values: dict[str, Any] = {key: document[key] for key in _FIELDS if key in document}
        return cls(**{**values, "record": ChunkId.parse(document["record"])})


_FIELDS: dict[str, tuple[type, ...]] = {
    "record": (str,),
    "created_at": (int,),
    "origin": (str,),
    "chunks": (int, type(None)),
    "stored_bytes": (int, type(None)),
    "server": (str,),
}


class SnapshotTable(NameTable[SnapshotRef]):
    """Names of snapshots, as `imaged.names.snapshot_name` takes them, with a copy in `snapshots.json`."""

    TABLE = "snapshots"
    COPY_NAME = "snapshots.json"
    WHAT = "a snapshot"
    HINT = "`pvisor snapshot rm {name}`, or pull it again"

    @classmethod
    def parse_row(cls, document: Any) -> SnapshotRef:
        return SnapshotRef.from_json(document)

    @named
    def replace(self, name: str, row: SnapshotRef, *, over: ChunkId | None) -> bool:
        """As `set`, but only when the name is free, or stands for the snapshot `over` or this one: whether it was."""
        self._before_change()
        with self._write("set a name") as txn:
            held = self._index.get(self.TABLE, row_key(name), txn=txn)
            if held is not None and not self._is(name, held, {over, row.record}):
                return False
            self._update(txn, {name: row})
        return True

    def _is(self, name: str, held: bytes, records: Collection[ChunkId | None]) -> bool:
        try:
            return self._parse(name, held).record in records
        except FormatError:  # whose it was is not known
            return False

    def complete(self, record: ChunkId) -> None:
        """Every chunk of this snapshot is here: its names need no server."""
        self._before_change()
        with self._write("note that a snapshot is complete") as txn:
            lazy = {name: ref for name, ref in self._items(txn) if ref.record == record and ref.origin}
            self._update(txn, {name: replace(ref, origin="") for name, ref in lazy.items()})
