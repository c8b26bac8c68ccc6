"""Kept stages as they are at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stage.errors import StageNotFoundError
from stage.kept import cgroups, running
from stage.kept.cgroups import Limits
from stage.kept.record import StageInfo
from stage.kept.stages import Stages
from stage.kept.writes import written_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """A stage, what its writes take on the disk, and the host's pids and the limits of what runs in it.

    A stage that is `running` with no pid is one whose command starts or ends just now.
    """

    info: StageInfo
    written_bytes: int
    running: bool
    pids: tuple[int, ...]
    limits: Limits


def survey(stages: Stages) -> Iterator[StageState]:
    """Every kept stage by name, but damaged ones. All are asked what runs in them with one look at /proc."""
    inits = {info: stages.running(info.name) for info in stages.list()}
    pids = running.processes(init for init in inits.values() if init is not None)
    for info, init in inits.items():
        try:
            files = stages.files(info.name)
        except StageNotFoundError:  # dropped meanwhile
            continue
        yield StageState(
            info=info,
            written_bytes=written_bytes([files.upper, files.workspace_upper]),
            running=init is not None,
            pids=pids.get(init, ()) if init is not None else (),
            limits=cgroups.limits_of(files.path) if init is not None else Limits(),
        )
