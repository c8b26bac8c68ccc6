"""The small tables of a store: refs (names), layer memos, and the origins of pulled block images."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from imaged.errors import FormatError, InvalidNameError
from imaged.ids import ChunkId
from imaged.index import Index, Txn
from imaged.publish import published

REFS_NAME = "refs.json"
_COPY_VERSION = 1
_KEY_LIMIT_BYTES = 511
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


class RefTable:
    """Names of images, as `str(ImageName)`. Every change is durable at once, and so is all that was put before it.

    A copy of the table is kept in `refs.json`, so that `fsck --rebuild` can bring the names back without the index.
    """

    def __init__(self, root: Path, index: Index, before_change: Callable[[], None]) -> None:
        self._root, self._index, self._before_change = root, index, before_change

    def get(self, name: str) -> Ref | None:
        raw = self._index.get("refs", _key(name))
        return None if raw is None else Ref.from_json(json.loads(raw))

    def items(self) -> list[tuple[str, Ref]]:
        """All of them, by name."""
        return [(key.decode(), Ref.from_json(json.loads(value))) for key, value in self._index.rows("refs")]

    def set(self, name: str, ref: Ref) -> None:
        self._before_change()
        with self._index.write("set a name") as txn:
            self._index.put(txn, "refs", _key(name), _ref_bytes(ref))
            self._copy(txn)

    def delete(self, name: str) -> bool:
        """Whether it was there."""
        self._before_change()
        with self._index.write("delete a name") as txn:
            found = self._index.delete(txn, "refs", _key(name))
            try:
                if found:
                    self._copy(txn)
            except OSError as error:
                # Names are removed to make room: a copy that is one name too long must not stand in the way.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.warning("%s is not up to date: %s", self._root / REFS_NAME, error.strerror)
        return found

    @staticmethod
    def restore(index: Index, refs: Mapping[str, Ref]) -> None:
        """Put names into an index that is being rebuilt; their copy stays as it is."""
        with index.write("restore names") as txn:
            for name, ref in refs.items():
                index.put(txn, "refs", _key(name), _ref_bytes(ref))

    def _copy(self, txn: Txn) -> None:
        # Inside the transaction: only there are the copies of several processes in the order of their changes.
        refs = {key.decode(): json.loads(value) for key, value in self._index.rows("refs", txn=txn)}
        write_copy(self._root, refs)


def _ref_bytes(ref: Ref) -> bytes:
    return json.dumps(ref.to_json(), sort_keys=True).encode()


def write_copy(root: Path, refs: Mapping[str, Any]) -> None:
    """Replace `refs.json` atomically."""
    with published(root / REFS_NAME) as file:
        file.write(json.dumps({"version": _COPY_VERSION, "refs": refs}, sort_keys=True, indent=1).encode())


def read_copy(root: Path) -> dict[str, Ref]:
    """The names in `refs.json`; none when there is no such file. FormatError."""
    try:
        document = json.loads((root / REFS_NAME).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FormatError(REFS_NAME, expected="JSON", found=str(error)) from error
    if not isinstance(document, dict) or document.get("version") != _COPY_VERSION:
        raise FormatError(REFS_NAME, expected=f"version {_COPY_VERSION}", found=repr(document)[:80])
    refs = document.get("refs")
    if not isinstance(refs, dict):
        raise FormatError(f"{REFS_NAME}, field refs", expected="object", found=repr(refs)[:80])
    return {name: Ref.from_json(value) for name, value in refs.items()}


class MemoTable:
    """diff_id of a layer -> block image id of its parsed form. Only a cache: any row may go at any time.

    A row promises that the layer's chunks are all here, so it is written after they are durable, and a chunk that is
    dropped as corrupt takes all rows with it.
    """

    def __init__(self, index: Index, before_change: Callable[[], None]) -> None:
        self._index, self._before_change = index, before_change

    def get(self, diff_id: str) -> ChunkId | None:
        raw = self._index.get("memos", _key(diff_id))
        return None if raw is None else ChunkId(raw)

    def items(self) -> Iterator[tuple[str, ChunkId]]:
        for key, value in self._index.rows("memos"):
            yield key.decode(), ChunkId(value)

    def set(self, diff_id: str, layer: ChunkId) -> None:
        self._before_change()
        with self._index.write("note a layer") as txn:
            self._index.put(txn, "memos", _key(diff_id), layer)

    def delete(self, diff_id: str) -> bool:
        self._before_change()
        with self._index.write("forget a layer") as txn:
            return self._index.delete(txn, "memos", _key(diff_id))


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


def _key(name: str) -> bytes:
    key = name.encode()
    if not 0 < len(key) <= _KEY_LIMIT_BYTES:
        raise InvalidNameError(
            f"name of {len(key)} bytes: the store takes 1 to {_KEY_LIMIT_BYTES}", hint="give a shorter name"
        )
    return key
