"""What a stage changed: its upper directory against what lies below."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from stage.edits.compare import same_content, same_metadata
from stage.edits.layer import Entry, HardLinks, Layer, lower_node
from stage.edits.renames import renamed
from stage.edits.tree import ROOT, Node, Tree, join
from stage.hostpath import in_place

__all__ = ["Change", "Kind", "Node", "Overlay", "changes", "difference"]


class Kind(StrEnum):
    """What happened to a name."""

    ADDED = "added"
    DELETED = "deleted"
    MODIFIED = "modified"  # other bytes, link target or device number; perhaps other metadata as well
    TYPE = "type"  # a file became a directory, and the like
    MODE = "mode"  # only mode, owner or extended attributes
    RENAMED = "renamed"  # perhaps with other bytes and metadata: see `same_content`
    TIMES = "times"  # only the modification time: nothing to review, but kept by an apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One name whose state in the stage (`new`) is not that of the base (`old`).

    Directories that were added, deleted or have another type are a change each, as is everything in them. A renamed
    directory is one change: what is in it has moved along, and changes below it are against the moved tree, with their
    place in the base in `old_path`. Sorted by path, a directory comes before what is in it.
    """

    path: bytes  # relative; `stage.edits.tree.ROOT` for the directory itself
    kind: Kind
    old: Node | None  # in the lower directory
    new: Node | None  # in the upper directory (in overlayfs' index for a hard link that was changed by another name)
    old_path: bytes | None = None  # where the base has `old`, when that is not `path`
    same_content: bool = False  # `old` and `new` have the same type and the same bytes, target or device number
    links: tuple[bytes, ...] = ()  # other names of the same file in the stage, changed or not, that are known


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """The layers of an overlay: writes, what lies below, and the index of changed hard links (`work/index`) if any."""

    upper: Tree
    lower: Tree
    index: Tree | None = None

    @classmethod
    @contextmanager
    def opened(cls, *, upper: Path, lower: Path, work: Path) -> Iterator[Overlay]:
        """The overlay of these directories, mounted or not."""
        with ExitStack() as stack:
            index = stack.enter_context(Tree(work / "index")) if (work / "index").is_dir() else None
            yield cls(upper=stack.enter_context(Tree(upper)), lower=stack.enter_context(Tree(lower)), index=index)


Settled = Callable[[bytes, Node | None], bool]
Unseen = Callable[[bytes, Node], bool]


def changes(
    overlay: Overlay,
    *,
    settled: Settled = lambda path, upper: False,
    unseen: Unseen = lambda path, directory: False,
) -> Iterator[Change]:
    """The net effect of the upper directory, sorted by path.

    A name for which `settled(path, upper)` holds is left out, and so is what was deleted with it; `upper` is its entry
    in the upper directory (a whiteout is a `char` node with rdev 0), or None for what an opaque directory hides. Nor is
    a name of the lower `directory` deleted by a directory of the stage's own over it when `unseen(path, directory)`.

    Only the upper directory is walked, and what was deleted or moved below; where a file with several names was changed
    by some of them, the names of the lower directory are searched for the others. Works while the stage runs.
    """
    layer = Layer(overlay.upper, overlay.lower)
    if overlay.index is not None:
        HardLinks(overlay.index, overlay.lower).add_to(layer)
    found = _with_renamed_files(_Comparison(overlay, layer, settled, unseen).run(), overlay)
    links = _names_of_files(layer)
    for change in sorted(found, key=lambda change: change.path):
        node = change.new
        names = links.get((node.device, node.inode), ()) if node is not None else ()
        others = tuple(name for name in names if name != change.path)
        yield replace(change, links=others) if others else change


def _with_renamed_files(found: Sequence[Change], overlay: Overlay) -> list[Change]:
    """The changes with each file that was deleted here and added there as one."""
    deleted = {change.old_path or change.path: change for change in found if change.kind is Kind.DELETED}
    added = {change.path: change for change in found if change.kind is Kind.ADDED}
    pairs = renamed(
        {path: change.old for path, change in deleted.items() if change.old is not None},
        {path: change.new for path, change in added.items() if change.new is not None},
        upper=overlay.upper,
        lower=overlay.lower,
    )
    if not pairs:
        return list(found)
    told = {id(added[path]) for path in pairs} | {id(deleted[path]) for path in pairs.values()}
    kept = [change for change in found if id(change) not in told]
    for path, old_path in pairs.items():
        old, new = deleted[old_path].old, added[path].new
        assert old is not None and new is not None
        kept.append(
            Change(
                path=path, kind=Kind.RENAMED, old=old, new=new, old_path=old_path, same_content=same_content(old, new)
            )
        )
    return kept


