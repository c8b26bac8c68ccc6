"""`pvisor stage`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from cli.arguments import OPTIONS_FIRST, own_command
from cli.common import Settings, age, command_options, human_bytes, output_options, table, warn, writing
from cli.run import open_image, process_options
from stage.errors import ApplyConflictError, StageBusyError, StageSetupError
from stage.kept.cgroups import Limits
from stage.kept.stages import Stages
from stage.options import RunOptions
from stage.session import exec_in_stage


@click.group(short_help="Work with stages that were kept.")
def stage() -> None:
    """Stages: the retained writes of `pvisor run --stage`.

    \b
    Examples:
      pvisor run -it --stage fix --workspace . debian:12 -- bash
      pvisor stage diff fix
      pvisor stage apply fix
      pvisor stage drop fix
    """


@stage.command("ls", short_help="List stages, and what runs in them.")
@output_options
def list_stages(settings: Settings) -> None:
    """List stages: what they are made from, what they wrote, and what runs in them.

    \b
    Example:
      pvisor stage ls
    """
    from stage.kept.survey import survey

    stages = Stages(settings.config.stages)
    states = list(survey(stages))

    def text() -> str:
        now = time.time()
        rows = [
            [
                state.info.name,
                state.info.image_name or state.info.image[:12],
                age(now - state.info.created_at),
                human_bytes(state.written_bytes),
                str(len(state.pids)) if state.running else "-",
                _limits(state.limits),
                state.info.workspace or "",
            ]
            for state in states
        ]
        return table(["STAGE", "IMAGE", "AGE", "WRITES", "PROCESSES", "LIMITS", "WORKSPACE"], rows)

    for name in stages.damaged():
        warn(
            f"stage {name!r} is damaged: its stage.json does not say what it is; `pvisor stage drop {name}` removes it"
        )
    found = [
        {
            **asdict(state.info),
            "written_bytes": state.written_bytes,
            "running": state.running,
            "processes": len(state.pids),
            "pids": list(state.pids),
            "limits": asdict(state.limits),
        }
        for state in states
    ]
    settings.emit(found, text)


def _limits(limits: Limits) -> str:
    shown = [human_bytes(limits.memory_bytes)] if limits.memory_bytes is not None else []
    shown += [f"{limits.cpus:g} cpus"] if limits.cpus is not None else []
    shown += [f"{limits.pids} pids"] if limits.pids is not None else []
    return ", ".join(shown) or "-"


@stage.command("exec", context_settings=OPTIONS_FIRST, short_help="Run a command in a stage.")
@process_options
@click.argument("name", metavar="STAGE")
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD ARG...", callback=own_command
)
@command_options
def execute(settings: Settings, name: str, command: tuple[str, ...], options: RunOptions) -> int:
    """Run a command in a stage, beside what runs there or over what it kept.

    Beside other commands it shares their processes, network and files; the stage ends with the last of them. Stdout is
    the command's own: --json changes nothing here.

    \b
    Example:
      pvisor stage exec fix -- git status
    """
    stages = Stages(settings.config.stages)
    image = open_image(settings, stages.get(name).image)
    while True:
        running = stages.running(name)
        try:
            return exec_in_stage(settings.config, image, name, command, options)
        except StageSetupError as error:  # nothing was started
            between = isinstance(error, StageBusyError) or (running is not None and stages.running(name) != running)
            if not between or not stages.settle(name):
                raise


@stage.command(short_help="Move changes into the workspace directory.")
@click.option("--dry-run", is_flag=True, help="Only show what would be applied, or what is in the way.")
@click.argument("name", metavar="STAGE")
@click.argument("paths", nargs=-1, type=click.Path(), metavar="[PATH]...")
@output_options
def apply(settings: Settings, name: str, paths: tuple[str, ...], dry_run: bool) -> None:
    """Move what a stage changed in its workspace into the host directory: all of it, or these paths.

    Nothing is moved when the host has other changes at one of the paths. Applying again does nothing.

    \b
    Examples:
      pvisor stage apply fix
      pvisor stage apply fix src/main.py tests
    """
    from stage.batch import apply_stage, preview
    from stage.edits.names import quoted

    stages = Stages(settings.config.stages)
    workspace = stages.get(name).workspace
    document: dict[str, Any] = {"stage": name, "dry_run": dry_run, "applied": [], "conflicts": []}
    try:
        result = (preview if dry_run else apply_stage)(stages, name, paths)
    except ApplyConflictError as error:
        document["conflicts"] = [{"path": os.fsdecode(path), "reason": reason} for path, reason in error.conflicts]
        settings.emit(document, "")
        if settings.json_output:
            raise
        for path, reason in error.conflicts:
            print(f"conflict: {quoted(path).decode()} {reason}", file=sys.stderr)
        count = f"{len(error.conflicts)} conflict{'s' if len(error.conflicts) > 1 else ''}"
        message = f"nothing was applied to {workspace}: {count}"
        raise ApplyConflictError(message, conflicts=error.conflicts, hint=error.hint) from error
    lines = []
    for change in result.changes:
        old = change.old_path
        entry = {"path": os.fsdecode(change.path), "kind": str(change.kind)}
        document["applied"].append(entry | ({"old_path": os.fsdecode(old)} if old is not None else {}))
        source = f"{quoted(old).decode()} -> " if old is not None else ""
        lines.append(f"{change.kind}  {source}{quoted(change.path).decode()}")
    settings.emit(document, "\n".join(lines))
    if not lines and not settings.json_output:
        print("nothing to apply", file=sys.stderr)


@stage.command(short_help="Show what a stage changed.")
@click.option("--root", is_flag=True, help="What was changed of the image, also when the stage has a workspace.")
@click.option("--stat", "form", flag_value="stat", help="Names, and how many lines of each changed.")
@click.option("--name-only", "form", flag_value="names", help="Names only.")
@click.option("-z", "zero", is_flag=True, help="With --name-only: names as they are, a NUL after each.")
@click.argument("name", metavar="STAGE")
@click.argument("paths", nargs=-1, type=click.Path(path_type=bytes), metavar="[PATH]...")
@command_options
def diff(settings: Settings, name: str, paths: tuple[bytes, ...], form: str | None, root: bool, zero: bool) -> None:
    """Show what a stage changed: of its workspace, or of the image when it has none.

    The text is what `git apply` and `patch -p1` take. What it can not say (binary content, owners, empty directories)
    stands in lines that begin with #. PATHs limit it to those files and directories.

    \b
    Examples:
      pvisor stage diff fix
      pvisor stage diff --stat fix src
      pvisor stage diff fix | git -C ../clone apply
    """
    from stage.edits import summary
    from stage.review import image_mount, review

    if zero and form != "names":
        raise click.UsageError("-z goes with --name-only")
    config = settings.config
    with review(Stages(config.stages), name, image_mount(config), paths, root=root) as shown:
        if settings.json_output:
            found = [summary.document(patch) for patch in shown.patches()]
            settings.emit({"stage": name, "base": os.fsdecode(shown.base), "changes": found}, "")
        elif form == "names":
            write(summary.names(shown.changes, zero=zero))
        elif form == "stat":
            write(summary.stat(list(shown.patches())))
        else:
            write(patch.rendered for patch in shown.patches())


def write(parts: Iterable[bytes]) -> None:
    """Bytes on stdout, all of them: unbuffered (PYTHONUNBUFFERED), one call may take a part only."""
    sys.stdout.flush()
    for part in parts:
        left = memoryview(part)
        with writing():
            while left:
                left = left[sys.stdout.buffer.write(left) :]
    with writing():
        sys.stdout.buffer.flush()


@stage.command()
@click.option("--force", is_flag=True, help="End what runs in the stage first.")
@click.argument("names", nargs=-1, required=True, metavar="STAGE...")
@output_options
def drop(settings: Settings, names: tuple[str, ...], force: bool) -> None:
    """Throw stages away, with all writes they kept.

    \b
    Example:
      pvisor stage drop --force fix other
    """
    from stage.api import drop as drop_stage

    config = settings.config
    dropped: list[str] = []
    try:
        for name in dict.fromkeys(names):
            drop_stage(name, force=force, config=config)
            dropped.append(name)
    finally:  # also those that went before one that can not
        if dropped:
            settings.emit({"dropped": dropped[0] if len(names) == 1 else dropped}, "\n".join(dropped))
