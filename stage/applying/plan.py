"""What an apply would do: which changes, whether the host is still what they were made from, and the steps.

Nothing is written here. New content is copied beside the workspace first (`Copy`), then steps move it into place:

    take    what goes away or gets another name, deepest first
    put     what is new, parents first; swap what is replaced; set what only has other attributes

A new directory comes as one tree, with everything that is new in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from stage.applying.closure import concerned, host_path, moves, moves_directory, removes_directory, together
from stage.applying.conflicts import Conflict, Conflicts
from stage.applying.history import Identity
from stage.applying.ledger import Action, Step
from stage.applying.replica import Attributes
from stage.edits.changes import Change, Kind, Overlay
from stage.edits.layer import Layer
from stage.edits.tree import ROOT, Node, parents, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Something to make in the place: a copy of `node`, or another name of what is in the place or on the host."""

    target: bytes
    node: Node
    beside: bytes | None = None  # in the place
    host: bytes | None = None  # in the workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A name after the apply: the host has what is made as `copied` in the place, or what it had before (`host`)."""

    path: bytes
    stage: Identity | None
    copied: bytes | None = None
    host: Identity | None = None


@dataclass(slots=True)
class Plan:
    """Paths and steps; see `stage.applying.ledger.Journal` for the last ones."""

    changes: list[Change]
    conflicts: list[Conflict] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    takes: list[Step] = field(default_factory=list)
    puts: list[Step] = field(default_factory=list)
    removed: dict[int, int] = field(default_factory=dict)
    """The inodes that go with a directory, and their ctime_ns; nothing else may be in it. 0: has other names, too."""
    outcomes: list[Outcome] = field(default_factory=list)
    parents: list[tuple[bytes, int]] = field(default_factory=list)
    touched: list[bytes] = field(default_factory=list)
    times: list[tuple[bytes, int]] = field(default_factory=list)
    moved: list[tuple[bytes, bytes]] = field(default_factory=list)
    redirected: list[bytes] = field(default_factory=list)
    shared: list[tuple[bytes, Identity]] = field(default_factory=list)