def _names_of_files(layer: Layer) -> dict[tuple[int, int], list[bytes]]:
    names: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    for directory, entries in layer.entries.items():
        for name, entry in entries.items():
            node = entry.node
            if node.link_count > 1 and not node.is_directory and not entry.is_whiteout:
                names[node.device, node.inode].append(join(directory, name))
    return {key: sorted(found) for key, found in names.items() if len(found) > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A directory in the overlay, made of upper entries and `source` below, and the one in the base it is held against.

    Paths of lower directories; None where there is none.
    """

    path: bytes
    source: bytes | None
    base: bytes | None
    made: bool = False  # an upper directory


class _Comparison:
    """One walk over a layer. A directory that shows its own base needs only its upper entries looked at."""

    def __init__(self, overlay: Overlay, layer: Layer, settled: Settled, unseen: Unseen) -> None:
        self._lower, self._layer, self._settled, self._unseen = overlay.lower, layer, settled, unseen
        self._gone = self._renamed_directories()
        self._pending = [_Pair(path=ROOT, source=ROOT, base=ROOT)]
        self._found: list[Change] = []

    def run(self) -> list[Change]:
        if not self._settled(ROOT, self._layer.root):
            self._add(ROOT, self._lower.node(ROOT), self._layer.root, ROOT)
        while self._pending:
            self._directory(self._pending.pop())
        return self._found

    def _renamed_directories(self) -> set[bytes]:
        """The lower directories whose move is told as a rename: where they are now, the base has nothing.

        Others are compared name by name, since two things would have one path in the base.
        """
        gone: set[bytes] = set()
        pending = [(ROOT, ROOT)]
        while pending:
            path, base = pending.pop()
            for name, entry in self._layer.entries.get(path, {}).items():
                if not entry.node.is_directory:
                    continue
                here = join(base, name)
                if entry.moved and entry.source is not None and lower_node(self._lower, here) is None:
                    gone.add(entry.source)
                    here = entry.source
                pending.append((join(path, name), here))
        return gone

    def _directory(self, pair: _Pair) -> None:
        entries = self._layer.entries.get(pair.path, {})
        names = set(entries)
        if pair.source != pair.base:
            for below in (pair.source, pair.base):
                if below is not None:
                    names.update(self._lower.names(below))
        hides = pair.made and pair.source is None and pair.base is not None
        hidden = self._lower.node(pair.base) if hides and pair.base is not None else None
        for name in names:
            entry = entries.get(name)
            if entry is None and hidden is not None and self._unseen(join(pair.path, name), hidden):
                continue
            if pair.path != ROOT or not self._is_place(name):
                self._name(pair, name, entry)

    def _is_place(self, name: bytes) -> bool:
        """The private directory that an apply has there, or has left: nobody's change, and never applied."""
        if not in_place(name):
            return False
        node = self._lower.node(name)
        return node is not None and node.is_directory and node.mode == 0o700 and node.uid == os.geteuid()

    def _name(self, pair: _Pair, name: bytes, entry: Entry | None) -> None:
        path = join(pair.path, name)
        base = join(pair.base, name) if pair.base is not None else None
        source: bytes | None = None
        new: Node | None = None
        if entry is None:
            source = join(pair.source, name) if pair.source is not None else None
            new = lower_node(self._lower, source) if source is not None else None
        elif not entry.is_whiteout:
            source, new = entry.source, entry.node
        if entry is not None and entry.moved and source in self._gone:
            base = source
        elif base in self._gone:
            base = None
        old = lower_node(self._lower, base) if base is not None else None
        settled = (entry is not None or new is None) and self._settled(path, entry.node if entry is not None else None)
        if settled and (new is None or not new.is_directory):
            return
        if not settled:
            self._add(path, old, new, base)
        shown = source if new is not None and new.is_directory else None
        held = base if old is not None and old.is_directory else None
        is_directory = new is not None and new.is_directory
        if is_directory or held is not None:
            made = is_directory and entry is not None
            self._pending.append(_Pair(path=path, source=shown, base=held, made=made))

    def _add(self, path: bytes, old: Node | None, new: Node | None, base: bytes | None) -> None:
        kind, same = difference(old, new)
        if old is not None and new is not None and base != path and base in self._gone:
            kind = Kind.RENAMED
        if kind is not None:
            old_path = base if old is not None and base != path else None
            self._found.append(Change(path=path, kind=kind, old=old, new=new, old_path=old_path, same_content=same))


def difference(old: Node | None, new: Node | None) -> tuple[Kind | None, bool]:
    """What happened, if anything, and whether the content stayed the same."""
    if old is None or new is None:
        return (Kind.ADDED if new is not None else Kind.DELETED if old is not None else None), False
    if old.type != new.type:
        return Kind.TYPE, False
    if not same_content(old, new):
        return Kind.MODIFIED, False
    if not same_metadata(old, new):
        return Kind.MODE, True
    return (Kind.TIMES if old.mtime_ns != new.mtime_ns else None), True
