"""What git's format has no words for, in words."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stage.edits.changes import Change, Kind
from stage.edits.names import quoted
from stage.edits.tree import Node

_USUAL_MODES = {0o644, 0o755}


def binary_note(change: Change, old: Node | None, new: Node | None) -> bytes:
    """A file of which only name and size are shown.

    Not in git's words: after the header of a rename `git apply` would take those for a patch that it can not apply.
    """
    shown = quoted(change.path)
    if old is None and new is not None:
        return b"binary file added: %s (%d bytes)" % (shown, new.size_bytes)
    before = change.old_path or change.path
    if new is None and old is not None:
        return b"binary file deleted: %s (%d bytes)" % (quoted(before), old.size_bytes)
    assert old is not None and new is not None
    if change.old_path is not None:
        shown = b"%s -> %s" % (quoted(before), shown)
    return b"binary file changed: %s (%d -> %d bytes)" % (shown, old.size_bytes, new.size_bytes)


def notes_of(change: Change) -> Iterator[bytes]:
    """One line for each thing that the patch of a change leaves out."""
    old, new = change.old, change.new
    yield from _kinds(change)
    if new is None:
        return
    before = old if old is not None and old.type == new.type else None
    yield from _mode(change, before, new)
    yield from _owner(change, before, new)
    yield from _attributes(change, before, new)
    if change.kind is Kind.ADDED and change.links:
        yield b"hard link: %s = %s" % (quoted(change.path), quoted(change.links[0]))
    if before is not None and before.link_count > 1 and new.link_count == 1 and not new.is_directory:
        yield b"hard link broken: %s was one of %d names of a file" % (quoted(change.path), before.link_count)


def _kinds(change: Change) -> Iterator[bytes]:
    """Directories and special files that come, go, move or change."""
    old, new, path = change.old, change.new, quoted(change.path)
    before = quoted(change.old_path or change.path)
    if change.kind in (Kind.DELETED, Kind.TYPE) and old is not None and _is_other(old):
        yield b"%s deleted: %s" % (_name(old), before)
    if change.kind in (Kind.ADDED, Kind.TYPE) and new is not None and _is_other(new):
        yield b"%s added: %s" % (_name(new), path)
    if change.kind is Kind.MODIFIED and new is not None and _is_other(new):
        yield b"%s changed: %s" % (_name(new), path)
    if change.kind is Kind.RENAMED and new is not None and _is_other(new):
        yield b"%s renamed: %s -> %s" % (_name(new), before, path)


def _mode(change: Change, old: Node | None, new: Node) -> Iterator[bytes]:
    if new.type == "symlink":
        return
    if old is None:
        if new.mode not in _USUAL_MODES or (new.mode != 0o755 and new.is_directory):
            yield b"mode %04o: %s" % (new.mode, quoted(change.path))
    elif old.mode != new.mode and (new.type != "file" or not {old.mode, new.mode} <= _USUAL_MODES):
        yield b"mode %04o -> %04o: %s" % (old.mode, new.mode, quoted(change.path))


def _owner(change: Change, old: Node | None, new: Node) -> Iterator[bytes]:
    if old is None and (new.uid, new.gid) != (0, 0):
        yield b"owner %d:%d: %s" % (new.uid, new.gid, quoted(change.path))
    elif old is not None and (old.uid, old.gid) != (new.uid, new.gid):
        yield b"owner %d:%d -> %d:%d: %s" % (old.uid, old.gid, new.uid, new.gid, quoted(change.path))


def _attributes(change: Change, old: Node | None, new: Node) -> Iterator[bytes]:
    before = old.xattrs if old is not None else {}
    names = sorted(name for name in new.xattrs.keys() | before.keys() if new.xattrs.get(name) != before.get(name))
    if names:
        yield b"attributes of %s: %s" % (quoted(change.path), b", ".join(quoted(name) for name in names))


def _is_other(node: Node) -> bool:
    return node.type not in ("file", "symlink")


def _name(node: Node) -> bytes:
    if node.type in ("char", "block"):
        return b"%s device %d:%d" % (node.type.encode(), os.major(node.rdev), os.minor(node.rdev))
    return node.type.encode()
