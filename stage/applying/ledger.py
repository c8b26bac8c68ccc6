"""The write-ahead ledger of a stage: what an apply is about to do to the workspace, and what was done.

    stages/NAME/apply/  journal.json     an apply that has not reached its commit: to be undone
                        committed.json   the same after its commit: to be finished
                        applied.json     for each applied name, what it is in the stage and on the host

Each file appears whole or not at all (`imaged.publish`), and the commit is the rename of the first to the second, so a
reader needs no log. Paths are any bytes; JSON has them as Python's file names are, with the bytes that are not UTF-8
as lone surrogates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from imaged.errors import FormatError
from imaged.publish import published, sync_directory
from stage.applying.history import History, Identity, identity, numbers
from stage.applying.replica import Attributes
from stage.hostpath import place_name
from stage.kept.record import Base

_VERSION = 1
_T = TypeVar("_T")


class Action(StrEnum):
    """What a step does; `place` is the private directory beside the changes, `number` the name in it."""

    TAKE = "take"  # the name moves into the place
    PUT = "put"  # what is in the place gets the name, which is free
    SWAP = "swap"  # what is in the place and what has the name change places
    SET = "set"  # mode, owner, attributes and times of what has the name


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One atomic change; who is where tells whether it was done. `old` has the name before it, `new` after it."""

    action: Action
    path: bytes
    number: int = 0
    old: Identity | None = None
    new: Identity | None = None
    directory: bool = False  # one goes or comes
    moves: bool = False  # what the host has under another name, not a copy
    before: Attributes | None = None
    after: Attributes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A name as the stage has it (None: deleted), and what the host has for it after the steps (None: nothing).

    The last step gives that its ctime, so this is the one thing about it that is not known here.
    """

    path: bytes
    stage: Identity | None
    host: Identity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """One apply. What `touched` names changes by it though it is not its object: a parent, a file with another name."""

    token: str
    workspace: str
    base: Base  # when it began, and where
    place: int | None = None  # inode of the private directory, once it is made
    made: tuple[int, ...] = ()  # the inodes of everything in it, when it was complete
    made_ns: int = 0  # the latest ctime of those
    steps: tuple[Step, ...] = ()
    records: tuple[Record, ...] = ()
    parents: tuple[tuple[bytes, int], ...] = ()  # directories that change by it, and their mtime_ns before
    touched: tuple[bytes, ...] = ()
    times: tuple[tuple[bytes, int], ...] = ()  # mtime_ns that directories have when everything in them is in place
    moved: tuple[tuple[bytes, bytes], ...] = ()  # directories: where they were, where they are
    redirected: tuple[bytes, ...] = ()  # directories of the upper that show a lower one from elsewhere
    shared: tuple[tuple[bytes, Identity], ...] = ()  # files of which others have names, too; as they were

    @property
    def place_name(self) -> bytes:
        return place_name(self.token)


class Ledger:
    """The files of one stage. Used under the lock of the workspace, but for `applied` and `unfinished`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._journal = directory / "journal.json"
        self._committed = directory / "committed.json"
        self._applied = directory / "applied.json"

    def unfinished(self) -> bool:
        """Whether an apply is under way, or was when its process ended."""
        return self._journal.exists() or self._committed.exists()

    def journal(self) -> tuple[Journal, bool] | None:
        """The unfinished apply, and whether it has reached its commit. Raises FormatError."""
        for path, committed in ((self._committed, True), (self._journal, False)):
            document = _read(path)
            if document is not None:
                return _parse(path, document, _journal), committed
        return None

    def write(self, journal: Journal) -> None:
        """Durable when it returns. OSError."""
        self.directory.mkdir(0o700, exist_ok=True)
        _write(self._journal, _pack_journal(journal))

    def commit(self) -> None:
        """From here on the apply is finished, not undone. OSError."""
        self._journal.rename(self._committed)
        sync_directory(self.directory)

    def close(self) -> None:
        """The apply is over. OSError."""
        self._journal.unlink(missing_ok=True)
        self._committed.unlink(missing_ok=True)
        sync_directory(self.directory)

    def applied(self) -> History:
        """Raises FormatError."""
        document = _read(self._applied)
        return (
            _parse(self._applied, document, lambda fields: History.unpack(fields["entries"], fields.get("files", ())))
            if document is not None
            else History()
        )

    def save(self, applied: History) -> None:
        """Durable when it returns. OSError."""
        _write(self._applied, {"version": _VERSION, "entries": applied.pack(), "files": applied.pack_files()})


