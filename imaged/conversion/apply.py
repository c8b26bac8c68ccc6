"""Apply layers to a tree, lowest first, as a careful extraction would: whiteouts, replacement, links.

Paths are resolved inside the root: a parent that is a symlink is followed there, absolute targets start at the root,
and `..` stops at it. Whiteouts and opaque directories act on what lower layers made, wherever in their layer they
stand, so they go first; then the entries, in order, so that the last of one name wins.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import NoReturn

from imaged.conversion.layer import HardLink, Layer, LayerEntry, NodeEntry, Opaque, Whiteout
from imaged.erofs.tree import Inode
from imaged.errors import LayerError

PARENT_MODE = stat.S_IFDIR | 0o755
_SYMLINKS_LIMIT = 255


class _ResolveError(Exception):
    """A path that leads nowhere: through a file, or through too many symlinks."""


@dataclass(slots=True)
class _Step:
    """One directory on the way down; `inode` is None while nothing is there."""

    name: bytes
    inode: Inode | None


class Tree:
    """The tree of an image while its layers are applied. For one thread."""

    def __init__(self) -> None:
        self.root = Inode(PARENT_MODE)
        self._directories: dict[bytes, Inode] = {b"": self.root}

    def apply(self, layer: Layer, *, name: str = "") -> None:
        """Apply one layer; `name` is for errors. LayerError leaves the tree of no use.

        The tree takes the layer's inodes as its own: apply a Layer once, and parse its memo again for a second time.
        """
        _LayerApplication(self, layer, name).run()

    def resolve(self, path: bytes, *, upper_directories: frozenset[bytes] = frozenset()) -> list[_Step]:
        """The way to a directory, from the root, following symlinks; _ResolveError when there is a file in it.

        `upper_directories` are paths where a directory is going to be, whatever is there now.
        """
        steps = [_Step(b"", self.root)]
        pending = path.split(b"/")[::-1] if path else []
        lexical: list[bytes] | None = []
        followed = 0
        while pending:
            component = pending.pop()
            if component in (b"", b"."):
                continue
            if component == b"..":
                if len(steps) > 1:
                    steps.pop()
                continue
            if lexical is not None:
                lexical.append(component)
            parent = steps[-1].inode
            child = parent.children.get(component) if parent is not None else None
            if child is None or child.is_directory:
                steps.append(_Step(component, child))
            elif child.is_symlink and not (lexical is not None and b"/".join(lexical) in upper_directories):
                followed += 1
                if followed > _SYMLINKS_LIMIT:
                    raise _ResolveError(f"more than {_SYMLINKS_LIMIT} symlinks")
                if child.target.startswith(b"/"):
                    del steps[1:]
                pending += child.target.split(b"/")[::-1]
                lexical = None
            else:
                raise _ResolveError(f"{b'/'.join(one.name for one in steps[1:]) + b'/' + component!r} is no directory")
        return steps

    def directory(self, path: bytes) -> Inode:
        """The directory at this path, made with its parents (mode 0755, owner 0:0) where it is not there."""
        found = self._directories.get(path)
        if found is None:
            steps = self.resolve(path)
            found = self.root
            for step in steps[1:]:
                if step.inode is None:
                    step.inode = found.children[step.name] = Inode(PARENT_MODE)
                found = step.inode
            self._directories[path] = found
        return found

    def existing_directory(self, path: bytes, upper_directories: frozenset[bytes] = frozenset()) -> Inode | None:
        """The directory at this path, or None."""
        try:
            return self.resolve(path, upper_directories=upper_directories)[-1].inode
        except _ResolveError:
            return None

    def lookup(self, path: bytes) -> Inode | None:
        """What has this name; the last component is not followed."""
        if not path:
            return self.root
        directory, _, name = path.rpartition(b"/")
        parent = self._directories.get(directory) or self.existing_directory(directory)
        return None if parent is None else parent.children.get(name)

    def forget_directories(self) -> None:
        """Paths may lead elsewhere now: a directory or a symlink went away."""
        self._directories = {b"": self.root}


class _LayerApplication:
    """The state of applying one layer."""

    def __init__(self, tree: Tree, layer: Layer, name: str) -> None:
        self._tree = tree
        self._entries = layer.entries
        self._name = name
        self._removed: dict[bytes, Inode] = {}
        self._last_writer: dict[bytes, int] = {}
        """For layers with hard links: the last entry of each path."""

    def run(self) -> None:
        self._hide_lower()
        deferred = self._put_entries()
        self._put_deferred(deferred)

    def _fail(self, entry: LayerEntry, message: str) -> NoReturn:
        hint = "the layer is malformed; build the image again"
        raise LayerError(message, layer=self._name, entry=entry.path or b"/", hint=hint)

    def _hide_lower(self) -> None:
        """Take out what whiteouts and opaque directories hide."""
        markers = [entry for entry in self._entries if isinstance(entry, Whiteout | Opaque)]
        if not markers:
            return
        tree = self._tree
        # Where this layer has a directory in place of a lower symlink, a whiteout inside must not follow the symlink.
        upper_directories = frozenset(
            entry.path for entry in self._entries if isinstance(entry, NodeEntry) and entry.inode.is_directory
        )
        for entry in markers:
            if isinstance(entry, Opaque):
                directory = tree.existing_directory(entry.path, upper_directories)
                if directory is not None:
                    prefix = entry.path + b"/" if entry.path else b""
                    self._removed.update((prefix + name, inode) for name, inode in directory.children.items())
                    directory.children.clear()
                continue
            parent_path, _, name = entry.path.rpartition(b"/")
            directory = tree.existing_directory(parent_path, upper_directories)
            if directory is not None:
                gone = directory.children.pop(name, None)
                if gone is not None:
                    self._removed[entry.path] = gone
        tree.forget_directories()

    def _put_entries(self) -> list[tuple[int, HardLink]]:
        """The entries in order; gives the hard links to what is not there yet."""
        deferred: list[tuple[int, HardLink]] = []
        if any(isinstance(entry, HardLink) for entry in self._entries):
            self._last_writer = {
                entry.path: index
                for index, entry in enumerate(self._entries)
                if isinstance(entry, NodeEntry | HardLink)
            }
        for index, entry in enumerate(self._entries):
            if isinstance(entry, NodeEntry):
                try:
                    self._put(entry, entry.inode)
                except _ResolveError as error:
                    self._fail_parent(entry, error)
            elif isinstance(entry, HardLink) and not self._link(entry):
                deferred.append((index, entry))
        return deferred

    def _put(self, entry: LayerEntry, inode: Inode) -> None:
        """Put an inode under the entry's name, in place of what is there."""
        tree = self._tree
        parent_path, _, name = entry.path.rpartition(b"/")
        if not name:
            if not inode.is_directory:
                self._fail(entry, "the root can only be a directory")
            _take_metadata(tree.root, inode)
            return
        children = tree.directory(parent_path).children
        existing = children.get(name)
        if existing is None:
            children[name] = inode
        elif existing.is_directory and inode.is_directory:
            _take_metadata(existing, inode)
        else:
            children[name] = inode
            if existing.is_directory or existing.is_symlink:
                tree.forget_directories()

    def _link(self, entry: HardLink) -> bool:
        """Give the target another name; False when there is no target (yet)."""
        try:
            target = self._tree.lookup(entry.target) or self._find_removed(entry.target)
            if target is None:
                return False
            if target.is_directory or entry.target.startswith(entry.path + b"/"):
                self._fail(entry, f"hard link to {_text(entry.target)}, which is a directory or below the link itself")
            self._put(entry, target)
        except _ResolveError as error:
            self._fail_parent(entry, error)
        return True

    def _find_removed(self, path: bytes) -> Inode | None:
        """A file that a whiteout of this layer took away: a rename shows as a link to the old name and its whiteout."""
        head, rest = path, []
        while head not in self._removed:
            head, slash, name = head.rpartition(b"/")
            if not slash:
                return None
            rest.append(name)
        inode: Inode | None = self._removed[head]
        while rest and inode is not None:
            inode = inode.children.get(rest.pop())
        return inode

    def _put_deferred(self, deferred: list[tuple[int, HardLink]]) -> None:
        """The links whose target stood after them; one that is made lets those go that wait for its name."""
        waiting: dict[bytes, list[HardLink]] = {}
        for index, entry in deferred:
            if self._last_writer[entry.path] == index:
                waiting.setdefault(entry.target, []).append(entry)
        while waiting:
            count = len(waiting)
            for target in list(waiting):
                made = [target]
                while made:
                    target = made.pop()
                    entries = waiting.pop(target, [])
                    if all(self._link(entry) for entry in entries):
                        made += [entry.path for entry in entries]
                    else:
                        waiting[target] = entries
            if len(waiting) == count:
                entry = next(iter(waiting.values()))[0]
                self._fail(entry, f"hard link to {_text(entry.target)}, which is not in the image")

    def _fail_parent(self, entry: LayerEntry, error: _ResolveError) -> NoReturn:
        self._fail(entry, f"its parent can not be made: {error}")


def _take_metadata(existing: Inode, new: Inode) -> None:
    """A directory over a directory keeps the children and takes everything else."""
    existing.mode, existing.uid, existing.gid = new.mode, new.uid, new.gid
    existing.mtime_ns, existing.xattrs = new.mtime_ns, new.xattrs


def _text(path: bytes) -> str:
    return repr(path.decode(errors="backslashreplace")[:200])
