"""What overlayfs notes in an upper directory: whiteouts, opaque and moved directories, where a copy came from.

https://docs.kernel.org/filesystems/overlayfs.html, and fs/overlayfs/overlayfs.h for the file handles.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fuse import linux
from stage.edits.tree import ROOT, Node, Tree, absent, join

# struct ovl_fb: version, magic, length, flags, type, uuid; then the handle itself.
_HANDLE = struct.Struct("=BBBBB16s")
_HANDLE_MAGIC = 0xFB


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A name in an upper directory. `source` is the lower directory that shows through a directory, if one does."""

    node: Node
    source: bytes | None = None
    moved: bool = False  # `source` is not where the directory's name says

    @property
    def is_whiteout(self) -> bool:
        return is_whiteout(self.node)


class Layer:
    """The directories and entries of an upper directory, as one pass over it found them."""

    def __init__(self, upper: Tree, lower: Tree) -> None:
        self.root = upper.node(ROOT)
        self.entries: dict[bytes, dict[bytes, Entry]] = {}
        self.sources: dict[bytes, bytes | None] = {ROOT: ROOT}
        pending = [ROOT]
        while pending:
            path = pending.pop()
            found = self.entries[path] = self._scan(upper, lower, path)
            for name, entry in found.items():
                if entry.node.is_directory:
                    child = join(path, name)
                    self.sources[child] = entry.source
                    pending.append(child)

    def get(self, path: bytes, name: bytes) -> Entry | None:
        return self.entries.get(path, {}).get(name)

    def put(self, path: bytes, name: bytes, entry: Entry) -> None:
        """Adds an entry that the upper directory does not have under this name."""
        self.entries.setdefault(path, {})[name] = entry
        if entry.node.is_directory:
            self.sources[join(path, name)] = entry.source

    def moved(self) -> dict[bytes, bytes]:
        """Where each moved lower directory is in the overlay."""
        return {
            entry.source: join(path, name)
            for path, found in self.entries.items()
            for name, entry in found.items()
            if entry.moved and entry.source is not None
        }

    def _scan(self, upper: Tree, lower: Tree, path: bytes) -> dict[bytes, Entry]:
        found: dict[bytes, Entry] = {}
        for name, node in nodes(upper, path):
            if node.is_directory:
                entry = self._directory(upper, lower, node, self.sources[path], name)
                found[name] = entry
            else:
                found[name] = Entry(node=node)
        return found

    def _directory(self, upper: Tree, lower: Tree, node: Node, parent: bytes | None, name: bytes) -> Entry:
        if upper.note(node.location, "opaque") == b"y":
            return Entry(node=node)
        redirect = upper.note(node.location, "redirect")
        if redirect.startswith(b"/"):
            source: bytes | None = redirect.strip(b"/")
        else:
            source = join(parent, redirect or name) if parent is not None else None
        below = lower.node(source) if source is not None else None
        if below is None or not below.is_directory:
            return Entry(node=node)
        return Entry(node=node, source=source, moved=bool(redirect))


def nodes(tree: Tree, path: bytes) -> Iterator[tuple[bytes, Node]]:
    """The nodes in a directory by name; those that vanish meanwhile are left out."""
    names = tree.names(path)
    if not names:
        return
    try:
        with tree.directory(path) as fd:
            for name in names:
                node = tree.node_in(fd, join(path, name), name)
                if node is not None:
                    yield name, node
    except OSError as error:
        if not absent(error):
            raise


def is_whiteout(node: Node) -> bool:
    """Whether the name does not exist in the overlay, whatever is below."""
    return node.type == "char" and node.rdev == 0


def lower_node(lower: Tree, path: bytes) -> Node | None:
    """What a lower directory shows at `path`: a whiteout there hides itself."""
    node = lower.node(path)
    return None if node is None or is_whiteout(node) else node


