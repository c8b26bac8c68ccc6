"""Which changes go together, and that finding them costs as much as there are changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from stage.applying.closure import concerned, together
from stage.applying.plan import Planner
from stage.edits.changes import Change, Kind
from stage.edits.tree import Node


def node(kind: str, inode: int) -> Node:
    return Node(
        type=kind,  # type: ignore[arg-type]
        mode=0o755,
        uid=0,
        gid=0,
        size_bytes=0,
        mtime_ns=0,
        ctime_ns=0,
        device=1,
        inode=inode,
        link_count=1,
        rdev=0,
        target=b"",
        xattrs={},
        tree=None,  # type: ignore[arg-type]
        location=b"",
    )


def removed(path: bytes, kind: str = "file") -> Change:
    return Change(path=path, kind=Kind.DELETED, old=node(kind, 1), new=None)


def renamed(old: bytes, new: bytes, kind: str = "directory") -> Change:
    return Change(path=new, kind=Kind.RENAMED, old=node(kind, 1), new=node(kind, 2), old_path=old)


def calls(function: Callable[[], object]) -> int:
    """How many calls of Python functions it makes."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def chosen(changes: list[Change], paths: list[bytes], moved: dict[bytes, bytes] | None = None) -> list[bytes]:
    return [change.path for change in together(changes, paths, moved or {})]


def test_a_directory_goes_with_all_that_was_in_it() -> None:
    changes = [
        removed(b"t", "directory"),
        removed(b"t/d", "directory"),
        removed(b"t/d/f"),
        removed(b"t/e"),
        removed(b"u"),
    ]
    assert chosen(changes, [b"t"]) == [b"t", b"t/d", b"t/d/f", b"t/e"]
    assert chosen(changes, [b"t/d"]) == [b"t/d", b"t/d/f"]
    assert chosen(changes, [b"t/e"]) == [b"t/e"]


def test_what_left_a_directory_that_goes_comes_along() -> None:
    changes = [renamed(b"t/f", b"f", "file"), removed(b"t", "directory"), removed(b"t/g")]
    assert chosen(changes, [b"t"]) == [b"f", b"t", b"t/g"]


def test_moved_directories_that_are_concerned() -> None:
    moved = {b"x": b"y", b"x/sub": b"z", b"other": b"o"}
    assert concerned([renamed(b"x/sub/f", b"z/f", "file")], moved) == [(b"x", b"y"), (b"x/sub", b"z")]
    assert concerned([removed(b"o/f")], moved) == [(b"other", b"o")]
    assert concerned([removed(b"none")], moved) == [] and concerned([removed(b"x")], {}) == []


def test_the_cost_follows_the_changes() -> None:
    def removal(count: int) -> int:
        changes = [removed(b"t", "directory")]
        for number in range(count):
            changes += [removed(b"t/%d" % number, "directory"), removed(b"t/%d/f" % number)]
        return calls(lambda: together(changes, [b"t"], {}))

    assert removal(400) < 2.5 * removal(200)


@pytest.mark.parametrize("where", ["_before", "_after"])
def test_the_cost_of_one_path_does_not_follow_the_renames(where: str) -> None:
    def look(count: int) -> int:
        planner = Planner.__new__(Planner)
        planner._sources = {b"new%d" % number: b"old%d" % number for number in range(count)}
        planner._targets = {b"old%d" % number: b"new%d" % number for number in range(count)}
        path = {"_before": b"new7/f", "_after": b"old7/f"}[where]
        found: list[bytes] = []
        cost = calls(lambda: found.append(getattr(planner, where)(path)))
        assert found == [{"_before": b"old7/f", "_after": b"new7/f"}[where]]
        return cost

    assert look(1000) == look(10)
