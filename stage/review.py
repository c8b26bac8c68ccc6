"""What a stage changed, for someone who decides about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from imaged.config import Config
from stage.applying.ledger import Ledger
from stage.applying.moment import unseen
from stage.applying.recovery import recover
from stage.applying.workspace import require_same
from stage.edits.changes import Change, Kind, Overlay, changes
from stage.edits.fixtures import without_fixtures
from stage.edits.patch import FilePatch, patch
from stage.edits.selection import PathLike, listed, relative, require_known, selected
from stage.edits.visible import visible
from stage.errors import StageError
from stage.kept.record import StageInfo
from stage.kept.stages import Stages
from stage.options import WORKSPACE

Mount = Callable[[StageInfo], AbstractContextManager[Path]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What was changed below `base`, the workspace or the image's root. Only good inside its `with` block."""

    stage: str
    base: Path
    changes: tuple[Change, ...]

    def patches(self) -> Iterator[FilePatch]:
        """The changes with their text, made one by one. OSError when a file can not be read."""
        return map(patch, self.changes)


@contextmanager
def workspace_review(stages: Stages, name: str, paths: Sequence[PathLike] | PathLike = ()) -> Iterator[Review]:
    """What is pending for the workspace: what was changed and not applied since. StageError, NotFoundError for a path.

    `paths` are below the workspace, or absolute as the host or the stage has them; none are all. Works while the stage
    runs. An apply that a crash cut off is undone or finished first.
    """
    info, files = stages.get(name), stages.files(name)
    if info.workspace is None:
        raise StageError(f"stage {name!r} has no workspace", hint="see what it changed of the image with --root")
    base = Path(info.workspace)
    tops = [os.fsencode(base), WORKSPACE.encode()]
    wanted = [relative(path, tops, "the workspace") for path in listed(paths)]
    recover(files.applied)
    if base.is_dir():
        require_same(base, info.base, base.stat())
    history = Ledger(files.applied).applied()
    others = unseen(history, info)
    with _layers(files.workspace_upper, files.workspace_work, nullcontext(base)) as overlay:
        found: Sequence[Change] = ()
        if overlay is not None:
            made = list(changes(overlay, settled=history.settled, unseen=others))
            shown = visible(made, overlay.lower)
            require_known(wanted, [*made, *shown], overlay, "the workspace", settled=history.entries)
            found = selected(shown, wanted)
        yield Review(stage=name, base=base, changes=tuple(found))


@contextmanager
def root_review(stages: Stages, name: str, mount: Mount, paths: Sequence[PathLike] | PathLike = ()) -> Iterator[Review]:
    """What was changed of the image, whose mounted directory `mount` yields. Paths are below `/`. StageError."""
    info, files = stages.get(name), stages.files(name)
    wanted = [relative(path, [b"/"], "the image") for path in listed(paths)]
    with _layers(files.upper, files.work, mount(info)) as overlay:
        found: Sequence[Change] = ()
        if overlay is not None:
            made = without_fixtures(list(changes(overlay)), overlay)
            shown = visible(made, overlay.lower)
            require_known(wanted, [*made, *shown], overlay, "the image")
            found = selected(shown, wanted)
        yield Review(stage=name, base=Path("/"), changes=tuple(found))


def review(
    stages: Stages, name: str, mount: Mount, paths: Sequence[PathLike] | PathLike = (), *, root: bool = False
) -> AbstractContextManager[Review]:
    """Of the workspace when the stage has one, unless it is the `root` that is asked for."""
    if root or stages.get(name).workspace is None:
        return root_review(stages, name, mount, paths)
    return workspace_review(stages, name, paths)


@contextmanager
def _layers(upper: Path, work: Path, lower: AbstractContextManager[Path]) -> Iterator[Overlay | None]:
    """None when nothing was ever mounted there, and so nothing written. `lower` is entered only if need be."""
    if not upper.is_dir():
        yield None
        return
    with lower as base:
        if not base.is_dir():
            raise StageError(f"{base} is not there", hint="put the directory back where it was when the stage was made")
        with Overlay.opened(upper=upper, lower=base, work=work) as overlay:
            yield overlay


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """One changed name: `old_path` when it was another in the base, and what text has no words for in `notes`."""

    path: bytes
    kind: Kind
    old_path: bytes | None
    added_lines: int
    removed_lines: int
    is_binary: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What a stage changed below `base`, and the same as text that `git apply` and `patch -p1` accept."""

    base: Path
    files: tuple[FileDiff, ...]
    patch: bytes


def diff(
    stage: str,
    paths: Sequence[PathLike] | PathLike = (),
    *,
    root: bool = False,
    server: str | None = None,
    config: Config | None = None,
) -> Diff:
    """What is pending in a kept stage for its workspace; with `root`, or without a workspace, what it did to the image.

    Only what is at or below `paths`, when there are any. The stage may run. Threads may call this at once. Raises
    StageNotFoundError, StageError or another PvisorError.
    """
    config = config or Config.resolve(server=server)
    stages = Stages(config.stages)
    with review(stages, stage, image_mount(config), paths, root=root) as found:
        patches = list(found.patches())
    files = tuple(
        FileDiff(
            path=item.change.path,
            kind=item.change.kind,
            old_path=item.change.old_path,
            added_lines=item.added_lines,
            removed_lines=item.removed_lines,
            is_binary=item.is_binary,
            notes=tuple(os.fsdecode(note) for note in item.notes),
        )
        for item in patches
    )
    return Diff(base=found.base, files=files, patch=b"".join(item.rendered for item in patches))


def image_mount(config: Config) -> Mount:
    """Mounts a stage's image through the node daemon, for as long as it is looked at."""

    @contextmanager
    def mounted(info: StageInfo) -> Iterator[Path]:
        from fuse.imagemount import using_image
        from fuse.node import ensure

        with using_image(config, ensure(config).open_image(info.image, server=config.server)) as directory:
            yield directory

    return mounted
