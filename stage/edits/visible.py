"""What of a stage's changes there is to see, one entry for a path of the base and one for a path of the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from stage.edits.changes import Change, Kind, difference
from stage.edits.layer import is_whiteout, nodes
from stage.edits.tree import Node, Tree, join, parents


def visible(changes: Iterable[Change], lower: Tree) -> list[Change]:
    """What there is to see, in order: a rename for each file in a renamed directory; not times; not the directories
    that a patch has no word for because the files in them say it.
    """
    seen = _by_base_path(list(_expanded(list(changes), lower)))
    told = {directory for change in seen for directory in _directories_told(change)}
    return [change for change in seen if not _is_implied(change, told)]


def _directories_told(change: Change) -> Iterator[tuple[Kind, bytes]]:
    """The directories that come or go with a file, without a word of their own."""
    if in_patches(change.new) is not None and change.kind is not Kind.MODIFIED:
        yield from ((Kind.ADDED, directory) for directory in parents(change.path))
    if in_patches(change.old) is not None and change.kind is not Kind.MODIFIED:
        yield from ((Kind.DELETED, directory) for directory in parents(change.old_path or change.path))


def _is_implied(change: Change, told: set[tuple[Kind, bytes]]) -> bool:
    """A plain directory with files in it, all of which come or go."""
    node = change.new if change.kind is Kind.ADDED else change.old
    if node is None or not node.is_directory or (change.kind, change.old_path or change.path) not in told:
        return False
    return change.kind is Kind.DELETED or (node.mode, node.uid, node.gid, node.xattrs) == (0o755, 0, 0, {})


def _expanded(changes: list[Change], lower: Tree) -> Iterator[Change]:
    """The changes with a rename for every file that moved with its directory; without those of times only."""
    seen = [change for change in changes if change.kind is not Kind.TIMES]
    told = {change.old_path or change.path for change in seen if change.old is not None}
    moved = {change.old_path for change in seen if _is_move(change)}
    for change in seen:
        yield change
        if _is_move(change):
            yield from sorted(_moved(change, lower, told, moved), key=lambda below: below.path)


def _is_move(change: Change) -> bool:
    return change.kind is Kind.RENAMED and change.old is not None and change.old.is_directory


def _moved(directory: Change, lower: Tree, told: set[bytes], moved: set[bytes | None]) -> Iterator[Change]:
    """The files below a renamed directory that no change tells of. What has moved on from there is not below it."""
    assert directory.old_path is not None
    pending = [(directory.old_path, directory.path)]
    while pending:
        old_directory, new_directory = pending.pop()
        for name, node in nodes(lower, old_directory):
            old_path, path = join(old_directory, name), join(new_directory, name)
            if node.is_directory and old_path not in moved:
                pending.append((old_path, path))
            elif not node.is_directory and old_path not in told and not is_whiteout(node):
                yield Change(path=path, kind=Kind.RENAMED, old=node, new=node, old_path=old_path, same_content=True)


def _by_base_path(changes: list[Change]) -> list[Change]:
    """With one change for what is deleted in a directory that has moved, and added in a new one of the old name."""
    parts = [part for change in changes for part in _parts(change)]
    added = {change.path: change for change in parts if change.kind is Kind.ADDED}
    again = {
        change.old_path: change
        for change in parts
        if change.kind is Kind.DELETED and change.old_path is not None and change.old_path in added
    }
    kept = []
    for change in parts:
        if change.kind is Kind.ADDED and change.path in again:
            kept += _changed(change, again[change.path].old)
        elif change.kind is not Kind.DELETED or change.old_path not in again:
            kept.append(change)
    return kept


def _parts(change: Change) -> list[Change]:
    if change.old_path is None:
        return [change]
    if change.kind is Kind.RENAMED and change.old_path == change.path:  # with its directory, and back into a new one
        return _changed(change, change.old)
    if change.kind is Kind.TYPE:
        gone = replace(change, kind=Kind.DELETED, new=None, links=())
        return [gone, replace(change, kind=Kind.ADDED, old=None, old_path=None)]
    return [change]


def _changed(change: Change, old: Node | None) -> list[Change]:
    """The change as one of what has the same path in the base; none when it is the same."""
    kind, same = difference(old, change.new)
    if kind is None or kind is Kind.TIMES:
        return []
    return [replace(change, kind=kind, old=old, old_path=None, same_content=same)]


def in_patches(node: Node | None) -> Node | None:
    """The node, if it is something that git's format has words for."""
    return node if node is not None and node.type in ("file", "symlink") else None
