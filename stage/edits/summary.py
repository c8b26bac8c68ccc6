"""Patches in short: a line each with how much of it changed, or fields for programs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stage.edits.changes import Change, Kind
from stage.edits.names import quoted
from stage.edits.patch import FilePatch
from stage.edits.tree import Node

_WIDTH = 80
_LEAST_GRAPH = 10


def shown_path(change: Change) -> bytes:
    """The path a change goes by: of what is gone, where the base has it."""
    return change.old_path if change.new is None and change.old_path is not None else change.path


def names(changes: Iterable[Change], *, zero: bool) -> Iterator[bytes]:
    """Paths, each on a line or before a NUL byte; quoted only on lines, where any byte could not be told."""
    for change in changes:
        path = shown_path(change)
        yield path + b"\0" if zero else quoted(path) + b"\n"


def stat(patches: Sequence[FilePatch]) -> Iterator[bytes]:
    """Lines as of `git diff --stat`, and the total."""
    names = [_name(patch.change) for patch in patches]
    counts = [patch.added_lines + patch.removed_lines for patch in patches]
    name_width = max(map(len, names), default=0)
    digits = max([len(str(count)) for count in counts] + [3 * patch.is_binary for patch in patches], default=0)
    graph = max(_LEAST_GRAPH, _WIDTH - name_width - digits - 6)
    scale = min(1.0, graph / max([*counts, 1]))
    for patch, name, count in zip(patches, names, counts, strict=True):
        yield b" %s | %s\n" % (name.ljust(name_width), _amount(patch, count, digits, scale))
    if patches:
        yield _total(patches)


def _name(change: Change) -> bytes:
    if change.kind is Kind.RENAMED and change.old_path is not None:
        return b"%s => %s" % (quoted(change.old_path), quoted(change.path))
    return quoted(shown_path(change))


def _amount(patch: FilePatch, count: int, digits: int, scale: float) -> bytes:
    change = patch.change
    if patch.is_binary:
        sizes = (change.old.size_bytes if change.old else 0, change.new.size_bytes if change.new else 0)
        return b"%*s %d -> %d bytes" % (digits, b"Bin", *sizes)
    if count == 0:
        node = change.new or change.old
        return b"%s %s" % (change.kind.encode(), node.type.encode() if node else b"")
    return b"%*d %s%s" % (digits, count, _bar(b"+", patch.added_lines, scale), _bar(b"-", patch.removed_lines, scale))


def _bar(sign: bytes, count: int, scale: float) -> bytes:
    return sign * max(int(count * scale), min(count, 1))


def _total(patches: Sequence[FilePatch]) -> bytes:
    added, removed = sum(patch.added_lines for patch in patches), sum(patch.removed_lines for patch in patches)
    files = sum(not _is_directory(patch.change) for patch in patches)
    text = f" {files} file{'s' * (files != 1)} changed"
    if files and (added or not removed):
        text += f", {added} insertion{'s' * (added != 1)}(+)"
    if files and (removed or not added):
        text += f", {removed} deletion{'s' * (removed != 1)}(-)"
    return text.encode() + b"\n"


def _is_directory(change: Change) -> bool:
    return all(node is None or node.is_directory for node in (change.old, change.new))


def document(patch: FilePatch) -> dict[str, Any]:
    """A change as JSON has it. Bytes of paths that are not UTF-8 are lone surrogates, as in Python's file names."""
    change = patch.change
    return {
        "path": os.fsdecode(change.path),
        "kind": str(change.kind),
        "old_path": os.fsdecode(change.old_path) if change.old_path is not None else None,
        "old": _fields(change.old),
        "new": _fields(change.new),
        "added_lines": patch.added_lines,
        "removed_lines": patch.removed_lines,
        "binary": patch.is_binary,
        "notes": [os.fsdecode(note) for note in patch.notes],
    }


def _fields(node: Node | None) -> dict[str, Any] | None:
    if node is None:
        return None
    fields: dict[str, Any] = {
        "type": node.type,
        "mode": f"{node.mode:04o}",
        "uid": node.uid,
        "gid": node.gid,
        "size_bytes": node.size_bytes,
        "mtime_ns": node.mtime_ns,
        "xattrs": sorted(os.fsdecode(name) for name in node.xattrs),
    }
    if node.type == "symlink":
        fields["target"] = os.fsdecode(node.target)
    if node.type in ("char", "block"):
        fields["device"] = [os.major(node.rdev), os.minor(node.rdev)]
    return fields