def _pack_attributes(attributes: Attributes | None) -> list[Any] | None:
    if attributes is None:
        return None
    xattrs = {os.fsdecode(name): value.hex() for name, value in attributes.xattrs.items()}
    return [attributes.mode, attributes.uid, attributes.gid, attributes.mtime_ns, xattrs]


def _unpack_attributes(fields: list[Any] | None) -> Attributes | None:
    if fields is None:
        return None
    mode, uid, gid, mtime_ns, xattrs = fields
    return Attributes(
        mode=mode,
        uid=uid,
        gid=gid,
        mtime_ns=mtime_ns,
        xattrs={os.fsencode(name): bytes.fromhex(value) for name, value in xattrs.items()},
    )


def _pack_journal(journal: Journal) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "token": journal.token,
        "workspace": journal.workspace,
        "base": asdict(journal.base),
        "place": journal.place,
        "made": journal.made,
        "made_ns": journal.made_ns,
        "steps": [
            [
                step.action,
                os.fsdecode(step.path),
                step.number,
                numbers(step.old),
                numbers(step.new),
                step.directory,
                step.moves,
                _pack_attributes(step.before),
                _pack_attributes(step.after),
            ]
            for step in journal.steps
        ],
        "records": [[os.fsdecode(item.path), numbers(item.stage), numbers(item.host)] for item in journal.records],
        "parents": _pack_times(journal.parents),
        "touched": _texts(journal.touched),
        "times": _pack_times(journal.times),
        "moved": [_texts(pair) for pair in journal.moved],
        "redirected": _texts(journal.redirected),
        "shared": [[os.fsdecode(path), numbers(found)] for path, found in journal.shared],
    }


def _journal(document: dict[str, Any]) -> Journal:
    steps = [
        Step(
            action=Action(action),
            path=os.fsencode(path),
            number=int(number),
            old=identity(old),
            new=identity(new),
            directory=directory,
            moves=moves,
            before=_unpack_attributes(before),
            after=_unpack_attributes(after),
        )
        for action, path, number, old, new, directory, moves, before, after in document["steps"]
    ]
    records = [
        Record(path=os.fsencode(path), stage=identity(stage), host=identity(host))
        for path, stage, host in document["records"]
    ]
    token = str(document["token"])
    if not (token.isascii() and token.isalnum()):
        raise ValueError("token")
    return Journal(
        token=token,
        workspace=document["workspace"],
        base=Base.unpack(document["base"]),
        place=document["place"],
        made=tuple(map(int, document["made"])),
        made_ns=int(document["made_ns"]),
        steps=tuple(steps),
        records=tuple(records),
        parents=_times(document["parents"]),
        touched=_paths(document["touched"]),
        times=_times(document["times"]),
        moved=tuple((os.fsencode(old), os.fsencode(new)) for old, new in document["moved"]),
        redirected=_paths(document["redirected"]),
        shared=tuple(
            (os.fsencode(path), found)
            for path, row in document.get("shared", ())
            for found in [identity(row)]
            if found is not None
        ),
    )


def _texts(paths: Iterable[bytes]) -> list[str]:
    return [os.fsdecode(path) for path in paths]


def _pack_times(times: Iterable[tuple[bytes, int]]) -> list[list[Any]]:
    return [[os.fsdecode(path), mtime_ns] for path, mtime_ns in times]


def _times(rows: Iterable[list[Any]]) -> tuple[tuple[bytes, int], ...]:
    return tuple((os.fsencode(path), int(mtime_ns)) for path, mtime_ns in rows)


def _paths(texts: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(os.fsencode(text) for text in texts)


def _write(path: Path, document: dict[str, Any]) -> None:
    with published(path) as stream:
        stream.write(json.dumps(document, separators=(",", ":")).encode() + b"\n")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise _damaged(path, "another version, or none")
    return found


def _parse(path: Path, document: dict[str, Any], parse: Callable[[dict[str, Any]], _T]) -> _T:
    try:
        return parse(document)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error


def _damaged(path: Path, found: str) -> FormatError:
    return FormatError(
        str(path),
        expected=f"a ledger of version {_VERSION}",
        found=found,
        hint="compare the workspace by hand, then remove that file",
    )
