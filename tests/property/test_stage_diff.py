"""Random edits in an overlay: the changes told of them lead from the base to what the overlay shows, as objects and as
text for `git apply` and `patch`."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stage.boundary.overlay import OVER_IMAGE, OVER_WORKSPACE
from stage.edits.changes import Change, Kind
from stage.edits.tree import ROOT, Node
from tests.support.overlay import Layers, patch_text

pytestmark = pytest.mark.root

NAMES = ["a", "b", "c d", '"é\\']
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
# Few lines and many repetitions: hunks move about, files are equal by chance.
LINES = st.lists(st.sampled_from([b"", b"x", b"y", b"}\r", b"--- a/b", b"@@ -1 +1 @@", b"\xff"]), max_size=12)
TEXTS = st.builds(lambda lines, end: b"\n".join(lines) + end, LINES, st.sampled_from([b"\n", b""]))
EDITS = st.one_of(
    st.tuples(st.just("write"), PATHS, TEXTS),
    st.tuples(st.just("append"), PATHS, TEXTS),
    st.tuples(st.just("mkdir"), PATHS),
    st.tuples(st.just("symlink"), PATHS, st.sampled_from([b"a", b"../b", b"no\nwhere"])),
    st.tuples(st.just("remove"), PATHS),
    st.tuples(st.just("chmod"), PATHS, st.sampled_from([0o644, 0o755])),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("touch"), PATHS),
)


def edit(top: Path, steps: list[tuple[object, ...]]) -> None:
    """What can not be done is left out."""
    for action, name, *rest in steps:
        path = top / str(name)
        try:
            if action == "write":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(rest[0])  # type: ignore[arg-type]
            elif action == "append" and path.is_file() and not path.is_symlink():
                with path.open("ab") as file:
                    file.write(rest[0])  # type: ignore[call-overload]
            elif action == "mkdir":
                path.mkdir(parents=True)
            elif action == "symlink":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(os.fsdecode(rest[0]))  # type: ignore[arg-type]
            elif action == "remove" and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif action == "remove":
                path.unlink()
            elif action == "chmod" and path.is_file() and not path.is_symlink():
                path.chmod(rest[0])  # type: ignore[arg-type]
            elif action == "link":
                os.link(path, top / str(rest[0]), follow_symlinks=False)
            elif action == "rename":
                path.rename(top / str(rest[0]))
            elif action == "touch":
                os.utime(path, ns=(5, 5), follow_symlinks=False)
        except OSError:
            continue


Row = tuple[object, ...]


def rows(top: Path) -> dict[bytes, Row]:
    """What each name stands for; a directory's time is that of its last entry, which no review tells."""
    found: dict[bytes, Row] = {}
    for here, directories, files in os.walk(os.fsencode(top)):
        for name in [*directories, *files]:
            path = os.path.join(here, name)
            info = os.lstat(path)
            row: Row = (stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode))
            if stat.S_ISLNK(info.st_mode):
                row += (os.readlink(path),)  # noqa: PTH115 (bytes)
            elif stat.S_ISREG(info.st_mode):
                row += (Path(os.fsdecode(path)).read_bytes(),)
            found[os.path.relpath(path, os.fsencode(top))] = row
    return found


def row_of(node: Node) -> Row:
    types = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}
    row: Row = (types[node.type], node.mode)
    if node.type == "symlink":
        row += (node.target,)
    elif node.type == "file":
        with open(node.open(), "rb") as file:
            row += (file.read(),)
    return row


def replayed(before: dict[bytes, Row], changes: list[tuple[Change, Row | None]]) -> dict[bytes, Row]:
    """The base with the changes made to it: first all that goes away, then what has moved, then what comes."""
    after = dict(before)
    moved: dict[bytes, Row] = {}
    moves = [change for change, _ in changes if change.kind is Kind.RENAMED and row_is_directory(change)]
    for change in sorted(moves, key=lambda change: len(change.old_path or b""), reverse=True):
        assert change.old_path is not None
        for path in [path for path in after if path.startswith(change.old_path + b"/")]:
            moved[change.path + path[len(change.old_path) :]] = after.pop(path)
    gone = {change.path for change, _ in changes if change.old is not None and change.old_path is None}
    gone |= {change.old_path for change, _ in changes if change.old_path is not None}
    after = {path: row for path, row in after.items() if path not in gone}
    for change, _ in changes:
        if change.old_path is not None and change.kind is not Kind.RENAMED:
            moved.pop(change.path, None)
    # What was renamed out of a moved directory is not in it.
    left = {change.old_path for change, _ in changes if change.kind is Kind.RENAMED}
    for move in moves:
        assert move.old_path is not None
        for path in list(moved):
            if path.startswith(move.path + b"/") and move.old_path + path[len(move.path) :] in left:
                del moved[path]
    after.update(moved)
    after.update({change.path: row for change, row in changes if row is not None})
    return after


def row_is_directory(change: Change) -> bool:
    return change.new is not None and change.new.is_directory


@contextmanager
def edited(
    base: list[tuple[object, ...]], steps: list[tuple[object, ...]], options: str = OVER_WORKSPACE
) -> Iterator[Layers]:
    with tempfile.TemporaryDirectory() as scratch:
        made = Layers(Path(scratch), options)
        made.base.mkdir()
        edit(made.base, base)
        made.edit_with(lambda merged: edit(merged, steps))
        yield made


LISTS = st.lists(EDITS, max_size=25)
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUIET
@given(base=LISTS, steps=LISTS, options=st.sampled_from([OVER_WORKSPACE, OVER_IMAGE]))
def test_changes_lead_from_the_base_to_the_overlay(
    base: list[tuple[object, ...]], steps: list[tuple[object, ...]], options: str
) -> None:
    with edited(base, steps, options) as made, made.mounted() as merged:
        told = [found for found in made.told_with(row_of) if found[0].path != ROOT]
        assert replayed(rows(made.base), told) == rows(merged)


@QUIET
@given(base=LISTS, steps=LISTS)
def test_text_leads_there_too(base: list[tuple[object, ...]], steps: list[tuple[object, ...]]) -> None:
    with edited(base, steps) as made:
        text = patch_text(made)
        with made.mounted() as merged:
            wanted = {path: row for path, row in rows(merged).items() if row[0] != stat.S_IFDIR}
        tools = [["git", "apply", "--whitespace=nowarn"], ["patch", "-p1", "-s"]]
        if turned(made):
            tools.pop()
        for tool in tools if b"diff --git" in text else []:
            target = made.root / tool[0]
            shutil.copytree(made.base, target, symlinks=True)
            without_empty_directories(target)
            done = subprocess.run(tool, cwd=target, input=text, capture_output=True, env=ENVIRON)
            assert done.returncode == 0, (tool, done.stdout, done.stderr, text)
            assert {path: row for path, row in rows(target).items() if row[0] != stat.S_IFDIR} == wanted, (tool, text)


def without_empty_directories(top: Path) -> None:
    """Git knows of none, and so puts no file in the place of one."""
    for here, _, _ in os.walk(top, topdown=False):
        if Path(here) != top and not any(Path(here).iterdir()):
            Path(here).rmdir()


# Not in the repository that the temporary directory may be in.
ENVIRON = {"PATH": os.environ["PATH"], "GIT_DIR": "/nonexistent"}


def turned(made: Layers) -> bool:
    """GNU patch removes files last, so it can not make a directory of a file, or a file of a directory."""
    nodes = [node for change in made.changes() if change.kind is Kind.TYPE for node in (change.old, change.new)]
    return any(node is not None and node.is_directory for node in nodes)
