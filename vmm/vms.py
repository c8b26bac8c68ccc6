"""The VMs of this host: a durable directory each, one for what runs, and the lock of whoever works on it.

    PVISOR_HOME/vms/NAME/   vm.json     the record
                            memory      an empty file as large as the memory, for a VM that was booted
                            lock        flock: held by a command that changes the VM's state
                            owner       flock: held by the command that a temporary VM belongs to
                            disk.qcow2  the disk, when it has one
    PVISOR_RUN/vms/NAME/    sockets and pid file of its QEMU; there only while it runs

A record that says a command is at work, while nobody has the lock, was left by a crash: whoever takes the lock next
puts it in order first (`vmm.recovery`). A directory without a record is no VM yet, or none any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fuse import vmlease
from imaged.config import Config
from imaged.errors import FormatError
from vmm import names, record, stray, vmlock
from vmm.errors import VmBusyError, VmError, VmExistsError, VmNotFoundError, VmSetupError, space_hint
from vmm.held import Held, disk_faults, remove_run
from vmm.names import NAME
from vmm.record import State, VmRecord
from vmm.vmlock import release, try_lock

_WAIT_S = 2.0
"""Long enough for a command that only looks whether a VM needs putting in order."""
_POLL_S = 0.01


class Vms:
    """Safe for several processes; an object may be shared between threads."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.root = config.home / "vms"

    def list(self) -> list[VmRecord]:
        """All VMs by name, but damaged ones."""
        return [found for _, found in self.found() if found is not None]

    def found(self) -> Iterator[tuple[str, VmRecord | None]]:
        """Every VM by name, with None for one whose vm.json does not say what it is, or is gone while it runs."""
        running = stray.running_in(self.config.run / "vms")
        there = {path.name for path in self.root.iterdir()} if self.root.is_dir() else set()
        for name in sorted(there | running.keys()):
            if not NAME.fullmatch(name):
                continue
            try:
                yield name, record.load(self.root / name)
            except (FileNotFoundError, NotADirectoryError):  # else no VM yet, or none any more
                if name in running:
                    yield name, None
            except (OSError, FormatError):
                yield name, None

    def temporary(self) -> Iterator[str]:
        """The names of VMs that belong to a command, or did when it was there. Reads no record."""
        try:
            with os.scandir(self.root) as found:
                there = [entry.name for entry in found if NAME.fullmatch(entry.name)]
        except FileNotFoundError:
            return
        yield from (name for name in there if vmlock.has_owner(self.root / name))

    def get(self, name: str) -> VmRecord:
        """As it is written down. VmNotFoundError, VmError when vm.json is damaged."""
        path = self.path(name)
        try:
            return record.load(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            if stray.find(self.run(name)) is not None:
                hint = f"`pvisor vm rm {name}` ends it"
                raise VmError(f"VM {name!r} is damaged: it runs, and its vm.json is gone", hint=hint) from error
            raise VmNotFoundError(name) from error
        except (OSError, FormatError) as error:
            raise VmError(
                f"VM {name!r} is damaged: {error}", hint=f"`pvisor vm rm {name}` removes what is left of it"
            ) from error

    def exists(self, name: str) -> bool:
        return (self.path(name) / record.RECORD_NAME).exists()

    def path(self, name: str) -> Path:
        """VmArgumentError when that is no name."""
        return self.root / names.checked(name)

    def run(self, name: str) -> Path:
        return self.config.run / "vms" / name

    @contextmanager
    def make(self, wanted: VmRecord, *, among: Iterator[str] | None = None) -> Iterator[Held]:
        """A new VM, held. It is called as `wanted` says, or by the next of the names `among` that no VM has.
        VmExistsError.

        It is there for others from the first `Held.save` on, which comes before anything of it is started. Nothing of
        it stays when the block raises, unless something that was started has not ended: then whoever takes its lock
        next ends and removes it.
        """
        held = self._reserve(wanted, among)
        try:
            if wanted.temporary:
                held.owner_fd = vmlock.lock_owner(held.path)
            yield held
        except BaseException:
            self._give_up(held)
            raise
        finally:
            release(held.lock_fd)

    @contextmanager
    def hold(self, name: str) -> Iterator[Held]:
        """The VM, put in order when the last command was cut off. VmBusyError, VmNotFoundError."""
        from vmm.recovery import settle

        with self.hold_as_it_is(name) as held:
            if not settle(self, held):
                raise VmNotFoundError(name, " any more")
            yield held

    @contextmanager
    def hold_as_it_is(self, name: str) -> Iterator[Held]:
        """The VM, whatever a crash left of it. VmBusyError, VmNotFoundError."""
        held = self._hold(name)
        try:
            yield held
        finally:
            release(held.lock_fd)

    def try_hold(self, name: str) -> Held | None:
        """Its lock if nobody has it, for who then looks at what a crash left; `release` it. VmNotFoundError."""
        lock_fd = try_lock(self.path(name))
        if lock_fd is None:
            return None
        try:
            return self._held(name, lock_fd)
        except BaseException:
            release(lock_fd)
            raise

    def remove_damaged(self, name: str) -> None:
        """End a VM whose vm.json does not say what it was, and remove what is left of it. VmBusyError."""
        path = self.path(name)
        try:
            lock_fd = try_lock(path)
        except VmNotFoundError:  # not even its directory is left
            self._end_damaged(name)
            return
        if lock_fd is None:
            raise self._busy(name)
        try:
            self._end_damaged(name)
            self._remove(path)
        finally:
            release(lock_fd)

    def _end_damaged(self, name: str) -> None:
        from vmm.recovery import end

        end(self.run(name))
        with disk_faults(f"VM {name!r}: {self.run(name)}"):
            remove_run(self.run(name))
        vmlease.drop(self.config, name)

    def remove(self, held: Held) -> None:
        """All of a VM that does not run, but the snapshots; its record goes last, so that it is listed until then."""
        held.clear_run()
        vmlease.drop(self.config, held.name)
        self._remove(held.path)
        held.release_owner()

    def _give_up(self, held: Held) -> None:
        from vmm.process import alive

        if alive(held.run):
            held.save_if_room(state=State.REMOVING)
            held.release_owner()
        else:
            self.remove(held)

    def _remove(self, path: Path) -> None:
        with disk_faults(f"VM {path.name!r}: {path}"):
            _empty(path)
            (path / record.RECORD_NAME).unlink(missing_ok=True)
            with vmlock.making(self.root):
                vmlock.remove_empty(path)

    def _reserve(self, wanted: VmRecord, among: Iterator[str] | None) -> Held:
        self.path(wanted.name)
        with vmlock.making(self.root):
            for name in among or (wanted.name,):
                path = self.path(name)
                try:
                    path.mkdir(0o700)
                except FileExistsError as error:
                    if self._is_leftover(path):
                        break
                    if among is None:
                        hint = "give another --name, or `pvisor vm rm` that one"
                        raise VmExistsError(f"there is a VM {name!r} already", hint=hint) from error
                    continue
                except OSError as error:
                    raise VmSetupError(f"VM {name!r}: {path}: {error.strerror}", hint=space_hint(error)) from error
                break
            lock_fd = try_lock(path)
        if lock_fd is None:
            raise self._busy(name)
        try:
            with disk_faults(f"VM {name!r}: {path}"):
                _empty(path)
        except BaseException:
            release(lock_fd)
            raise
        return Held(
            path=path,
            run=self.run(name),
            blocks=self.config.blocks,
            record=replace(wanted, name=name),
            lock_fd=lock_fd,
        )

    def _is_leftover(self, path: Path) -> bool:
        """Whether a crash came before there was a record, or after; nobody else makes VMs meanwhile."""
        if (path / record.RECORD_NAME).exists():
            return False
        try:
            lock_fd = try_lock(path)
        except VmNotFoundError:
            return False
        if lock_fd is None:
            return False
        release(lock_fd)
        return True

    def _hold(self, name: str) -> Held:
        path, deadline = self.path(name), time.monotonic() + _WAIT_S
        if not path.is_dir():
            self.get(name)  # says why
        while True:
            lock_fd = try_lock(path)
            if lock_fd is not None:
                break
            if time.monotonic() > deadline:
                raise self._busy(name)
            time.sleep(_POLL_S)
        try:
            return self._held(name, lock_fd)
        except BaseException:
            release(lock_fd)
            raise

    def _held(self, name: str, lock_fd: int) -> Held:
        return Held(
            path=self.path(name),
            run=self.run(name),
            blocks=self.config.blocks,
            record=self.get(name),
            lock_fd=lock_fd,
        )

    def _busy(self, name: str) -> VmBusyError:
        from imaged.chunkstore.storelock import holders  # imports LMDB

        try:
            doing = str(self.get(name).state)
            who = ", ".join(f"process {pid}" for pid in holders((self.path(name) / vmlock.LOCK_NAME).stat()))
        except (VmError, OSError):
            doing, who = "", ""
        at_work = f" ({doing})" if doing not in ("", State.RUNNING, State.PARKED) else ""
        return VmBusyError(
            f"VM {name!r} is being worked on by {who or 'another command'}{at_work}", hint="try again when that is done"
        )


def _empty(path: Path) -> None:
    """Remove a VM's files, but not its record and its lock: the disk is large, and without a record nobody sees it."""
    for child in path.iterdir():
        if child.name not in (record.RECORD_NAME, vmlock.LOCK_NAME):
            child.unlink(missing_ok=True)
