"""`pvisor stage`."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from cli.common import Settings, age, command_options, table, warn
from cli.run import OPTIONS_FIRST, open_image, own_command, process_options
from stage.run import RunOptions, exec_in_stage
from stage.stages import Stages


@click.group(short_help="Work with stages that were kept.")
def stage() -> None:
    """Stages: the retained writes of `pvisor run --stage`."""


@stage.command("ls")
@command_options
def list_stages(settings: Settings) -> None:
    """List stages."""
    stages = Stages(settings.config.stages)
    found = [{**asdict(info), "running": stages.running(info.name) is not None} for info in stages.list()]

    def text() -> str:
        now = time.time()
        rows = [
            [
                info["name"],
                info["image_name"] or info["image"][:12],
                age(now - info["created_at"]),
                info["workspace"] or "",
                "running" if info["running"] else "idle",
            ]
            for info in found
        ]
        return table(["STAGE", "IMAGE", "AGE", "WORKSPACE", "STATE"], rows)

    for name in stages.damaged():
        warn(
            f"stage {name!r} is damaged: its stage.json does not say what it is; `pvisor stage drop {name}` removes it"
        )
    settings.emit(found, text)


@stage.command("exec", context_settings=OPTIONS_FIRST)
@process_options
@click.argument("name", metavar="STAGE")
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD ARG...", callback=own_command
)
@command_options
def execute(settings: Settings, name: str, command: tuple[str, ...], options: RunOptions) -> int:
    """Run a command in a stage, beside what runs there or over what it kept.

    \b
    Example:
      pvisor stage exec fix -- git status
    """
    info = Stages(settings.config.stages).get(name)
    return exec_in_stage(settings.config, open_image(settings, info.image), name, command, options)


@stage.command()
@click.argument("name", metavar="STAGE")
@command_options
def drop(settings: Settings, name: str) -> None:
    """Throw a stage away, with all writes it kept."""
    Stages(settings.config.stages).drop(name)
    settings.emit({"dropped": name}, name)
