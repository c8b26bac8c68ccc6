"""Changes that can only be applied together."""

from __future__ import annotations

from collections.abc import Sequence

from stage.edits.changes import Change, Kind
from stage.edits.layer import Layer
from stage.edits.selection import selected, within
from stage.edits.tree import parents


def moves(layer: Layer) -> dict[bytes, bytes]:
    """The directories that the stage shows elsewhere: where the host has them, where the stage does."""
    return {source: target for source, target in layer.moved().items() if source != target}


def host_path(change: Change) -> bytes:
    """Where the host has it before the apply."""
    return change.path if change.old_path is None else change.old_path


def is_new_directory(change: Change) -> bool:
    return change.kind in (Kind.ADDED, Kind.TYPE) and change.new is not None and change.new.is_directory


def removes_directory(change: Change) -> bool:
    gone = change.new is None or not change.new.is_directory
    return gone and change.old is not None and change.old.is_directory


def moves_directory(change: Change) -> bool:
    return change.kind is Kind.RENAMED and change.new is not None and change.new.is_directory


def together(changes: Sequence[Change], paths: Sequence[bytes], moved: dict[bytes, bytes]) -> list[Change]:
    """The changes at and below `paths`, and those without which they can not be: parents, and the rest of `moves`."""
    by_path = {change.path: change for change in changes}
    chosen = {change.path for change in selected(changes, paths)}
    done: set[bytes] = set()
    before = -1
    while before != len(chosen):
        before = len(chosen)
        chosen.update(_needed([by_path[path] for path in chosen], by_path))
        for source, target in concerned([by_path[path] for path in chosen], moved):
            if source not in done:
                done.add(source)
                whole = target not in by_path or by_path[target].kind is not Kind.RENAMED
                chosen.update(
                    change.path
                    for change in changes
                    if within(change.path, source)
                    or change.path == target
                    or (change.kind is Kind.RENAMED and within(host_path(change), source))
                    or (whole and (within(change.path, target) or within(host_path(change), source)))
                )
    return [change for change in changes if change.path in chosen]


def _needed(chosen: Sequence[Change], by_path: dict[bytes, Change]) -> set[bytes]:
    """New directories above what is chosen, and everything in directories that go."""
    needed = set()
    for change in chosen:
        for parent in parents(change.path):
            above = by_path.get(parent)
            if above is not None and (is_new_directory(above) or moves_directory(above)):
                needed.add(parent)
    gone = [change for change in chosen if removes_directory(change)]
    if gone:
        shown, hosts = {change.path for change in gone}, {host_path(change) for change in gone}
        for path, other in by_path.items():
            host = host_path(other)
            if not (shown.isdisjoint((path, *parents(path))) and hosts.isdisjoint((host, *parents(host)))):
                needed.add(path)
    return needed


def concerned(changes: Sequence[Change], moved: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """Those of the moved directories that changes are in, where they were or where they are."""
    if not moved:
        return []
    shown: set[bytes] = set()
    hosts: set[bytes] = set()
    for change in changes:
        shown.update((change.path, *parents(change.path)))
        hosts.update((host_path(change), *parents(host_path(change))))
    return [(source, target) for source, target in moved.items() if {source, target} & shown or source in hosts]
