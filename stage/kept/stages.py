"""Stages: named, retained directories of writes, and temporary ones that are dropped at exit.

    stages/NAME/    upper work                      writes over the image
                    workspace-upper workspace-work  writes over the workspace
                    (an upper is made by its first mount, with the mode and owner of what it lies over)
                    stage.json                      what the stage was made from
                    lock                            flock: held by the process that runs in the stage, and its init
                    joined                          flock: shared by commands that joined, alone by an init that ends
                    init                            the running init
                    apply                           what was applied to the workspace

Temporary stages are named `.tmp-...`, which no user can ask for; one whose lock is free was left by a crash.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from imaged.errors import PvisorError
from imaged.publish import sync_directory
from stage.errors import StageBusyError, StageError, StageMismatchError, StageNotFoundError, StageSetupError
from stage.kept import cgroups, record, running, stagelock
from stage.kept.disposal import Disposal, at_once
from stage.kept.record import StageInfo
from stage.kept.removal import remove_tree
from stage.kept.running import Init
from stage.kept.stagefiles import Stage, StageFiles, synced

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_TEMPORARY = ".tmp-"
_DIRECTORIES = ("work", "workspace-work")
_POLL_S = 0.01


class Stages:
    """The stages under one directory. Safe for several processes; an object may be shared between threads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def use(self, name: str, *, image: str, image_name: str = "", workspace: Path | None = None) -> Iterator[Stage]:
        """The stage, made when new, held until the block ends. Raises StageBusyError, StageMismatchError.

        Without `workspace` it is the one that the stage was made for, if any. What was written is on stable storage
        after the block.
        """
        path = self._path(name)
        wanted = record.new(name, image, image_name, workspace)
        lock_fd = stagelock.hold(path, make=True)
        new = not any((path / part).exists() for part in ("stage.json", "upper", "workspace-upper"))
        try:
            stagelock.require_ended(path)
            _end_apply(path)
            info = self._adopt(path, wanted)
            stage = Stage(path=path, info=info, lock_fd=lock_fd)
            try:
                with stage.rest:
                    yield stage
            finally:
                from stage.kept.writes import sync

                synced(partial(sync, path))
        except BaseException:
            if new and not running.recorded(path):  # nothing ever ran in it
                with contextlib.suppress(OSError, StageError):
                    self._remove(path)
            raise
        finally:
            if running.ended(path, 0):
                running.forget(path)
                stagelock.release(lock_fd)
            else:  # other commands run in it still: its init stays, and holds the lock
                os.close(lock_fd)

    @contextmanager
    def temporary(
        self, *, image: str, image_name: str = "", workspace: Path | None = None, disposal: Disposal = at_once
    ) -> Iterator[Stage]:
        """A stage that is removed when the block ends, in the way of `disposal`; after a crash, by the next `sweep`."""
        name = f"{_TEMPORARY}{os.getpid()}-{os.urandom(4).hex()}"
        path = self.root / name
        with stagelock.exclusive(self.root):
            lock_fd = stagelock.lock(path, make=True)
        rest = ExitStack()
        try:
            for directory in _DIRECTORIES[: None if workspace is not None else 1]:
                (path / directory).mkdir(0o755)
            info = record.new(name, image, image_name, workspace)
            yield Stage(path=path, info=info, lock_fd=lock_fd, temporary=True, rest=rest)
        finally:
            disposal(partial(self._dispose, path, lock_fd, rest))

    def _dispose(self, path: Path, lock_fd: int, rest: ExitStack) -> None:
        try:
            rest.close()
            self._remove(path)
        finally:
            stagelock.release(lock_fd)

    def list(self) -> list[StageInfo]:
        """All retained stages by name, but damaged ones."""
        return [info for _, info in self._found() if info is not None]

    def damaged(self) -> tuple[str, ...]:
        """Directories whose stage.json does not say what they are: all that can be done is to drop them."""
        return tuple(name for name, info in self._found() if info is None)

    def _found(self) -> Iterator[tuple[str, StageInfo | None]]:
        """Every stage's directory by name, with None for a damaged one."""
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if not _NAME.fullmatch(path.name):
                continue
            try:
                yield path.name, record.load(path)
            except StageSetupError:
                if path.exists():  # not when it was dropped meanwhile
                    yield path.name, None

    def get(self, name: str) -> StageInfo:
        """Raises StageNotFoundError."""
        return record.load(self._existing(name))

    def files(self, name: str) -> StageFiles:
        """Where its parts are, whether or not it is in use. Raises StageNotFoundError."""
        return StageFiles(path=self._existing(name))

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        if not path.is_dir():
            raise StageNotFoundError(f"no stage {name!r} in {self.root}", hint="see pvisor stage ls")
        return path

    def running(self, name: str) -> Init | None:
        """The init that runs in the stage now, for `launch.join`."""
        return running.find(self._path(name))

    def recover(self, name: str) -> None:
        """Undoes or finishes an apply of the stage that a crash cut off. Raises StageNotFoundError, StageError."""
        _end_apply(self._existing(name))

    def end(self, name: str) -> None:
        """Kills what runs in the stage, and returns when it is free. Raises StageNotFoundError, StageBusyError."""
        path, deadline = self._existing(name), time.monotonic() + stagelock.END_S
        while True:
            init = running.find(path)
            if init is not None:
                running.end(init)
            try:
                with stagelock.exclusive(self.root):
                    stagelock.release(stagelock.lock(path, make=False))
                stagelock.require_ended(path)
                return
            except FileNotFoundError:
                return
            except StageBusyError as error:
                if time.monotonic() > deadline:
                    who = ", ".join(f"process {pid}" for pid in stagelock.holders_of(path)) or "another process"
                    raise StageBusyError(
                        f"stage {name!r} is still held by {who} {stagelock.END_S:.0f} s after its end",
                        hint="look at that process, then try again",
                    ) from error
            time.sleep(_POLL_S)

    def require_idle(self, name: str) -> None:
        """Raises StageBusyError when a command has the stage, or something of one still runs; StageNotFoundError."""
        path = self._existing(name)
        with contextlib.suppress(FileNotFoundError):  # where no command ever was
            stagelock.release(stagelock.hold(path, make=False))
        stagelock.require_ended(path)

    def settle(self, name: str) -> bool:
        """Waits while a command that holds the stage starts or ends: then it can be joined, or used.

        False when neither came about in time. Raises StageNotFoundError.
        """
        path, deadline = self._existing(name), time.monotonic() + stagelock.END_S
        while running.find(path) is None:
            try:
                with stagelock.exclusive(self.root):
                    stagelock.release(stagelock.lock(self._existing(name), make=True))
                return True
            except StageBusyError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(_POLL_S)
        return True

    def drop(self, name: str) -> None:
        """Removes the stage and its writes, and what a removal that was cut off left.

        Raises StageNotFoundError, StageBusyError.
        """
        self.sweep()
        path = self._existing(name)
        trash = self.root / f"{_TEMPORARY}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            lock_fd = stagelock.hold(path, make=True)
        except StageBusyError as error:
            hint = f"end what runs in it first; `pvisor stage drop --force {name}` does both"
            raise StageBusyError(error.message, hint=hint) from error
        try:
            stagelock.require_ended(path)
            left = _end_apply(path)
            path.rename(trash)
            try:
                if not left:
                    _end_apply(trash)  # one that began just before the name went
            except BaseException:
                with contextlib.suppress(OSError):  # when another stage has the name by now, the next sweep goes on
                    trash.rename(path)
                raise
            self._remove(trash)
        finally:
            stagelock.release(lock_fd)

    def sweep(self) -> int:
        """Removes what crashed commands left; returns how many stages that were.

        What can not be removed is nobody else's trouble: that is logged, and stays for the next sweep.
        """
        if not self.root.is_dir():
            return 0
        leftovers = [path.name for path in self.root.iterdir() if path.name.startswith(_TEMPORARY)]
        removed = 0
        for name in leftovers:
            try:
                with stagelock.exclusive(self.root):
                    lock_fd = stagelock.lock(self.root / name, make=False)
            except StageBusyError:
                continue
            except FileNotFoundError:
                try:
                    (self.root / name).rmdir()  # a crash came between the last two steps of _remove
                except FileNotFoundError:
                    pass
                except OSError as error:
                    _tell_left(self.root / name, error)
                continue
            except StageSetupError as error:
                _tell_left(self.root / name, error)
                continue
            try:
                _end_apply(self.root / name)  # of a drop that was cut off
                self._remove(self.root / name)
                removed += 1
            except StageBusyError:  # its last processes do not end; the next sweep may find them gone
                continue
            except (OSError, PvisorError) as error:
                _tell_left(self.root / name, error)
            finally:
                stagelock.release(lock_fd)
        return removed

    def _remove(self, path: Path) -> None:
        """Removes a stage whose lock is held; the lock goes last, so that no other removal can begin meanwhile."""
        cgroups.remove(path)
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                remove_tree(child)
            elif child.name != "lock":
                child.unlink(missing_ok=True)
        with stagelock.exclusive(self.root):
            (path / "lock").unlink(missing_ok=True)
            path.rmdir()

    def _path(self, name: str) -> Path:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise StageSetupError(
                f"{name!r} is not a stage name",
                hint="use up to 63 letters, digits, '_', '.', '-', not '.' or '-' first",
            )
        return self.root / name

    def _adopt(self, path: Path, wanted: StageInfo) -> StageInfo:
        try:
            for directory in _DIRECTORIES:
                (path / directory).mkdir(0o755, exist_ok=True)
            if not (path / "stage.json").exists():
                info = record.based(wanted)
                record.save(path, info)
                sync_directory(self.root)
                return info
        except OSError as error:
            raise StageSetupError(f"stage {path}: {error.strerror}", hint=stagelock.space_hint(error)) from error
        info = record.load(path)
        self._check(info, wanted)
        if info.workspace is not None and not (path / "workspace-upper").exists():  # no start came as far as the mount
            info = record.based(info)
            try:
                record.save(path, info)
            except OSError as error:
                raise StageSetupError(f"stage {path}: {error.strerror}", hint=stagelock.space_hint(error)) from error
        return info

    @staticmethod
    def _check(info: StageInfo, wanted: StageInfo) -> None:
        known, asked = info.image_name or info.image, wanted.image_name or wanted.image
        others = f"run in it as it is with pvisor stage exec {info.name} -- CMD, or use another --stage"
        if info.image != wanted.image:
            raise StageMismatchError(f"stage {info.name!r} was made from image {known}, not {asked}", hint=others)
        if wanted.workspace not in (None, info.workspace) and not _is_one_directory(wanted.workspace, info.workspace):
            known = info.workspace or "(none)"
            keep = f"give --workspace {shlex.quote(info.workspace)}" if info.workspace else "leave out --workspace"
            raise StageMismatchError(
                f"stage {info.name!r} was made for workspace {known}, not {wanted.workspace}", hint=f"{keep}, {others}"
            )


def _is_one_directory(one: str | None, other: str | None) -> bool:
    """Under another name, as through a symbolic link."""
    try:
        return one is not None and other is not None and os.path.samefile(one, other)  # noqa: PTH121
    except OSError:
        return False


def _end_apply(path: Path) -> bool:
    """An apply that a crash cut off is undone or finished before anything else happens to its stage.

    Whether it is left still, since the workspace can not be written.
    """
    files = StageFiles(path=path)
    if not files.applied.is_dir():
        return False
    from stage.applying.recovery import recover

    return recover(files.applied)


def _tell_left(path: Path, error: Exception) -> None:
    import logging  # not on the way of `pvisor run`

    logging.getLogger(__name__).warning("%s, left by an earlier command, can not be removed: %s", path, error)
