"""A table of names in a store's index, with a copy beside it that outlives the index."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from imaged.chunkstore.environment import NAMES, Txn
from imaged.chunkstore.index import Index
from imaged.errors import FormatError, InvalidNameError, NameMovedError
from imaged.publish import published

_COPY_VERSION = 1
_KEY_LIMIT_BYTES = 511
log = logging.getLogger(__name__)


class Row(Protocol):
    """What a name stands for."""

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """FormatError when a field is missing or of another type."""
        ...


class Shared(Protocol):
    """Where names of several servers are (imaged/s3/tables.py); the index then mirrors them."""

    def transaction(self, table: str, what: str) -> contextlib.AbstractContextManager[Txn]:
        """As `Index.write`; what the block changes in the table is true there first. NameMovedError."""
        ...

    def look(self, table: str, name: str) -> None:
        """Have one name in the index as it is there."""
        ...


R = TypeVar("R", bound=Row)
P = ParamSpec("P")
T = TypeVar("T")
Table = TypeVar("Table", bound="NameTable[Any]")
_TRIES = 8


def named(change: Callable[Concatenate[Table, str, P], T]) -> Callable[Concatenate[Table, str, P], T]:
    """For a method that changes a name, its first argument: where names are shared it goes by what is there now, and is
    done again when somebody else was faster."""

    @functools.wraps(change)
    def changed(self: Table, name: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.shared is None:
            return change(self, name, *args, **kwargs)
        for left in reversed(range(_TRIES)):
            self.shared.look(self.TABLE, name)
            try:
                return change(self, name, *args, **kwargs)
            except NameMovedError:
                if not left:
                    raise
        raise AssertionError("no tries")

    return changed


class NameTable(Generic[R]):
    """Names and their rows. Every change is durable at once, and so is all that was put before it.

    A copy of the table is kept in a file, so that `fsck --rebuild` can bring the names back without the index.

    Who sets a name holds a lease (imaged/chunkstore/lease.py), or put all that is below it while nothing collects.
    """

    TABLE: ClassVar[str]
    """Of the index, and the key in the copy."""
    COPY_NAME: ClassVar[str]
    WHAT: ClassVar[str]
    """What a name stands for."""
    HINT: ClassVar[str]
    """What to do about a damaged row; `{name}` is its name."""

    shared: Shared | None = None

    def __init__(self, root: Path, index: Index, before_change: Callable[[], None]) -> None:
        self._root, self._index, self._before_change = root, index, before_change

    def _write(self, what: str) -> contextlib.AbstractContextManager[Txn]:
        """A transaction that changes names."""
        return self._index.write(what) if self.shared is None else self.shared.transaction(self.TABLE, what)

    @classmethod
    def parse_row(cls, document: Any) -> R:
        """FormatError."""
        raise NotImplementedError

    def get(self, name: str) -> R | None:
        """FormatError when the row is damaged; it can be set and deleted all the same."""
        raw = self._index.get(self.TABLE, row_key(name))
        if raw is None and self.shared is not None:
            self.shared.look(self.TABLE, name)
            raw = self._index.get(self.TABLE, row_key(name))
        return None if raw is None else self._parse(name, raw)

    def items(self, prefix: str = "") -> list[tuple[str, R]]:
        """All of them that begin so, by name. FormatError when one is damaged: what it keeps is not known."""
        start = prefix.encode()
        rows = self._index.range(self.TABLE, start, start)
        return [(key.decode(), self._parse(key.decode(), value)) for key, value in rows]

    def names(self, prefix: str = "") -> list[str]:
        """Those that begin so, in order, also of damaged rows."""
        start = prefix.encode()
        return [key.decode() for key, _ in self._index.range(self.TABLE, start, start)]

    @named
    def set(self, name: str, row: R) -> None:
        self._before_change()
        with self._write("set a name") as txn:
            self._put(txn, name, row)

    def _put(self, txn: Txn, name: str, row: R) -> None:
        held = self._index.get(self.TABLE, row_key(name), txn=txn)
        if held is not None:
            with contextlib.suppress(FormatError):  # a damaged row keeps nothing
                row = self._kept(self._parse(name, held), row)
        self._index.put(txn, self.TABLE, row_key(name), _row_bytes(row))
        self._index.bump(txn, NAMES)
        self._lost(txn, held)
        self._copy(txn)

    @named
    def delete(self, name: str) -> bool:
        """Whether it was there."""
        self._before_change()
        with self._write("delete a name") as txn:
            held = self._index.get(self.TABLE, row_key(name), txn=txn)
            found = self._index.delete(txn, self.TABLE, row_key(name))
            self._lost(txn, held)
            try:
                if found:
                    self._copy(txn)
            except OSError as error:
                # Names are removed to make room: a copy that is one name too long must not stand in the way.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                log.warning("%s is not up to date: %s", self._root / self.COPY_NAME, error.strerror)
        return found

    def _update(self, txn: Txn, rows: Mapping[str, R]) -> None:
        """New rows for names that are there."""
        for name, row in rows.items():
            self._index.put(txn, self.TABLE, row_key(name), _row_bytes(row))
        if rows:
            self._index.bump(txn, NAMES)
            self._copy(txn)

    def _items(self, txn: Txn) -> Iterator[tuple[str, R]]:
        """Those that are sound: a damaged one must not stand in the way of a change."""
        for key, value in self._index.rows(self.TABLE, txn=txn):
            try:
                yield key.decode(), self._parse(key.decode(), value)
            except FormatError as error:
                log.warning("%s", error.message)

    def _kept(self, held: R, row: R) -> R:
        """The row that is set where `held` was, with what it keeps of that."""
        del held
        return row

    def _lost(self, txn: Txn, held: bytes | None) -> None:
        """A name is gone or moved on, within the transaction; `held` is the row it had."""

    @classmethod
    def _parse(cls, name: str, raw: bytes) -> R:
        try:
            return cls.parse_row(json.loads(raw))
        except (FormatError, ValueError, RecursionError) as error:
            hint = cls.HINT.format(name=name)
            raise FormatError(f"name {name}", expected=cls.WHAT, found=str(error), hint=hint) from error

    @classmethod
    def restore(cls, index: Index, rows: Mapping[str, R]) -> None:
        """Put names into an index that is being rebuilt; their copy stays as it is."""
        with index.write("restore names") as txn:
            for name, row in rows.items():
                index.put(txn, cls.TABLE, row_key(name), _row_bytes(row))

    def _copy(self, txn: Txn) -> None:
        if self.shared is not None:  # which outlives the index by itself
            return
        # Inside the transaction: only there are the copies of several processes in the order of their changes.
        self.write_copy(self._root, dict(self._items(txn)))

    @classmethod
    def write_copy(cls, root: Path, rows: Mapping[str, R]) -> None:
        """Replace the copy atomically."""
        document = {"version": _COPY_VERSION, cls.TABLE: {name: row.to_json() for name, row in rows.items()}}
        with published(root / cls.COPY_NAME) as file:
            file.write(json.dumps(document, sort_keys=True, indent=1).encode())

    @classmethod
    def read_copy(cls, root: Path) -> dict[str, R]:
        """The names in the copy; none when there is no such file. FormatError."""
        try:
            document = json.loads((root / cls.COPY_NAME).read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise FormatError(cls.COPY_NAME, expected="JSON", found=str(error)) from error
        if not isinstance(document, dict) or document.get("version") != _COPY_VERSION:
            raise FormatError(cls.COPY_NAME, expected=f"version {_COPY_VERSION}", found=repr(document)[:80])
        rows = document.get(cls.TABLE)
        if not isinstance(rows, dict):
            raise FormatError(f"{cls.COPY_NAME}, field {cls.TABLE}", expected="object", found=repr(rows)[:80])
        return {name: cls.parse_row(value) for name, value in rows.items()}


def _row_bytes(row: Row) -> bytes:
    return json.dumps(row.to_json(), sort_keys=True).encode()


def row_key(name: str) -> bytes:
    """A name as a key of the index. InvalidNameError."""
    key = name.encode()
    if not 0 < len(key) <= _KEY_LIMIT_BYTES:
        raise InvalidNameError(
            f"name of {len(key)} bytes: the store takes 1 to {_KEY_LIMIT_BYTES}", hint="give a shorter name"
        )
    return key
