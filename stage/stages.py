"""Stages: named, retained directories of writes, and temporary ones that are dropped at exit.

    stages/NAME/    upper work                      writes over the image
                    workspace-upper workspace-work  writes over the workspace
                    (an upper is made by its first mount, with the mode and owner of what it lies over)
                    stage.json                      what the stage was made from
                    lock                            flock: held by the process that runs in the stage, and its init
                    init                            pid and start time of the running init

Temporary stages are named `.tmp-...`, which no user can ask for; one whose lock is free was left by a crash.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from imaged.publish import published
from stage.errors import StageBusyError, StageMismatchError, StageNotFoundError, StageSetupError
from stage.removal import remove_tree

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_TEMPORARY = ".tmp-"
_DIRECTORIES = ("work", "workspace-work")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """What stage.json says: the image's id and the name it was asked by, and the workspace the stage was made for."""

    name: str
    image: str
    image_name: str = ""
    workspace: str | None = None
    created_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """A running init, told from a later process with the same pid by its start time (clock ticks since boot)."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage that this process holds; `lock_fd` is its flock. Made by `Stages`, which also lets go of it."""

    path: Path
    info: StageInfo
    lock_fd: int
    temporary: bool = False

    @property
    def upper(self) -> Path:
        return self.path / "upper"

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def workspace_upper(self) -> Path:
        return self.path / "workspace-upper"

    @property
    def workspace_work(self) -> Path:
        return self.path / "workspace-work"

    @property
    def workspace(self) -> Path | None:
        """The host directory that the stage shows at /workspace."""
        return Path(self.info.workspace) if self.info.workspace is not None else None

    @property
    def hostname(self) -> str:
        return "stage" if self.temporary else re.sub(r"[^A-Za-z0-9-]", "-", self.info.name)

    def record_init(self, pid: int) -> None:
        """Lets other commands find the running init; a temporary stage is nobody else's."""
        if not self.temporary:
            _write(self.path / "init", json.dumps({"pid": pid, "started": start_time(pid)}))

    def forget_init(self) -> None:
        (self.path / "init").unlink(missing_ok=True)


