"""Moves what a stage changed in its workspace into the host directory, all of it or nothing.

    plan -> copies in .pvisor-apply-TOKEN, beside the changes -> journal with every step, durable -> steps -> commit
         -> what was replaced is removed, and what was applied is noted

Up to the commit an apply that ends, however it ends, is undone by whoever looks at the stage or applies to the
workspace next; after the commit it is finished by them. Two applies to one directory never run at once.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fuse import linux
from imaged.config import Config
from stage.applying.conflicts import Conflicts
from stage.applying.history import History, Identity
from stage.applying.ledger import Journal, Ledger, Record, Step
from stage.applying.moment import unchanged_ns, unseen
from stage.applying.plan import Copy, Plan, Planner
from stage.applying.recovery import REMEDIES, recover_workspace, resume, unfinished, what_failed
from stage.applying.replica import Attributes, copy, set_attributes
from stage.applying.steps import InterferenceError, Steps, below
from stage.applying.workspace import held
from stage.edits.changes import Change, Kind, Overlay, changes
from stage.edits.layer import Layer
from stage.edits.names import quoted
from stage.edits.selection import PathLike, listed, relative, require_known
from stage.errors import ApplyConflictError, StageBusyError, StageError, StageNotFoundError
from stage.hostpath import HostTree, make_private
from stage.kept.record import Base, StageInfo, moment_ns
from stage.kept.stages import Stages
from stage.options import WORKSPACE


def _nothing(_point: str) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChange:
    """One name; `old_path` is what it was called before a rename."""

    path: bytes
    kind: Kind
    old_path: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What was applied to a workspace, in order of path; nothing when nothing was pending."""

    workspace: Path
    changes: tuple[AppliedChange, ...]


def apply(stage: str, paths: Sequence[PathLike] | PathLike = (), *, config: Config | None = None) -> Applied:
    """Moves what is pending in a kept stage into its workspace: everything, or what is at and below `paths`.

    All of it or nothing, and twice is the same as once. The stage may run. Raises ApplyConflictError, which has them
    all, when the host has other changes at the same paths; NotFoundError for a path that is nowhere;
    StageNotFoundError, StageBusyError or another StageError. Threads may call this at once.
    """
    config = config or Config.resolve(server=None)
    return apply_stage(Stages(config.stages), stage, paths)


def apply_stage(
    stages: Stages, name: str, paths: Sequence[PathLike] | PathLike = (), *, reached: Callable[[str], None] = _nothing
) -> Applied:
    """As `apply`. `reached` is called with a word at each point where a crash would leave another state."""
    with _planned(stages, name, paths) as pending:
        if pending.plan.changes:
            _Batch(pending, reached).run()
        return _applied(pending)


