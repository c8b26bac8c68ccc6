"""The files of an apply: what is written is read, and damage is said."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from imaged.errors import FormatError
from stage.applying.history import UNKNOWN, Entry, History, Identity
from stage.applying.ledger import Action, Journal, Ledger, Record, Step
from stage.applying.replica import Attributes
from stage.applying.workspace import is_same
from stage.edits.tree import Node, Tree
from stage.kept.record import Base

NAME = b"new\nline/\xff\xfe \xc3\xa9"


def identity(inode: int) -> Identity:
    return Identity(inode=inode, size_bytes=7, mtime_ns=-1, ctime_ns=2**62)


def journal() -> Journal:
    attributes = Attributes(mode=0o4755, uid=1, gid=70_000, mtime_ns=None, xattrs={b"user.\xff": b"\0\xff"})
    steps = (
        Step(action=Action.TAKE, path=NAME, number=1, old=identity(5), directory=True, moves=True),
        Step(action=Action.PUT, path=b"x", number=1, new=identity(5), moves=True),
        Step(action=Action.SET, path=b".", old=identity(6), before=attributes, after=replace(attributes, mtime_ns=9)),
    )
    return Journal(
        token="0a",
        workspace="/srv/a\udcff",
        base=Base(time_ns=1, device=2**40, inode=3),
        place=4,
        made=(7, 2**63),
        made_ns=5,
        steps=steps,
        records=(Record(path=NAME, stage=None, host=None), Record(path=b"x", stage=identity(8), host=identity(9))),
        parents=((NAME, -5),),
        touched=(b".", NAME),
        times=((NAME, 2**62),),
        moved=((b"a", NAME),),
        redirected=(NAME,),
    )


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "apply")
    assert not ledger.unfinished() and ledger.journal() is None
    ledger.write(journal())
    assert ledger.unfinished() and ledger.journal() == (journal(), False)
    ledger.write(replace(journal(), place=None))
    assert ledger.journal() == (replace(journal(), place=None), False)
    ledger.commit()
    assert ledger.unfinished() and ledger.journal() == (replace(journal(), place=None), True)
    ledger.close()
    assert not ledger.unfinished() and ledger.journal() is None
    ledger.close()


def test_a_history_is_read_as_it_was_saved(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.applied() == History()
    history = History({NAME: Entry(stage=identity(1), host=None), b"x": Entry(stage=None, host=identity(2))})
    ledger.save(history)
    assert ledger.applied() == history


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", '{"version": 2}', '{"version": 1}', '{"version": 1, "entries": {"a": 5}}', "\0" * 9],
)
def test_damage_is_said(tmp_path: Path, text: str) -> None:
    ledger = Ledger(tmp_path)
    for name in ("journal.json", "applied.json"):
        (tmp_path / name).write_text(text)
    for read in (ledger.journal, ledger.applied):
        with pytest.raises(FormatError, match="expected a ledger of version 1"):
            read()


def test_a_token_is_no_path(tmp_path: Path) -> None:
    """It becomes the name of a directory that is emptied."""
    ledger = Ledger(tmp_path)
    for token in ("", "../x", "a/b", ".", "\u00e9"):
        ledger.write(replace(journal(), token=token))
        with pytest.raises(FormatError):
            ledger.journal()


def node(tmp_path: Path, name: str) -> Node:
    with Tree(tmp_path) as tree:
        found = tree.node(name.encode())
    assert found is not None
    return found


@pytest.mark.root
def test_what_is_settled(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "d").mkdir()
    file, directory = node(tmp_path, "f"), node(tmp_path, "d")
    whiteout = replace(file, type="char", rdev=0)
    history = History(
        {
            b"f": Entry(stage=Identity.in_stage(file), host=None),
            b"gone": Entry(stage=None, host=None),
            b"d": Entry(stage=Identity.in_stage(directory), host=None),
            b"d/touched": Entry(stage=UNKNOWN, host=None),
            b"d/f": Entry(stage=identity(1), host=None),
        }
    )
    assert history.settled(b"f", file) and history.settled(b"gone", whiteout) and history.settled(b"gone", None)
    assert not history.settled(b"f", replace(file, ctime_ns=1)) and not history.settled(b"f", whiteout)
    assert not history.settled(b"other", file) and not history.settled(b"other", None)
    assert not history.settled(b"d/new", None)  # the stage has another directory there, or none
    assert history.settled(b"d", replace(directory, mtime_ns=1, ctime_ns=1))
    assert history.settled(b"d/new", None) and history.settled(b"d/touched/new", None)
    assert not history.settled(b"d/f", None)  # it was applied, and the stage has removed it since
    assert not history.settled(b"d", replace(directory, mode=0o700))


def test_a_moved_directory_takes_its_history_along() -> None:
    history = History({b"a/x": Entry(stage=None, host=None), b"ab": Entry(stage=None, host=None)})
    history.move([(b"a", b"b/c")])
    assert sorted(history.entries) == [b"ab", b"b/c/x"]


def test_directories_move_at_once_each_with_its_own() -> None:
    paths = (b"x/g", b"x/sub/f", b"a/1", b"b/2", b"y/old")
    history = History({path: Entry(stage=None, host=identity(at)) for at, path in enumerate(paths)})
    history.move([(b"x", b"y"), (b"x/sub", b"z"), (b"a", b"b"), (b"b", b"a")])
    numbers = {path: entry.host.inode for path, entry in history.entries.items() if entry.host is not None}
    assert numbers == {b"y/g": 0, b"z/f": 1, b"b/1": 2, b"a/2": 3, b"y/old": 4}


def test_a_workspace_is_known_again(tmp_path: Path) -> None:
    found = tmp_path.stat()
    base = Base(time_ns=time.time_ns(), device=found.st_dev, inode=found.st_ino)
    assert is_same(base, found)
    assert not is_same(replace(base, inode=1), found) and not is_same(replace(base, device=1), found)
    assert is_same(replace(base, device=1, time_ns=1), found)  # the host was booted since
