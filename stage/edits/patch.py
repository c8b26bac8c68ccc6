"""Changes as text in git's format, which `git apply` and `patch -p1` accept.

What that format can not say stands before a file's part as lines with `# ` in front, which both programs skip: binary
content, directories, special files, owners, permission bits other than "executable", extended attributes, hard links.

https://git-scm.com/docs/diff-format#generate_patch_text_with_p
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace

from stage.edits.changes import Change, Kind
from stage.edits.content import Content, content, counts, hunks
from stage.edits.names import word
from stage.edits.notes import binary_note, notes_of
from stage.edits.tree import Node
from stage.edits.visible import in_patches

_LINK_MODE = b"120000"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """The difference of one name.

    `text` is its part of the patch, without the notes that go before it. The line counts are 0 for what has no lines;
    `is_binary` is a file whose content is named only, since it has NUL bytes or is too large.
    """

    change: Change
    notes: tuple[bytes, ...] = ()
    text: bytes = b""
    added_lines: int = 0
    removed_lines: int = 0
    is_binary: bool = False

    @property
    def rendered(self) -> bytes:
        return b"".join(b"# %s\n" % note for note in self.notes) + self.text


def patch(change: Change) -> FilePatch:
    """The text of one of the `visible` changes."""
    notes = tuple(notes_of(change))
    old, new = in_patches(change.old), in_patches(change.new)
    if old is None and new is None:
        return FilePatch(change=change, notes=notes)
    if change.kind is Kind.TYPE:  # two parts, as in git
        gone = _part(change, old, None)
        if gone.note and old is not None and change.new is not None and change.new.type in ("directory", "symlink"):
            gone = replace(gone, text=_binary_removal(change, old))  # else `git apply` finds it in the way
        return _joined(change, notes, gone, _part(change, None, new))
    return _joined(change, notes, _part(change, old, new))


@dataclass(frozen=True, slots=True)
class _Part:
    text: bytes = b""
    note: bytes = b""
    added_lines: int = 0
    removed_lines: int = 0


def _joined(change: Change, notes: tuple[bytes, ...], *parts: _Part) -> FilePatch:
    named = tuple(part.note for part in parts if part.note)
    return FilePatch(
        change=change,
        notes=notes + named,
        text=b"".join(part.text for part in parts),
        added_lines=sum(part.added_lines for part in parts),
        removed_lines=sum(part.removed_lines for part in parts),
        is_binary=bool(named),
    )


def _part(change: Change, old: Node | None, new: Node | None) -> _Part:
    if old is None and new is None:
        return _Part()
    if change.same_content and not _is_moved_link(change, new):
        return _Part(_header(change, old, new))
    with content(old) as before, content(new) as after:
        if not before.is_text or not after.is_text:
            return _Part(note=binary_note(change, old, new))
        body = hunks(before, after)
        header = _header(change, old, new)
        if not body and not header:
            return _Part()  # it was changed back meanwhile
        header = header or _first_line(change, old, new)
        text = header + _index(before, after, old, new)
        if body:
            text += _names(change, old, new) + body
        added, removed = counts(body)
        return _Part(text, added_lines=added, removed_lines=removed)


def _binary_removal(change: Change, old: Node) -> bytes:
    """What `git apply` takes when it finds that very content; nothing for a file that is too large to name it."""
    with content(old) as before, content(None) as after:
        if before.data is None:
            return b""
        index = _index(before, after, old, None)
    return _header(change, old, None) + index + b"Binary files %s and /dev/null differ\n" % word(b"a/" + change.path)


def _is_moved_link(change: Change, new: Node | None) -> bool:
    """GNU patch takes a symbolic link for one only when the index line has the mode."""
    return change.old_path is not None and new is not None and new.type == "symlink"


def _header(change: Change, old: Node | None, new: Node | None) -> bytes:
    """What happened to the name and the mode, if anything did."""
    lines = []
    if old is None and new is not None:
        lines.append(b"new file mode " + git_mode(new))
    elif new is None and old is not None:
        lines.append(b"deleted file mode " + git_mode(old))
    elif old is not None and new is not None:
        if git_mode(old) != git_mode(new):
            lines += [b"old mode " + git_mode(old), b"new mode " + git_mode(new)]
        if change.old_path is not None:
            if change.same_content:
                lines.append(b"similarity index 100%")
            lines += [b"rename from " + word(change.old_path), b"rename to " + word(change.path)]
    if not lines:
        return b""
    return _first_line(change, old, new) + b"\n".join(lines) + b"\n"


def _first_line(change: Change, old: Node | None, new: Node | None) -> bytes:
    """Both sides are named, also when there is only one."""
    before = change.old_path or change.path if old is not None else change.path
    after = change.path if new is not None else before
    return b"diff --git %s %s\n" % (word(b"a/" + before), word(b"b/" + after))


def _index(before: Content, after: Content, old: Node | None, new: Node | None) -> bytes:
    ids = [item.blob_id if node is not None else b"0" * 40 for item, node in ((before, old), (after, new))]
    same_mode = old is not None and new is not None and git_mode(old) == git_mode(new)
    return b"index %s..%s%s\n" % (*ids, b" " + git_mode(old) if same_mode and old is not None else b"")


def _names(change: Change, old: Node | None, new: Node | None) -> bytes:
    before = word(b"a/" + (change.old_path or change.path)) if old is not None else b"/dev/null"
    after = word(b"b/" + change.path) if new is not None else b"/dev/null"
    return b"--- %s\n+++ %s\n" % (before, after)


def git_mode(node: Node) -> bytes:
    """Git knows three kinds of file: plain, executable for its owner, and symbolic link."""
    if node.type == "symlink":
        return _LINK_MODE
    return b"100755" if node.mode & stat.S_IXUSR else b"100644"