def preview(stages: Stages, name: str, paths: Sequence[PathLike] | PathLike = ()) -> Applied:
    """What `apply` would do, or would raise, as things are. Only what a crash left is brought to its end."""
    with _planned(stages, name, paths) as pending:
        return _applied(pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A plan without conflicts, and the workspace it is for, which is held."""

    plan: Plan
    tree: HostTree
    ledger: Ledger
    workspace: Path
    require_idle: Callable[[], None]


@contextmanager
def _planned(stages: Stages, name: str, paths: Sequence[PathLike] | PathLike) -> Iterator[_Pending]:
    info, files = stages.get(name), stages.files(name)
    if info.workspace is None:
        raise StageError(f"stage {name!r} has no workspace", hint="apply is for stages of pvisor run --workspace DIR")
    workspace = Path(info.workspace)
    tops = [os.fsencode(workspace), WORKSPACE.encode()]
    wanted = [relative(path, tops, "the workspace") for path in listed(paths)]
    with held(workspace, info.base) as tree:
        recover_workspace(stages.root, tree, mine=files.applied)
        _require_unchanged(stages, info)
        ledger = Ledger(files.applied)
        idle = partial(_require_idle, stages, name)
        if not files.workspace_upper.is_dir():  # nothing ever ran in it
            yield _Pending(plan=Plan(changes=[]), tree=tree, ledger=ledger, workspace=workspace, require_idle=idle)
            return
        lower = Path(f"/proc/self/fd/{tree.fd}")  # that very directory, whatever has its name by now
        with Overlay.opened(upper=files.workspace_upper, lower=lower, work=files.workspace_work) as overlay:
            try:
                plan = _plan(info, overlay, tree, ledger.applied(), wanted)
            except OSError as error:
                raise StageError(
                    f"can not see what stage {name!r} changed in {workspace}: {error.strerror}",
                    hint="apply again when nobody moves things there, or see what the kernel's log says of the disk",
                ) from error
            if plan.conflicts:
                raise _conflict(workspace, [(conflict.path, conflict.reason) for conflict in plan.conflicts])
            yield _Pending(plan=plan, tree=tree, ledger=ledger, workspace=workspace, require_idle=idle)


def _require_unchanged(stages: Stages, info: StageInfo) -> None:
    """Another command may have dropped the stage, or made it again, while this one waited for the workspace."""
    try:
        found = stages.get(info.name)
    except StageNotFoundError as error:
        raise StageNotFoundError(f"stage {info.name!r} was dropped", hint="see pvisor stage ls") from error
    if found != info:
        raise StageBusyError(
            f"stage {info.name!r} was made again while this apply waited for the workspace",
            hint="see pvisor stage diff, then apply again",
        )


def _require_idle(stages: Stages, name: str) -> None:
    """A directory is moved below the mount of what runs, which then shows it without what it has."""
    try:
        stages.require_idle(name)
    except StageBusyError as error:
        raise StageBusyError(
            f"stage {name!r} is in use: renamed directories are applied when nothing runs in the stage",
            hint="apply other paths by name, or again when its commands have ended",
        ) from error


def _plan(info: StageInfo, overlay: Overlay, tree: HostTree, history: History, wanted: Sequence[bytes]) -> Plan:
    moment = moment_ns()
    pending = list(changes(overlay, settled=history.settled, unseen=unseen(history, info)))
    # What was just applied is fine too.
    require_known(wanted, pending, overlay, "the workspace", settled=history.entries)
    layer = Layer(overlay.upper, overlay.lower)
    conflicts = Conflicts(overlay, tree, history, layer, unchanged_ns(info))
    return Planner(overlay, conflicts, layer, fresh_ns=moment).plan(pending, wanted)


def _applied(pending: _Pending) -> Applied:
    return Applied(
        workspace=pending.workspace,
        changes=tuple(
            AppliedChange(
                path=change.path, kind=change.kind, old_path=change.old_path if change.kind is Kind.RENAMED else None
            )
            for change in pending.plan.changes
            if not _is_time_of_directory(change)
        ),
    )


def _conflict(workspace: Path, conflicts: Sequence[tuple[bytes, str]]) -> ApplyConflictError:
    path, reason = conflicts[0]
    more = f", and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
    return ApplyConflictError(
        f"nothing was applied to {workspace}: {quoted(path).decode()} {reason}{more}",
        conflicts=tuple(conflicts),
        hint="apply other paths by name, or give these files on the host what `pvisor stage diff` shows of them",
    )


def _is_time_of_directory(change: Change) -> bool:
    return change.kind is Kind.TIMES and change.new is not None and change.new.is_directory


class _Batch:
    """One apply, from its plan to its end."""

    def __init__(self, pending: _Pending, reached: Callable[[str], None]) -> None:
        self._plan, self._tree, self._ledger = pending.plan, pending.tree, pending.ledger
        self._workspace, self._reached = pending.workspace, reached
        self._require_idle = pending.require_idle
        found = os.fstat(self._tree.fd)
        self._journal = Journal(
            token=os.urandom(8).hex(),
            workspace=os.fspath(self._workspace),
            base=Base(time_ns=time.time_ns(), device=found.st_dev, inode=found.st_ino),
            parents=tuple(self._plan.parents),
            shared=tuple(self._plan.shared),
        )

    def run(self) -> None:
        """All or nothing; what it raises says which."""
        self._require_writable()
        try:
            self._execute()
        except BaseException as error:
            try:
                applied = resume(self._ledger, self._tree)
            except OSError as left:
                raise unfinished(self._journal, left) from error
            if applied and isinstance(error, Exception):  # it had reached its commit
                return
            if isinstance(error, InterferenceError):
                raise _conflict(self._workspace, [(error.path, error.reason)]) from error
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        try:
            resume(self._ledger, self._tree)
        except OSError as error:
            raise StageError(
                f"everything was applied to {self._workspace}, but that could not be noted: {error.strerror}",
                hint="make space on the file system of PVISOR_HOME, then apply again: that does the rest",
            ) from error

    def _require_writable(self) -> None:
        """Nothing is begun where it is sure to fail."""
        if not os.access(f"/proc/self/fd/{self._tree.fd}", os.W_OK | os.X_OK):
            read_only = os.fstatvfs(self._tree.fd).f_flag & os.ST_RDONLY
            raise self._failed(
                OSError(errno.EROFS, os.strerror(errno.EROFS))
                if read_only
                else PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            )

    def _failed(self, error: OSError) -> StageError:
        if not self._ledger.directory.parent.is_dir():  # who drops it undoes what was done
            return StageNotFoundError(
                f"nothing was applied to {self._workspace}: the stage was dropped", hint="see pvisor stage ls"
            )
        hints = REMEDIES | {
            errno.EINVAL: "its file system may not exchange names in one step, as ext4, xfs, btrfs and tmpfs do",
        }
        return StageError(
            f"nothing was applied to {self._workspace}: {what_failed(error)}", hint=hints.get(error.errno or 0, "")
        )

    def _execute(self) -> None:
        self._write()
        if self._plan.redirected:  # commands that come from here on wait for the end of what the journal says
            self._require_idle()
        place = make_private(self._tree.fd, self._journal.place_name)
        try:
            self._reached("place")
            self._journal = replace(self._journal, place=os.fstat(place).st_ino)
            self._write()
            self._stage(place)
            self._describe(place)
            self._write()
            steps = Steps(tree=self._tree, place=place)
            for step in self._journal.steps:
                steps.do(step)
                self._reached("step")
            self._verify(place)
            linux.sync_file_system(place)
            self._reached("synced")
            self._ledger.commit()
            self._reached("commit")
        finally:
            os.close(place)

    def _write(self) -> None:
        self._ledger.write(self._journal)
        self._reached("journal")

    def _stage(self, place: int) -> None:
        """Everything that is new, complete with its attributes; directories last, when their entries are in them."""
        with HostTree(os.dup(place)) as inside, HostTree(os.dup(place)) as beside:
            directories: list[Copy] = []
            for item in self._plan.copies:
                directory, name = inside.parent(item.target)
                if item.beside is not None:
                    source, old = beside.parent(item.beside)
                    os.link(old, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
                elif item.host is not None:
                    source, old = self._tree.parent(item.host)
                    os.link(old, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
                else:
                    copy(item.node, directory, name)
                    if item.node.is_directory:
                        directories.append(item)
                self._reached("copy")
            for item in reversed(directories):
                directory, name = inside.parent(item.target)
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                try:
                    set_attributes(fd, replace(Attributes.of(item.node), mtime_ns=item.node.mtime_ns))
                finally:
                    os.close(fd)

    def _describe(self, place: int) -> None:
        """The journal with all its steps, now that what they move is there."""
        plan = self._plan
        with HostTree(os.dup(place)) as inside:
            made: dict[bytes, os.stat_result] = {}
            for item in plan.copies:
                found = inside.stat(item.target)
                assert found is not None
                made[item.target] = found
        steps = [*plan.takes, *(self._filled(step, made) for step in plan.puts)]
        hosts = _after_steps(made, steps)
        records = [
            Record(
                path=outcome.path,
                stage=outcome.stage,
                host=hosts[outcome.copied] if outcome.copied is not None else outcome.host,
            )
            for outcome in plan.outcomes
        ]
        self._journal = replace(
            self._journal,
            made=tuple(found.st_ino for found in made.values()),
            made_ns=max((found.st_ctime_ns for found in made.values()), default=0),
            steps=tuple(steps),
            records=tuple(records),
            touched=tuple(plan.touched),
            times=tuple(plan.times),
            moved=tuple(plan.moved),
            redirected=tuple(plan.redirected),
        )

    @staticmethod
    def _filled(step: Step, made: dict[bytes, os.stat_result]) -> Step:
        found = made.get(b"%d" % step.number) if step.new is None else None
        return replace(step, new=_identity(found)) if found is not None else step

    def _verify(self, place: int) -> None:
        """In the directories that go is only what was there when the apply was planned."""
        for step in self._journal.steps:
            if not step.directory or step.moves or step.old is None or step.old.inode not in self._plan.removed:
                continue
            for found in below(place, b"%d" % step.number):
                known = self._plan.removed.get(found.st_ino)
                if known is None or (known not in (0, found.st_ctime_ns) and not stat.S_ISDIR(found.st_mode)):
                    raise InterferenceError(step.path, "was changed on the host when its turn came")


def _after_steps(made: dict[bytes, os.stat_result], steps: Sequence[Step]) -> dict[bytes, Identity]:
    """What was made in the place, as it is at the end: some are names of host files that get another time."""
    times = {
        step.old.inode: step.after.mtime_ns
        for step in steps
        if step.old is not None and step.after is not None and step.after.mtime_ns is not None
    }
    found = {target: _identity(node) for target, node in made.items()}
    return {target: replace(node, mtime_ns=times.get(node.inode, node.mtime_ns)) for target, node in found.items()}


def _identity(found: os.stat_result) -> Identity:
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return Identity(inode=found.st_ino, size_bytes=size, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)
