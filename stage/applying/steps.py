"""The steps of an apply, each done or undone by one system call, and told apart by who is where."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fuse import linux
from stage.applying.history import Identity
from stage.applying.ledger import Action, Step
from stage.applying.replica import Attributes, set_attributes
from stage.hostpath import HostTree

_ELSEWHERE = {
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EXDEV,
    errno.EBUSY,
}
_SETTABLE = {stat.S_IFREG, stat.S_IFDIR}


class InterferenceError(Exception):
    """What a step met is not what was planned: somebody else writes in the workspace."""

    def __init__(self, path: bytes, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an undo left as it is, for others have written there; `number` is what was there before, in the place."""

    path: bytes
    number: int | None = None


@dataclass(slots=True)
class Steps:
    """Does and undoes steps in `tree`, with `place` as the private directory beside them. For one thread.

    `untouched(descriptor, name)` says whether a directory that an apply had made has in it only what the apply put
    there.
    """

    tree: HostTree
    place: int
    untouched: Callable[[int, bytes], bool] = lambda _directory, _name: True
    kept: list[Kept] = field(default_factory=list)

    def do(self, step: Step) -> None:
        """Raises InterferenceError, with this step not done; OSError."""
        if step.action is Action.SET:
            self._set(step)
            return
        try:
            self._rename(step)
        except OSError as error:
            if error.errno in _ELSEWHERE:
                raise InterferenceError(step.path, f"{os.strerror(error.errno)}, when its turn came") from error
            raise OSError(error.errno, error.strerror, step.path) from error
        if step.old is not None:
            held = self._held(step)
            if held is None or not same(step.old, held):
                self._rename(step, back=True)
                raise InterferenceError(step.path, "was changed when its turn came")

    def undo(self, step: Step) -> None:
        """Whether it was done or not. OSError."""
        held = self._held(step)
        if step.action is Action.SET:
            self._unset(step)
        elif step.action is Action.TAKE:
            if held is not None:
                self._put_back(step)
        elif step.action is Action.PUT:
            if held is None and self._is_ours(step):
                self._rename(step, back=True)
        elif held is not None and step.new is not None and held.st_ino != step.new.inode:
            if self._here(step.path) is None:
                self._put_back(step)
            elif self._is_ours(step):
                self._rename(step, back=True)
            else:
                self.kept.append(Kept(path=step.path, number=step.number))

    def _is_ours(self, step: Step) -> bool:
        """Whether the name has what this step gave it, as it was; if others have changed it since, it is kept."""
        here = self._here(step.path)
        if here is None or step.new is None or here.st_ino != step.new.inode:
            return False
        if step.moves:  # nobody's content is lost by moving it back
            return True
        if same(step.new, here):
            directory, name = self.tree.parent(step.path)
            if not stat.S_ISDIR(here.st_mode) or self.untouched(directory, name):
                return True
        if step.action is Action.PUT:
            self.kept.append(Kept(path=step.path))
        return False

    def _put_back(self, step: Step) -> None:
        try:
            directory, name = self.tree.parent(step.path)
            linux.rename_at(self.place, _name(step), directory, name, linux.RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
            self.kept.append(Kept(path=step.path, number=step.number))

    def _rename(self, step: Step, *, back: bool = False) -> None:
        directory, name = self.tree.parent(step.path)
        if step.action is Action.SWAP:
            linux.rename_at(self.place, _name(step), directory, name, linux.RENAME_EXCHANGE)
        elif (step.action is Action.PUT) != back:
            linux.rename_at(self.place, _name(step), directory, name, linux.RENAME_NOREPLACE)
        else:
            linux.rename_at(directory, name, self.place, _name(step), linux.RENAME_NOREPLACE)

    def _here(self, path: bytes) -> os.stat_result | None:
        try:
            return self.tree.stat(path)
        except OSError as error:
            if error.errno in _ELSEWHERE:
                return None
            raise

    def _held(self, step: Step) -> os.stat_result | None:
        try:
            return os.stat(_name(step), dir_fd=self.place, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _set(self, step: Step) -> None:
        fd = self._open(step)
        if fd is None or step.old is None or step.before is None or step.after is None:
            raise InterferenceError(step.path, "was replaced when its turn came")
        try:
            found = os.fstat(fd)
            if not same(step.old, found) or not _has(found, step.before):
                raise InterferenceError(step.path, "was changed when its turn came")
            set_attributes(fd, step.after)
        except OSError as error:
            raise OSError(error.errno, error.strerror, step.path) from error
        finally:
            os.close(fd)

    def _unset(self, step: Step) -> None:
        fd = self._open(step)
        if fd is None or step.before is None or step.after is None:
            return
        try:
            found = os.fstat(fd)
            if not _has(found, step.before) and not _has(found, step.after):
                self.kept.append(Kept(path=step.path))
            elif _has_content(step, found):
                set_attributes(fd, step.before)
            else:  # others have written to it: that is theirs, with its time
                set_attributes(fd, replace(step.before, mtime_ns=None))
        finally:
            os.close(fd)

    def _open(self, step: Step) -> int | None:
        """The file or directory that the step is about; None when it is not there."""
        try:
            node = self.tree.open_node(step.path)
        except OSError as error:
            if error.errno in _ELSEWHERE:
                return None
            raise
        try:
            found = os.fstat(node)
            if step.old is None or found.st_ino != step.old.inode or stat.S_IFMT(found.st_mode) not in _SETTABLE:
                return None
            return os.open(f"/proc/self/fd/{node}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(node)


def same(identity: Identity, found: os.stat_result) -> bool:
    """Whether it is that inode with that content. Its ctime is another after a rename; a directory is only an inode."""
    if found.st_ino != identity.inode:
        return False
    content = (found.st_size, found.st_mtime_ns)
    return stat.S_ISDIR(found.st_mode) or content == (identity.size_bytes, identity.mtime_ns)


def below(directory: int, name: bytes) -> list[os.stat_result]:
    """Everything in a directory that was moved to where only this process works, itself not included. OSError."""
    found: list[os.stat_result] = []
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with HostTree(fd) as tree:
        pending = [b"."]
        while pending:
            path = pending.pop()
            for child in tree.names(path):
                at = child if path == b"." else path + b"/" + child
                info = tree.stat(at)
                if info is not None:
                    found.append(info)
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(at)
    return found


def _name(step: Step) -> bytes:
    return b"%d" % step.number


def _has_content(step: Step, found: os.stat_result) -> bool:
    """Whether nobody has written to the file that a step gives other attributes, before it or after."""
    before, after = step.old, step.after
    if before is None or after is None or stat.S_ISDIR(found.st_mode):
        return True
    return found.st_size == before.size_bytes and found.st_mtime_ns in (before.mtime_ns, after.mtime_ns)


def _has(found: os.stat_result, attributes: Attributes) -> bool:
    wanted = (attributes.mode, attributes.uid, attributes.gid)
    return (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == wanted