class Stages:
    """The stages under one directory. Safe for several processes; an object may be shared between threads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def use(self, name: str, *, image: str, image_name: str = "", workspace: Path | None = None) -> Iterator[Stage]:
        """The stage, made when new, held until the block ends. Raises StageBusyError, StageMismatchError.

        Without `workspace` it is the one that the stage was made for, if any.
        """
        path = self._path(name)
        wanted = _info(name, image, image_name, workspace)
        with self._exclusive():
            lock_fd = self._lock(path, make=True)
        try:
            info = self._adopt(path, wanted)
            stage = Stage(path=path, info=info, lock_fd=lock_fd)
            try:
                yield stage
            finally:
                stage.forget_init()
        finally:
            os.close(lock_fd)

    @contextmanager
    def temporary(self, *, image: str, image_name: str = "", workspace: Path | None = None) -> Iterator[Stage]:
        """A stage that is removed when the block ends; after a crash, by the next `sweep`."""
        name = f"{_TEMPORARY}{os.getpid()}-{os.urandom(4).hex()}"
        path = self.root / name
        with self._exclusive():
            lock_fd = self._lock(path, make=True)
        try:
            for directory in _DIRECTORIES[: None if workspace is not None else 1]:
                (path / directory).mkdir(0o755)
            yield Stage(path=path, info=_info(name, image, image_name, workspace), lock_fd=lock_fd, temporary=True)
        finally:
            try:
                self._remove(path)
            finally:
                os.close(lock_fd)

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
                yield path.name, _load(path)
            except StageSetupError:
                if path.exists():  # not when it was dropped meanwhile
                    yield path.name, None

    def get(self, name: str) -> StageInfo:
        """Raises StageNotFoundError."""
        return _load(self._existing(name))

    def _existing(self, name: str) -> Path:
        path = self._path(name)
        if not path.is_dir():
            raise StageNotFoundError(f"no stage {name!r} in {self.root}", hint="see pvisor stage ls")
        return path

    def running(self, name: str) -> Init | None:
        """The init that runs in the stage now, for `launch.join`."""
        return _running(self._path(name))

    def drop(self, name: str) -> None:
        """Removes the stage and its writes. Raises StageNotFoundError, StageBusyError."""
        self._existing(name)
        with self._exclusive():
            lock_fd = self._lock(self._path(name), make=True)
            trash = self.root / f"{_TEMPORARY}{os.getpid()}-{os.urandom(4).hex()}"
            self._path(name).rename(trash)
        try:
            self._remove(trash)
        finally:
            os.close(lock_fd)

    def sweep(self) -> int:
        """Removes what crashed commands left; returns how many stages that were."""
        if not self.root.is_dir():
            return 0
        leftovers = [path.name for path in self.root.iterdir() if path.name.startswith(_TEMPORARY)]
        removed = 0
        for name in leftovers:
            try:
                with self._exclusive():
                    lock_fd = self._lock(self.root / name, make=False)
            except StageBusyError:
                continue
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):
                    (self.root / name).rmdir()  # a crash came between the last two steps of _remove
                continue
            try:
                self._remove(self.root / name)
                removed += 1
            finally:
                os.close(lock_fd)
        return removed

    def _remove(self, path: Path) -> None:
        """Removes a stage whose lock is held; the lock goes last, so that no other removal can begin meanwhile."""
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                remove_tree(child)
            elif child.name != "lock":
                child.unlink()
        with self._exclusive():
            (path / "lock").unlink()
            path.rmdir()

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise StageSetupError(
                f"{name!r} is not a stage name",
                hint="use up to 63 letters, digits, '_', '.', '-', not '.' or '-' first",
            )
        return self.root / name

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Held for the moment in which a directory exists whose own lock is not taken yet."""
        try:
            self.root.mkdir(0o700, parents=True, exist_ok=True)
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StageSetupError(
                f"stages directory {self.root}: {error.strerror}", hint="set PVISOR_HOME to a directory you can write"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _lock(self, path: Path, *, make: bool) -> int:
        try:
            if make:
                path.mkdir(0o700, parents=True, exist_ok=True)
            fd = os.open(path / "lock", os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StageSetupError(f"stage {path}: {error.strerror}", hint=_space_hint(error)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            init = _running(path)
            who = f" by process {init.pid}" if init else ""
            raise StageBusyError(
                f"stage {path.name!r} is in use{who}",
                hint=f"run a command in it with pvisor stage exec {path.name} -- CMD, or use another --stage",
            ) from error
        if os.fstat(fd).st_nlink == 0:
            os.close(fd)
            raise FileNotFoundError(path)
        return fd

    def _adopt(self, path: Path, wanted: StageInfo) -> StageInfo:
        try:
            for directory in _DIRECTORIES:
                (path / directory).mkdir(0o755, exist_ok=True)
            if not (path / "stage.json").exists():
                fields = {name: getattr(wanted, name) for name in StageInfo.__slots__}
                with published(path / "stage.json") as stream:
                    stream.write(json.dumps(fields, indent=1).encode() + b"\n")
                return wanted
        except OSError as error:
            raise StageSetupError(f"stage {path}: {error.strerror}", hint=_space_hint(error)) from error
        info = _load(path)
        known, asked = info.image_name or info.image, wanted.image_name or wanted.image
        others = f"run in it as it is with pvisor stage exec {info.name} -- CMD, or use another --stage"
        if info.image != wanted.image:
            raise StageMismatchError(f"stage {info.name!r} was made from image {known}, not {asked}", hint=others)
        if wanted.workspace not in (None, info.workspace):
            known = info.workspace or "(none)"
            keep = f"give --workspace {shlex.quote(info.workspace)}" if info.workspace else "leave out --workspace"
            raise StageMismatchError(
                f"stage {info.name!r} was made for workspace {known}, not {wanted.workspace}", hint=f"{keep}, {others}"
            )
        return info


def _info(name: str, image: str, image_name: str, workspace: Path | None) -> StageInfo:
    where = str(workspace.absolute()) if workspace is not None else None
    return StageInfo(name=name, image=image, image_name=image_name, workspace=where, created_at=int(time.time()))


def _load(path: Path) -> StageInfo:
    try:
        fields = json.loads((path / "stage.json").read_bytes())
        return StageInfo(**{name: fields[name] for name in StageInfo.__slots__})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageSetupError(
            f"stage {path.name!r}: stage.json does not say what the stage is ({error})",
            hint=f"save what you need from {path}/upper, then `pvisor stage drop {path.name}`",
        ) from error


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def _running(path: Path) -> Init | None:
    try:
        fields = json.loads((path / "init").read_bytes())
        init = Init(pid=int(fields["pid"]), started=int(fields["started"]))
        return init if start_time(init.pid) == init.started else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold spaces and parentheses."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _space_hint(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make space on the file system of PVISOR_HOME"
    return "set PVISOR_HOME to a directory you can write"
