"""One stage's directory: where its parts are, for who holds it, and for who joins what runs in it."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from stage.errors import StageBusyError, StageError, StageSetupError
from stage.kept import running
from stage.kept.record import StageInfo
from stage.kept.running import Init
from stage.kept.stagelock import space_hint

_JOINED = "joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFiles:
    """Where the parts of a stage are; what is not there yet was not needed yet."""

    path: Path

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
    def applied(self) -> Path:
        """The ledger of what was applied to the workspace."""
        return self.path / "apply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(StageFiles):
    """A stage that this process holds; `lock_fd` is its flock. Made by `Stages`, which also lets go of it."""

    info: StageInfo
    lock_fd: int
    temporary: bool = False
    rest: ExitStack = field(default_factory=ExitStack)
    """What is waited for, and then given back, when the stage's processes are dead and before it is removed."""

    @property
    def workspace(self) -> Path | None:
        """The host directory that the stage shows at /workspace."""
        return Path(self.info.workspace) if self.info.workspace is not None else None

    @property
    def hostname(self) -> str:
        return "stage" if self.temporary else re.sub(r"[^A-Za-z0-9-]", "-", self.info.name)

    @contextmanager
    def joined(self) -> Iterator[int | None]:
        """For the init of the stage: the lock that it must have alone before it ends. None where nobody can join."""
        if self.temporary:
            yield None
            return
        try:
            fd = os.open(self.path / _JOINED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StageSetupError(f"stage {self.path}: {error.strerror}", hint=space_hint(error)) from error
        try:
            yield fd
        finally:
            os.close(fd)

    def record_init(self, pid: int) -> None:
        """Lets other commands find the running init; a temporary stage is nobody else's."""
        if not self.temporary:
            try:
                running.record(self.path, pid)
            except OSError as error:
                raise StageSetupError(f"stage {self.path}: {error.strerror}", hint=space_hint(error)) from error


@contextmanager
def joining(stage: Path, init: Init) -> Iterator[int]:
    """Held by a command that joins what runs in the stage with this directory: until it lets go, init does not end of
    itself. StageBusyError when it is ending already.

    As at the end of `Stages.use`, what was written is on stable storage after the block.
    """
    try:
        fd = os.open(stage / _JOINED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StageSetupError(f"stage {stage}: {error.strerror}", hint=space_hint(error)) from error
    try:
        if not _shared(fd) or running.find(stage) != init:  # an init that ends has the lock, or has just lost it
            raise StageBusyError(f"stage {stage.name!r} is just ending", hint="run the command again")
        try:
            yield fd
        finally:
            from stage.kept.writes import sync_by

            synced(partial(sync_by, fd, stage))  # whether or not the stage was dropped meanwhile
    finally:
        os.close(fd)


def _shared(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def synced(sync: Callable[[], None]) -> None:
    """The command has run, and its exit code is its own, also when the disk fails afterwards."""
    try:
        sync()
    except StageError as error:
        import logging

        logging.getLogger(__name__).error("%s (%s)", error.message, error.hint)
