"""The cgroup file systems: where a process's own cgroups are, where new ones can go, what their files are called.

Version 1 has a hierarchy for each controller or a few, version 2 one for all. A new cgroup goes below the caller's own,
so that what limits the caller limits it too. In version 2 a cgroup that has processes can have no limited children:
then it goes beside the caller's, with the caller's limits. Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stage.errors import StageSetupError

PERIOD_US = 100_000
# Not there on a host that does not account for swap.
OF_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
_INHERITED = ("memory.max", "memory.swap.max", "cpu.max", "pids.max")


class Place(NamedTuple):
    """A directory that takes new cgroups with these controllers; `inherited` is what to write into their files."""

    directory: Path
    controllers: frozenset[str]
    unified: bool
    inherited: dict[str, str]


def places(wanted: Iterable[str]) -> list[Place]:
    """Where cgroups with these controllers can be made, one a hierarchy. Raises StageSetupError."""
    own, found = _own(), dict[Path, set[str]]()
    unified = set[str]()
    for controller in wanted:
        if controller in own:
            found.setdefault(own[controller], set()).add(controller)
        elif "" in own:
            unified.add(controller)
        else:
            raise StageSetupError(
                f"this host has no cgroup controller {controller!r} mounted", hint="mount cgroup2 on /sys/fs/cgroup"
            )
    listed = [
        Place(directory=directory, controllers=frozenset(controllers), unified=False, inherited={})
        for directory, controllers in found.items()
    ]
    return [*listed, _unified(own[""], unified)] if unified else listed


def own() -> Path | None:
    """The file that moves processes to a cgroup of the calling process, in one of the hierarchies."""
    return next((path / "cgroup.procs" for path in _own().values()), None)


def settings(controller: str, value: float, *, unified: bool) -> dict[str, str]:
    """The files that limit a controller, in the order in which they are to be written."""
    if controller == "pids":
        return {"pids.max": f"{value:.0f}"}
    if controller == "cpu":
        quota = f"{value * PERIOD_US:.0f}"
        if unified:
            return {"cpu.max": f"{quota} {PERIOD_US}"}
        return {"cpu.cfs_period_us": f"{PERIOD_US}", "cpu.cfs_quota_us": quota}
    if unified:
        return {"memory.max": f"{value:.0f}", "memory.swap.max": "0"}
    return {"memory.limit_in_bytes": f"{value:.0f}", "memory.memsw.limit_in_bytes": f"{value:.0f}"}


def stricter(one: str, other: str) -> str:
    """The lower of two limits as a file of version 2 has them: `max`, a number, or for cpu.max a quota and a period."""

    def amount(text: str) -> float:
        value, _, period = text.partition(" ")
        return float("inf") if value == "max" else int(value) / int(period or 1)

    return one if amount(one) <= amount(other) else other


def _own() -> dict[str, Path]:
    """The calling process's cgroup for each mounted controller of version 1, and under "" that of version 2."""
    paths: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        head, _, tail = line.partition(" - cgroup")
        if not tail:
            continue
        root, point = (_unescape(field) for field in head.split(" ")[3:5])
        controllers = [""] if tail.startswith("2 ") else tail.split(" ")[-1].split(",")
        for controller in controllers:
            if controller in paths and (paths[controller] + "/").startswith(root.rstrip("/") + "/"):
                found.setdefault(controller, Path(point, os.path.relpath(paths[controller], root)))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _unified(own: Path, wanted: set[str]) -> Place:
    """The caller's own cgroup, or the nearest one above that may have limited children."""
    inherited: dict[str, str] = {}
    directory = own
    while (directory / "cgroup.controllers").exists():
        if wanted <= set((directory / "cgroup.controllers").read_text().split()) and _delegate(directory, wanted):
            return Place(directory=directory, controllers=frozenset(wanted), unified=True, inherited=inherited)
        for name in _INHERITED:
            limit = _limit(directory / name)
            inherited[name] = stricter(limit, inherited.get(name, "max"))
        directory = directory.parent
    raise StageSetupError(
        f"no cgroup from {own} up can limit {', '.join(sorted(wanted))} of its children",
        hint="run pvisor where those controllers are delegated, as with systemd-run --scope -p Delegate=yes",
    )


def _limit(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:  # the controller is off there, or it is the root
        return "max"


def _delegate(directory: Path, wanted: set[str]) -> bool:
    """Turns the controllers on for children; False when the cgroup's own processes are in the way.

    The kernel would turn some on even then, but for children that can take threads only. The root has no such rule.
    """
    kind = directory / "cgroup.type"
    if kind.exists() and (kind.read_text().strip() != "domain" or (directory / "cgroup.procs").read_text()):
        return False
    control = directory / "cgroup.subtree_control"
    missing = wanted - set(control.read_text().split())
    if not missing:
        return True
    try:
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
            return False
        raise StageSetupError(f"{control}: {error.strerror}") from error
    return True
