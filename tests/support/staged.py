"""A host directory, a stage that has it for its workspace, and a copy in which the same is done without a stage."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuse import linux
from stage.batch import Applied, apply_stage
from stage.boundary.overlay import OVER_WORKSPACE, mount_overlay
from stage.kept.stagefiles import StageFiles
from stage.kept.stages import Stages
from tests.support import trees
from tests.support.overlay import run

Rows = dict[bytes, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Staged:
    """Everything below one directory of a file system that overlayfs accepts; the stage has no process."""

    root: Path
    name: str = "fix"

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def direct(self) -> Path:
        return self.root / "direct"

    @property
    def stages(self) -> Stages:
        return Stages(self.root / "stages")

    @property
    def files(self) -> StageFiles:
        return self.stages.files(self.name)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """What a process of the stage has at /workspace, with the stage held."""
        target = self.root / "merged"
        target.mkdir(exist_ok=True)
        with (
            self.stages.use(self.name, image="image", workspace=self.workspace) as stage,
            own_mounts(),
        ):
            upper, work = stage.workspace_upper, stage.workspace_work
            mount_overlay(self.workspace, upper, work, target, options=OVER_WORKSPACE)
            try:
                yield target
            finally:
                linux.umount(target)

    def edit(self, script: str) -> None:
        """A script in the stage only."""
        with self.mounted() as merged:
            run(script, merged)

    def both(self, script: str) -> None:
        """A script in the stage, and in the copy."""
        self.edit(script)
        run(script, self.direct)

    def both_do(self, function: Callable[[Path], None]) -> None:
        with self.mounted() as merged:
            function(merged)
        function(self.direct)

    def apply(self, *paths: bytes | str, reached: Callable[[str], None] | None = None) -> Applied:
        return apply_stage(self.stages, self.name, paths, **({"reached": reached} if reached else {}))

    def applied(self, *paths: bytes | str) -> list[str]:
        """What `apply` says, a line each: `modified a`."""
        return [f"{change.kind} {os.fsdecode(change.path)}" for change in self.apply(*paths).changes]

    def assert_as_direct(self) -> None:
        """The workspace is what the copy is; the times of what was done apart are not compared."""
        mine, theirs = content(self.workspace), content(self.direct)
        assert mine == theirs, difference(mine, theirs)

    def assert_shown(self) -> None:
        """The stage still shows what the workspace has, times of files included."""
        mine = {path: _without_links(row) for path, row in trees.found(self.workspace).items()}
        with self.mounted() as merged:
            theirs = {path: _without_links(row) for path, row in trees.found(merged).items()}
        assert mine == theirs, difference(mine, theirs)

    def assert_clean(self) -> None:
        """Nothing of an apply is left in the workspace, nor anything unfinished in the ledger."""
        assert not list(self.workspace.glob(".pvisor*"))
        assert not [path.name for path in self.files.applied.glob("*") if path.name != "applied.json"]


@contextmanager
def own_mounts() -> Iterator[None]:
    """A mount namespace for this thread: in the host's, others that make one of their own would keep ours busy."""
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    linux.unshare(linux.CLONE_NEWNS)
    try:
        linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        yield
    finally:
        linux.setns(before, linux.CLONE_NEWNS)
        os.fchdir(here)
        os.close(before)
        os.close(here)


def staged(root: Path, script: str) -> Staged:
    """With a workspace that a script made, and a stage that begins then."""
    made = Staged(root)
    made.workspace.mkdir(parents=True)
    run(script, made.workspace)
    subprocess.run(["cp", "-a", made.workspace, made.direct], check=True)
    made.edit("true")
    return made


def content(top: Path) -> Rows:
    """Rows of `trees.found` without the times."""
    return {path: (*row[:3], *row[4:]) for path, row in trees.found(top).items()}


def difference(mine: Rows, theirs: Rows) -> dict[bytes, Sequence[object]]:
    return {
        path: (mine.get(path), theirs.get(path))
        for path in sorted(mine.keys() | theirs.keys())
        if mine.get(path) != theirs.get(path)
    }


def _without_links(row: tuple[object, ...]) -> tuple[object, ...]:
    is_directory = str(row[0]).startswith("0o4")
    return (*row[:3], None if is_directory else row[3], *row[6:])
