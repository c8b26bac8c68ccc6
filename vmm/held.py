"""One VM of this host in the hands of a command: its lock, its record and its directories."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from imaged.errors import FormatError
from vmm import record
from vmm.errors import VmFullError, VmSetupError, space_hint
from vmm.record import State, VmRecord
from vmm.vmlock import release

_TRIES = 100


@dataclass(slots=True, kw_only=True)
class Held:
    """A VM whose lock this process has. Made by `Vms`, which lets go of it as well. For one thread at a time."""

    path: Path
    run: Path
    blocks: Path
    record: VmRecord
    lock_fd: int
    owner_fd: int = field(default=-1)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def disk(self) -> Path:
        return self.path / "disk.qcow2"

    @property
    def console_log(self) -> Path:
        """What the guest has printed since it was started."""
        return console_log(self.path)

    @property
    def memory(self) -> Path:
        """The empty file that a booted VM maps. Not in PVISOR_RUN: on a tmpfs each page read of it would take one."""
        return self.path / "memory"

    def save(self, **changes: Any) -> None:
        """The record with these changes, durably. VmSetupError, and as it VmFullError."""
        changed = replace(self.record, **changes)
        with disk_faults(f"VM {self.name!r}: vm.json"):
            record.save(self.path, changed)
        self.record = changed

    def save_if_room(self, **changes: Any) -> None:
        """As `save`, but on a full disk the changes are only here: for who makes room, or does the same again."""
        try:
            self.save(**changes)
        except VmFullError:
            self.record = replace(self.record, **changes)

    def begin(self, **changes: Any) -> None:
        """As `save`, with what it takes to `undo` it on a full disk, but durable only after `sync`: others see it at
        once, and when the host goes down there is no guest any more that it would be about. VmSetupError.
        """
        changed = replace(self.record, **changes)
        with disk_faults(f"VM {self.name!r}: vm.json"):
            record.replace_prepared(self.path, self.record, changed)
        self.record = changed

    def sync(self) -> None:
        """What `begin` wrote is durable. VmSetupError."""
        with disk_faults(f"VM {self.name!r}: vm.json"):
            record.sync(self.path)

    def undo(self) -> None:
        """The record as it was before `begin`, also when another process began. VmSetupError."""
        try:
            record.take_prepared(self.path)
            self.record = record.load(self.path)
        except (FormatError, FileNotFoundError):  # the host went down before it was durable
            self.save(state=State.RUNNING, park=None)
        except OSError as error:
            raise VmSetupError(f"VM {self.name!r}: vm.json: {error}", hint="see the disk of PVISOR_HOME") from error

    def release_owner(self) -> None:
        """It belongs to this command no longer, if it did."""
        if self.owner_fd >= 0:
            release(self.owner_fd)
            self.owner_fd = -1

    def make_run(self) -> None:
        """An empty directory for what runs. VmSetupError."""
        self.clear_run()
        try:
            self.run.mkdir(0o700, parents=True)
        except OSError as error:
            hint = "set PVISOR_RUN to a directory you can write"
            raise VmSetupError(f"VM {self.name!r}: {self.run}: {error.strerror}", hint=hint) from error

    def clear_run(self) -> None:
        """Nothing of it runs any more. VmSetupError."""
        with disk_faults(f"VM {self.name!r}: {self.run}"):
            remove_run(self.run)


def remove_run(run: Path) -> None:
    """Take away a directory of what ran. OSError.

    Commands that need no lock (`vm ls`, `vm exec`) write there how QEMU ended, and which ports are taken: as often as
    they do it meanwhile, it is done again.
    """
    for left in reversed(range(_TRIES)):
        if not run.exists():
            return
        import shutil  # an eighth of the imports of a resume, for what it rarely does

        try:
            shutil.rmtree(run)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or not left:
                raise


def console_log(path: Path) -> Path:
    """Of the VM in this directory."""
    return path / "console.log"


@contextmanager
def disk_faults(what: str) -> Iterator[None]:
    """An OSError of this block is a VmSetupError that begins so, VmFullError when there is no room."""
    try:
        yield
    except OSError as error:
        kind = VmFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else VmSetupError
        raise kind(f"{what}: {error.strerror}", hint=space_hint(error)) from error
