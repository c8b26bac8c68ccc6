"""Whether the host still has what a stage's changes were made from."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from stage.applying.closure import host_path, moves, moves_directory
from stage.applying.history import History
from stage.edits.changes import Change, Kind, Overlay
from stage.edits.layer import Layer, origin
from stage.edits.selection import within
from stage.edits.tree import Node, join, parents, split
from stage.hostpath import HostTree, in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A path that is not applied, and why."""

    path: bytes
    reason: str


class Conflicts:
    """The host directory as it was at `base_ns`, and what applies of the stage have made of it since."""

    def __init__(self, overlay: Overlay, host: HostTree, history: History, layer: Layer, base_ns: int) -> None:
        self._overlay, self._host, self._history, self._layer = overlay, host, history, layer
        self._base_ns = base_ns
        self._moved = moves(layer)
        self._same: dict[bytes, bool] = {}
        self._stage_inodes = {entry.stage.inode for entry in history.entries.values() if entry.stage is not None}

    def known(self, path: bytes, node: Node) -> bool:
        """Whether the host has what it had when the stage began, or what an apply of this stage left."""
        return node.ctime_ns <= self._base_ns or self._history.ours(path, node)

    def is_idle(self, change: Change, names: Counter[int]) -> bool:
        """Only another time, where others have made the same content or work, or where a link would break for it.

        `names` says how many names of each host inode the apply is about.
        """
        old, new = change.old, change.new
        if change.kind is not Kind.TIMES or old is None or new is None:
            return False
        single = old.is_directory or old.link_count <= names[old.inode]
        return not (single and self.known(host_path(change), old))

    def conflict(self, change: Change) -> str | None:
        """Why the change can not be applied, if it can not. OSError."""
        old, new, path = change.old, change.new, host_path(change)
        if in_place(change.path) or in_place(path):
            return "has a name that only an apply gives, to its own directory"
        if new is not None and new.type in ("char", "block") and change.kind is not Kind.TIMES:
            return "is a device node, which is not made on the host"
        try:
            found = self._host.stat(path)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return "is on a file system that is mounted inside the workspace"
            if error.errno != errno.ELOOP:
                raise
            found = None  # a link on the way, which is a change or a conflict of its own
        if not all(map(self._is_same_directory, {*parents(change.path), *parents(path)})):
            return "is in a directory that was replaced on the host"
        if old is None:
            if found is not None and not self._is_vacated(path):
                return "was made on the host meanwhile"
            return "was removed or moved on the host" if self._was_removed(change) else None
        if found is None or found.st_ino != old.inode:
            return "was replaced on the host, or something is mounted there"
        if moves_directory(change) or self.known(path, old):
            return None
        return "was changed on the host since the stage began"

    def _is_same_directory(self, path: bytes) -> bool:
        """Whether the host has the directory that the stage's was made over, or that an apply gave what is in it.

        Where the kernel noted none it has.
        """
        if path not in self._same:
            upper, lower = self._overlay.upper, self._overlay.lower
            source = self._layer.sources.get(path)
            here = lower.node(source) if source is not None and upper.note(path, "origin") else None
            self._same[path] = source is None or here is None or self._is_origin(path, source, here)
        return self._same[path]

    def _is_origin(self, path: bytes, source: bytes, here: Node) -> bool:
        below = origin(self._overlay.upper, self._overlay.lower, path)
        if below is not None and below.st_ino == here.inode:
            return True
        entry = self._history.entries.get(source)  # directories that the stage exchanges stay where they are
        return entry is not None and entry.host is not None and entry.host.inode == here.inode

    def _is_vacated(self, path: bytes) -> bool:
        """What has the name now is a directory that the stage has moved."""
        return any(within(path, source) for source in self._moved)

    def _was_removed(self, change: Change) -> bool:
        """Whether the stage's own is a copy of a host file that is no more."""
        entry = self._history.entries.get(change.path)
        if entry is not None and entry.host is not None:
            return True
        new, upper = change.new, self._overlay.upper
        if new is None or new.tree is not upper or new.inode in self._stage_inodes or change.links:
            return False
        if not upper.note(new.location, "origin"):
            return False
        shown = self._layer.get(*split(change.path))
        if shown is not None and shown.source is not None:  # the directory is there, under the name it moved from
            return False
        below = origin(upper, self._overlay.lower, new.location)
        return below is None or below.st_ino not in self._covered

    @cached_property
    def _covered(self) -> set[int]:
        """The host's inodes over which the stage has something: they may have been copied to other names by it."""
        lower = self._overlay.lower
        nodes = (lower.node(join(path, name)) for path, found in self._layer.entries.items() for name in found)
        return {node.inode for node in nodes if node is not None}