class Planner:
    """Makes one plan. What the stage wrote after `fresh_ns` may still change without another time."""

    def __init__(self, overlay: Overlay, conflicts: Conflicts, layer: Layer, *, fresh_ns: int) -> None:
        self._overlay, self._conflicts, self._fresh_ns = overlay, conflicts, fresh_ns
        self._moved = moves(layer)
        self._renames: list[Change] = []
        self._sources: dict[bytes, bytes] = {}
        self._targets: dict[bytes, bytes] = {}
        self._numbers: dict[bytes, int] = {}  # what moves: its name in the place
        self._number = 0
        self._staged: dict[bytes, bytes] = {}  # new directories: where the place has them
        self._linked: dict[tuple[int, int], Copy] = {}  # files with several names: where further ones are linked to

    def plan(self, changes: Sequence[Change], paths: Sequence[bytes]) -> Plan:
        """For everything pending, or what is chosen by `paths`. Nothing must be done when there are conflicts."""
        chosen = together(changes, paths, self._moved) if paths else list(changes)
        names = Counter(change.old.inode for change in chosen if change.old is not None)
        chosen = [change for change in chosen if not self._conflicts.is_idle(change, names)]
        plan = Plan(changes=chosen)
        plan.conflicts = [
            Conflict(path=change.path, reason=reason)
            for change in chosen
            for reason in [self._conflicts.conflict(change)]
            if reason is not None
        ]
        if plan.conflicts:
            return plan
        self._renames = [change for change in chosen if moves_directory(change)]
        self._sources = {change.path: host_path(change) for change in self._renames}
        self._targets = {host_path(change): change.path for change in self._renames}
        self._take(plan)
        self._anchor(plan, changes)
        for change in chosen:
            if change.new is not None:
                self._put(plan, change, change.new)
        self._settle(plan, changes)
        return plan

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _take(self, plan: Plan) -> None:
        tops = {host_path(change) for change in plan.changes if removes_directory(change)}
        for change in sorted(plan.changes, key=lambda change: host_path(change).count(b"/"), reverse=True):
            old, path = change.old, host_path(change)
            if old is None:
                continue
            if not old.is_directory and old.link_count > 1:
                plan.shared.append((path, Identity.of(old)))
            moves = self._moves(change)
            goes = change.kind in (Kind.DELETED, Kind.RENAMED)
            if (goes and not moves) or removes_directory(change):
                plan.removed[old.inode] = old.ctime_ns if old.link_count == 1 else 0
            if not goes or (not moves and _has_parent_in(path, tops)):
                continue
            number = self._next()
            if moves:
                self._numbers[change.path] = number
            step = Step(
                action=Action.TAKE,
                path=path,
                number=number,
                old=Identity.of(old),
                directory=old.is_directory,
                moves=moves,
            )
            plan.takes.append(step)

    def _moves(self, change: Change) -> bool:
        """Whether the host's own inode gets the new name: a directory, or a file that has no other names."""
        if change.kind is not Kind.RENAMED or change.old is None:
            return False
        return change.old.is_directory or (change.same_content and self._is_set_in_place(change.old))

    def _is_set_in_place(self, old: Node) -> bool:
        return old.is_directory or (old.type == "file" and old.link_count == 1)

    def _keeps_inode(self, change: Change) -> bool:
        if self._moves(change):
            return True
        in_place = change.kind in (Kind.MODE, Kind.TIMES) and change.old is not None
        return in_place and change.old is not None and self._is_set_in_place(change.old)

    def _anchor(self, plan: Plan, changes: Sequence[Change]) -> None:
        """For files with several names: one that the host keeps, if there is one, for the others to be linked to."""
        pending = {change.path for change in changes}
        for change in plan.changes:
            new = change.new
            if new is None or not change.links or (new.device, new.inode) in self._linked:
                continue
            if self._keeps_inode(change):
                self._linked[new.device, new.inode] = Copy(target=b"", node=new, host=host_path(change))
                if change.old is not None:
                    plan.shared.append((host_path(change), Identity.of(change.old)))
                continue
            for name in change.links:
                path = self._before(name)
                found = self._overlay.lower.node(path) if name not in pending else None
                if found is not None and found.type == new.type and self._conflicts.known(path, found):
                    self._linked[new.device, new.inode] = Copy(target=b"", node=new, host=path)
                    plan.touched.append(name)
                    plan.shared.append((path, Identity.of(found)))
                    break

    def _put(self, plan: Plan, change: Change, new: Node) -> None:
        old = change.old
        stage = self._identity(new)
        if old is not None and self._keeps_inode(change):
            if change.kind is Kind.RENAMED:
                step = Step(
                    action=Action.PUT,
                    path=change.path,
                    number=self._numbers[change.path],
                    new=Identity.of(old),
                    directory=old.is_directory,
                    moves=True,
                )
                plan.puts.append(step)
            before, after = Attributes.of(old), Attributes.of(new)
            if before != after:
                set_step = Step(action=Action.SET, path=change.path, old=Identity.of(old), before=before, after=after)
                plan.puts.append(set_step)
            kept = replace(Identity.of(old), mtime_ns=new.mtime_ns)
            plan.outcomes.append(Outcome(path=change.path, stage=stage, host=kept))
            if new.is_directory and self._conflicts.known(host_path(change), old):
                plan.times.append((change.path, new.mtime_ns))
            return
        parent, name = split(change.path)
        inside = self._staged.get(parent)
        swaps = old is not None and change.kind is not Kind.RENAMED
        number = 0 if inside is not None and not swaps else self._next()
        target = inside + b"/" + name if inside is not None and not swaps else b"%d" % number
        plan.copies.append(self._copy(target, new))
        plan.outcomes.append(Outcome(path=change.path, stage=stage, copied=target))
        if new.is_directory:
            self._staged[change.path] = target
            plan.times.append((change.path, new.mtime_ns))
        if number:
            step = Step(
                action=Action.SWAP if swaps else Action.PUT,
                path=change.path,
                number=number,
                old=Identity.of(old) if swaps and old is not None else None,
                directory=new.is_directory or (old is not None and old.is_directory),
            )
            plan.puts.append(step)

    def _copy(self, target: bytes, new: Node) -> Copy:
        if new.is_directory or new.link_count == 1:
            return Copy(target=target, node=new)
        first = self._linked.get((new.device, new.inode))
        if first is None:
            self._linked[new.device, new.inode] = copy = Copy(target=target, node=new)
            return copy
        return Copy(target=target, node=new, beside=first.target or None, host=first.host)

    # --- what is to be remembered

    def _identity(self, node: Node) -> Identity:
        """A file written in this very tick may still change without another time: then it is never taken as settled."""
        identity = Identity.in_stage(node)
        fresh = node.ctime_ns > self._fresh_ns and not node.is_directory
        return replace(identity, ctime_ns=0) if fresh else identity

    def _settle(self, plan: Plan, changes: Sequence[Change]) -> None:
        chosen = {change.path for change in plan.changes}
        left = [change.path for change in changes if change.path not in chosen]
        partly = {parent for path in left for parent in _parents(path)}
        plan.outcomes = [outcome for outcome in plan.outcomes if outcome.path not in partly]
        for change in plan.changes:
            if change.new is None:
                plan.outcomes.append(Outcome(path=change.path, stage=None))
            elif change.kind is Kind.RENAMED and host_path(change) not in chosen:
                plan.outcomes.append(Outcome(path=host_path(change), stage=None))
        self._hide(plan, partly, chosen)
        plan.moved = [(host_path(change), change.path) for change in self._renames]
        plan.redirected = [target for _, target in concerned(plan.changes, self._moved)]
        above = {ROOT, *(split(change.path)[0] for change in plan.changes)}  # the place comes and goes in the top
        below = {split(host_path(change))[0] for change in plan.changes if change.old is not None}
        above |= {self._after(path) for path in below}
        for path in sorted(above):
            self._touch(plan, path, chosen)

    def _hide(self, plan: Plan, partly: set[bytes], chosen: set[bytes]) -> None:
        """A directory that hides what was deleted hides what comes there later, too: nothing is pending in it."""
        seen = set(chosen)
        for change in plan.changes:
            if change.new is not None:
                continue
            path = change.path
            while path != ROOT:
                node = self._overlay.upper.node(path)
                if node is not None or path in seen - chosen:
                    break
                path = split(path)[0]
            if path in seen or path == ROOT or node is None or not node.is_directory or path in partly:
                continue
            seen.add(path)
            below = self._overlay.lower.node(path)
            plan.outcomes.append(
                Outcome(path=path, stage=self._identity(node), host=Identity.of(below) if below is not None else None)
            )

    def _touch(self, plan: Plan, path: bytes, chosen: set[bytes]) -> None:
        """A directory that was known before stays so, and gets the time that the stage has."""
        before = self._before(path)
        found = self._overlay.lower.node(before)
        if found is None or not found.is_directory or not self._conflicts.known(before, found):
            return
        plan.parents.append((before, found.mtime_ns))
        if path in chosen:
            return
        plan.touched.append(path)
        upper = self._overlay.upper.node(path)
        if upper is not None and upper.is_directory:
            plan.times.append((path, upper.mtime_ns))

    def _before(self, path: bytes) -> bytes:
        """Where the host has, before the apply, a directory that the stage has at `path`."""
        return _elsewhere(path, self._sources)

    def _after(self, path: bytes) -> bytes:
        return _elsewhere(path, self._targets)


def _elsewhere(path: bytes, moved: Mapping[bytes, bytes]) -> bytes:
    """By the nearest directory that has moved; itself counts."""
    for above in (path, *parents(path)):
        if above in moved:
            return moved[above] + path[len(above) :]
    return path


def _parents(path: bytes) -> list[bytes]:
    found = []
    while path != ROOT:
        path = split(path)[0]
        found.append(path)
    return found


def _has_parent_in(path: bytes, tops: set[bytes]) -> bool:
    return any(parent in tops for parent in _parents(path))
