"""A host directory with an overlay on it, edited by a shell script as a process in a stage would."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fuse import linux
from stage.boundary.overlay import OVER_IMAGE, OVER_WORKSPACE, mount_overlay
from stage.edits.changes import Change, Kind, Node, Overlay, Settled, changes
from stage.edits.patch import patch
from stage.edits.visible import visible

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layers:
    """`base` and what was written over it; everything below one directory of a file system that overlayfs accepts."""

    root: Path
    options: str = OVER_WORKSPACE

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def upper(self) -> Path:
        return self.root / "upper"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The overlay, writable, for the block."""
        target = self.root / "merged"
        target.mkdir(exist_ok=True)
        self.work.mkdir(exist_ok=True)
        mount_overlay(self.base, self.upper, self.work, target, options=self.options)
        try:
            yield target
        finally:
            linux.umount(target)

    def edit(self, script: str) -> None:
        """Runs a script in the overlay."""
        with self.mounted() as merged:
            run(script, merged)

    def edit_with(self, function: Callable[[Path], None]) -> None:
        """Calls a function with the overlay."""
        with self.mounted() as merged:
            function(merged)

    @contextmanager
    def overlay(self) -> Iterator[Overlay]:
        with Overlay.opened(upper=self.upper, lower=self.base, work=self.work) as overlay:
            yield overlay

    def changes(self, settled: Settled | None = None) -> list[Change]:
        with self.overlay() as overlay:
            return list(changes(overlay, settled=settled) if settled else changes(overlay))

    def told_with(self, look: Callable[[Node], T]) -> list[tuple[Change, T | None]]:
        """The changes, with what a function says of the new node while its file can be read."""
        with self.overlay() as overlay:
            return [(change, look(change.new) if change.new is not None else None) for change in changes(overlay)]

    def told(self) -> list[str]:
        """The changes to review, a line each: `modified a`, `renamed b -> c`."""
        lines = []
        for change in self.changes():
            if change.kind is Kind.TIMES:
                continue
            where = os.fsdecode(change.path)
            if change.kind is Kind.RENAMED:
                where = f"{os.fsdecode(change.old_path or b'')} -> {where}"
            lines.append(f"{change.kind} {where}")
        return lines


def layers(root: Path, script: str, options: str = OVER_WORKSPACE) -> Layers:
    """Layers whose base a script made."""
    made = Layers(root, options)
    made.base.mkdir(parents=True)
    run(script, made.base)
    return made


def over_image(root: Path, script: str) -> Layers:
    """As `layers`, with the options that the root of a stage has."""
    return layers(root, script, OVER_IMAGE)


def run(script: str, directory: Path, shell: Sequence[str] = ("sh", "-ec")) -> None:
    """A script that must succeed, in a directory."""
    done = subprocess.run([*shell, script], cwd=directory, capture_output=True, timeout=60)
    assert done.returncode == 0, (script, done.stdout, done.stderr)


def patch_text(layers: Layers) -> bytes:
    """The review of all changes, as `pvisor stage diff` prints it."""
    with layers.overlay() as overlay:
        return b"".join(patch(change).rendered for change in visible(changes(overlay), overlay.lower))