def origin(upper: Tree, lower: Tree, path: bytes) -> os.stat_result | None:
    """The lower file that an upper one was copied from; None when it was not, or the kernel can not tell."""
    note = upper.note(path, "origin")
    if len(note) <= _HANDLE.size:
        return None
    version, magic, length, _flags, kind, _uuid = _HANDLE.unpack_from(note)
    if version != 0 or magic != _HANDLE_MAGIC or length != len(note):
        return None
    with lower.directory(ROOT) as directory:
        try:
            fd = linux.open_handle(directory, kind, note[_HANDLE.size :], os.O_PATH)
        except OSError as error:
            if absent(error):
                return None
            raise
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


class HardLinks:
    """The index of an overlay: files with several names below that were changed by one of them, and so by all."""

    def __init__(self, index: Tree, lower: Tree) -> None:
        self._lower = lower
        self.left: dict[int, tuple[Node, int]] = {}
        """By lower inode: the changed file, and how many of its names have no entry in the upper directory."""
        for name, node in nodes(index, ROOT):
            if node.is_directory or is_whiteout(node):
                continue
            below = origin(index, lower, name)
            if below is None or stat.S_ISDIR(below.st_mode):
                continue
            names = _total_links(index.note(name, "nlink"), node.link_count, below.st_nlink)
            left = names - (node.link_count - 1)  # one of them is the index entry itself
            if left > 0:
                self.left[below.st_ino] = replace(node, link_count=names), left

    def add_to(self, layer: Layer) -> None:
        """Gives those other names an entry each, found by a walk of the lower directory that reads names only."""
        if not self.left:
            return
        moved = layer.moved()
        missing = {inode: left for inode, (_, left) in self.left.items()}
        for path, inode in _files(self._lower):
            if inode not in missing:
                continue
            shown = _shown_at(layer, moved, path)
            if shown is None:
                continue
            self._insert(layer, shown, path, self.left[inode][0])
            missing[inode] -= 1
            if not missing[inode]:
                del missing[inode]
                if not missing:
                    return

    def _insert(self, layer: Layer, shown: bytes, path: bytes, node: Node) -> None:
        """Adds the entry, and the directories above it that only the lower directory has."""
        steps, below = shown.split(b"/"), path.split(b"/")
        here = ROOT
        for depth, name in enumerate(steps[:-1]):
            if layer.get(here, name) is None:
                source = b"/".join(below[: len(below) - (len(steps) - 1 - depth)])
                directory = self._lower.node(source)
                if directory is None:
                    return
                layer.put(here, name, Entry(node=directory, source=source))
            here = join(here, name)
        if layer.get(here, steps[-1]) is None:
            layer.put(here, steps[-1], Entry(node=node))


def _total_links(note: bytes, upper: int, lower: int) -> int:
    """The names that a file has in the overlay: noted as a difference to those of the upper or the lower file."""
    if note[:1] not in (b"U", b"L"):
        return upper
    return (upper if note[:1] == b"U" else lower) + int(note[1:])


def _files(tree: Tree) -> Iterator[tuple[bytes, int]]:
    """Every path that is no directory, with its inode number as the directory has it."""
    pending = [ROOT]
    while pending:
        path = pending.pop()
        try:
            with tree.directory(path) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    child = join(path, os.fsencode(entry.name))
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(child)
                    else:
                        yield child, entry.inode()
        except OSError as error:
            if not absent(error):
                raise


def _shown_at(layer: Layer, moved: dict[bytes, bytes], path: bytes) -> bytes | None:
    """Where the overlay shows a lower file; None when an entry of the upper directory hides or replaces it."""
    steps = path.split(b"/")
    here, below, rest = ROOT, ROOT, steps
    for count in range(len(steps) - 1, 0, -1):
        prefix = b"/".join(steps[:count])
        if prefix in moved:
            here, below, rest = moved[prefix], prefix, steps[count:]
            break
    shown = b"/".join(rest) if here == ROOT else here + b"/" + b"/".join(rest)
    for name in rest:
        if here not in layer.entries:
            return shown
        entry = layer.get(here, name)
        below = join(below, name)
        if entry is None:
            return shown if layer.sources[here] is not None else None
        if not entry.node.is_directory or entry.source != below:
            return None
        here = join(here, name)
    return None
