"""What pVisor itself makes in the root of a stage, which is no change of its workload."""

from __future__ import annotations

from collections.abc import Sequence

from stage.edits.changes import Change, Kind, Overlay
from stage.edits.layer import is_whiteout
from stage.edits.tree import ROOT, Node, join, parents, split
from stage.options import WORKSPACE

_MOUNT_POINTS = (b"dev", b"proc", b"sys", WORKSPACE.strip("/").encode())
_FILES = (b"etc/hosts", b"etc/resolv.conf")
_STEPS = 1000


def without_fixtures(changes: Sequence[Change], overlay: Overlay) -> list[Change]:
    """The changes but for mount points, which nothing can be written below, and directories that only lead to them."""
    fixtures = {_resolved(overlay, path) for path in (*_MOUNT_POINTS, *_FILES)} - {None}
    above = {directory for path in fixtures if path is not None for directory in parents(path)}
    kept: list[Change] = []
    needed: set[bytes] = set()
    for change in sorted(changes, key=lambda change: change.path, reverse=True):
        is_ours = change.path in fixtures or (change.path in above and change.path not in needed)
        if not (is_ours and change.kind is Kind.ADDED and change.new is not None and _is_plain(change.new)):
            kept.append(change)
            needed.update(parents(change.path))
    return kept[::-1]


def _is_plain(node: Node) -> bool:
    if (node.uid, node.gid) != (0, 0):
        return False
    return (node.mode == 0o755) if node.is_directory else (node.type, node.mode, node.size_bytes) == ("file", 0o644, 0)


def _resolved(overlay: Overlay, path: bytes) -> bytes | None:
    """Where the path leads inside the root, as far as it exists. None for links without end."""
    left, here = path.split(b"/")[::-1], ROOT
    for _ in range(_STEPS):
        if not left:
            return here
        name = left.pop()
        if name in (b"", b"."):
            continue
        if name == b"..":
            here = split(here)[0] if here != ROOT else ROOT
            continue
        node = _shown(overlay, join(here, name))
        if node is None or node.type != "symlink":
            here = join(here, name)
            continue
        if node.target.startswith(b"/"):
            here = ROOT
        left += node.target.split(b"/")[::-1]
    return None


def _shown(overlay: Overlay, path: bytes) -> Node | None:
    upper = overlay.upper.node(path)
    if upper is not None:
        return None if is_whiteout(upper) else upper
    return overlay.lower.node(path)
