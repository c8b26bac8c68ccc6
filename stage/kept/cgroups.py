"""Limits of a stage's processes: memory, processor time, number of processes, by cgroups of version 2 or 1.

    <cgroup of the caller>/pvisor-TOKEN     one in each hierarchy that a limit needs (see `hierarchy`)
    stages/NAME/cgroups                     the limits and those paths; written first, so that what a killed command
                                            leaves is removed with its stage, or by the next process in it

Only workloads are in them. Init stays with the caller, so that it is never what the kernel ends for want of memory. No
limit, no cgroup.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stage.errors import StageBusyError, StageSetupError
from stage.kept import hierarchy, running

RECORD = "cgroups"
_EVENTS = ("memory.events", "memory.oom_control")  # of version 2, of version 1
_SMALLEST_MEMORY = 1 << 20
_SMALLEST_CPUS = 0.01
_DEATH_MS = 1000
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the workloads of a stage may use together: memory (and no swap), processors' time, processes and threads."""

    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < _SMALLEST_MEMORY:
            raise StageSetupError(f"no process runs in {self.memory_bytes} bytes of memory", hint="give 1M or more")
        if self.cpus is not None and not _SMALLEST_CPUS <= self.cpus < 1e6:
            raise StageSetupError(f"{self.cpus:g} is no number of processors", hint=f"give {_SMALLEST_CPUS} or more")
        if self.pids is not None and self.pids < 1:
            raise StageSetupError(f"no process runs where {self.pids} may", hint="give 1 or more")

    def wanted(self) -> dict[str, float]:
        """The value of each controller that has a limit."""
        values = {"memory": self.memory_bytes, "cpu": self.cpus, "pids": self.pids}
        return {name: value for name, value in values.items() if value is not None}


class Group(NamedTuple):
    """The cgroups of a stage, opened, so that they are at hand whatever the root is. None of them without limits."""

    limits: Limits = Limits()
    entrances: tuple[int, ...] = ()
    events: int | None = None
    home: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those that init needs."""
        return self.entrances if self.events is None else (*self.entrances, self.events)

    def expect(self, pid: int) -> None:
        """Says that a move is near, by moving a process of the caller's to where it is.

        For the first of several moves the kernel waits until all processors have taken notice, which takes as long as
        half a start; init makes the mounts meanwhile.
        """
        if self.home is not None:
            with suppress(OSError):  # only time is lost
                os.write(self.home, str(pid).encode())

    def enter(self) -> None:
        """Moves the calling process, which must have one thread, and what it starts from then on."""
        for fd in self.entrances:
            try:
                os.write(fd, b"0")
            except OSError as error:
                raise StageSetupError(f"limits of the stage: {error.strerror}", hint="see pvisor stage ls") from error

    def killed_for_memory(self) -> int:
        """How many processes the kernel has ended there because the memory limit was reached."""
        if self.events is None:
            return 0
        found = re.search(rb"^oom_kill (\d+)$", os.pread(self.events, 4096, 0), re.MULTILINE)
        return int(found[1]) if found else 0


@contextmanager
def limited(stage: Path, limits: Limits) -> Iterator[Group]:
    """Cgroups for the workloads of the stage with this directory, which the caller holds; removed after the block."""
    remove(stage)
    if not limits.wanted():
        yield Group()
        return
    try:
        _make(stage, limits)
        with joined(stage) as group:
            yield group
    finally:
        if running.find(stage) is None:  # else other commands run in it, and the next start or drop removes them
            remove(stage)


@contextmanager
def joined(stage: Path) -> Iterator[Group]:
    """The cgroups of what runs in the stage already."""
    directories = [Path(path) for path in _record(stage).get("directories", ())]
    with ExitStack() as opened:
        entrances = tuple(_open(path / "cgroup.procs", os.O_WRONLY, opened) for path in directories)
        counters = [path / name for path in directories for name in _EVENTS if (path / name).exists()]
        events = _open(counters[0], os.O_RDONLY, opened) if counters else None
        own = hierarchy.own() if directories else None
        home = _open(own, os.O_WRONLY, opened) if own is not None else None
        yield Group(limits=limits_of(stage), entrances=entrances, events=events, home=home)


def limits_of(stage: Path) -> Limits:
    """What limits the workloads that run in the stage."""
    return Limits(**_record(stage).get("limits", {}))


def remove(stage: Path) -> None:
    """Removes the cgroups of the stage, which nobody else holds, when the last processes in them are dead.

    Raises StageBusyError when they are not after some seconds.
    """
    record = _record(stage)
    if record:
        for path in record["directories"]:
            _remove_directory(Path(path))
        (stage / RECORD).unlink(missing_ok=True)


def _make(stage: Path, limits: Limits) -> None:
    name, wanted = f"pvisor-{os.urandom(6).hex()}", limits.wanted()
    places = hierarchy.places(wanted)
    directories = [place.directory / name for place in places]
    record = {"limits": asdict(limits), "directories": [str(path) for path in directories]}
    try:
        (stage / RECORD).write_text(json.dumps(record))
    except OSError as error:
        hint = "make space on the file system of PVISOR_HOME, and see that it can be written"
        raise StageSetupError(f"{stage / RECORD}: {error.strerror}", hint=hint) from error
    for place, directory in zip(places, directories, strict=True):
        try:
            directory.mkdir()
        except OSError as error:
            raise StageSetupError(
                f"cgroup {directory}: {error.strerror}", hint="limits need a cgroup file system that can be written"
            ) from error
        asked: dict[str, str] = {}
        for controller in sorted(place.controllers):
            asked |= hierarchy.settings(controller, wanted[controller], unified=place.unified)
        inherited = place.inherited
        for file, text in (inherited | asked).items():
            lower = hierarchy.stricter(text, inherited[file]) if file in inherited else text
            _set(directory / file, lower, needed=file in asked and file not in hierarchy.OF_SWAP)


def _set(path: Path, text: str, *, needed: bool) -> None:
    """What is not `needed` may have no file: a controller that is off has no limit to inherit."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if not needed:
            return
        raise StageSetupError(f"limit {path}: {error.strerror}", hint="this kernel has no such limit") from error
    try:
        os.write(fd, text.encode())
    except OSError as error:
        above = "the cgroup above allows less" if error.errno == errno.EINVAL else ""
        raise StageSetupError(f"limit {path.name} = {text}: {error.strerror}", hint=above) from error
    finally:
        os.close(fd)


def _open(path: Path, flags: int, opened: ExitStack) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise StageSetupError(f"limits of the stage: {path}: {error.strerror}", hint="see pvisor stage ls") from error
    opened.callback(os.close, fd)
    return fd


def _record(stage: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((stage / RECORD).read_bytes()))
    except FileNotFoundError:
        return {}
    except ValueError:  # cut off before anything was made
        return {}


def _remove_directory(path: Path) -> None:
    """Waits for processes that are on their way out: their init was killed, but is not gone yet."""
    for _ in range(_TRIES):
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise StageSetupError(f"cgroup {path}: {error.strerror}") from error
        _await_deaths(path / "cgroup.procs")
    raise StageBusyError(
        f"cgroup {path} still has processes", hint="see what keeps them from ending, in its cgroup.procs"
    )


def _await_deaths(procs: Path) -> None:
    for pid in procs.read_text().split():
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(int(pid))
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(_DEATH_MS)
            os.close(pidfd)
