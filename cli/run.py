"""`pvisor run`, `mount` and `umount`. The hot path: imports stay few."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli.common import Settings, command_options
from fuse import mounts
from fuse.node import OpenImage, ensure
from imaged.names import ImageName, SourceName
from stage.errors import SETUP_FAILED
from stage.run import Network, RunOptions, run_image

# What follows the name is the command's own, options included.
OPTIONS_FIRST = {"allow_interspersed_args": False}


def own_command(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The command without the `--` that may stand before it."""
    del context, parameter
    return words[1:] if words[:1] == ("--",) else words


def open_image(settings: Settings, name: str) -> OpenImage:
    """The image by name, id or source; one that is not local is pulled lazily first."""
    if SourceName.is_source(name):
        from cli.convert import pull_image

        name = pull_image(settings, name, lazy=True).name
    ImageName.parse(name)  # a bad name is wrong usage; the daemon could only say that it failed
    return ensure(settings.config).open_image(name, server=settings.config.server)


def process_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that starts a process, passed on as `options`; its own failures are exit code 125."""

    @click.option("-e", "--env", multiple=True, metavar="K=V", help="Set a variable, or pass this host's with -e K.")
    @click.option("-w", "--workdir", metavar="DIR", help="Directory to start in.")
    @click.option("-u", "--user", metavar="USER", help="User name or id, with :GROUP if wanted.")
    @click.option("-i", "--interactive", is_flag=True, help="Keep standard input open.")
    @click.option("-t", "--tty", is_flag=True, help="Give the process a terminal.")
    @click.option("--net", type=click.Choice(["host", "none"]), default="none", show_default=True)
    @functools.wraps(function)
    def command(
        *arguments: Any,
        env: tuple[str, ...],
        workdir: str | None,
        user: str | None,
        interactive: bool,
        tty: bool,
        net: Network,
        **others: Any,
    ) -> Any:
        options = RunOptions(env=env, workdir=workdir, user=user, interactive=interactive, tty=tty, net=net)
        try:
            return function(*arguments, options=options, **others)
        except Exception as error:
            if not hasattr(error, "exit_code"):
                error.exit_code = SETUP_FAILED  # type: ignore[attr-defined]
            raise

    return command


@click.command(context_settings=OPTIONS_FIRST, short_help="Run a process in an image.")
@click.option("--stage", "stage_name", metavar="STAGE", help="Keep the writes in this stage; made when new.")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="A host directory shown at /workspace; writes to it stay in the stage.",
)
@process_options
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD ARG...]", callback=own_command)
@command_options
def run(
    settings: Settings,
    name: str,
    command: tuple[str, ...],
    stage_name: str | None,
    workspace: Path | None,
    options: RunOptions,
) -> int:
    """Run a process in an image, its bytes arriving as they are read. The exit code is the process's own.

    It is a process of this host: it shares the host's kernel. Its output is its own, with --json too. What --workspace
    shows is at /workspace, where the process then starts.

    \b
    Examples:
      pvisor run debian:12 -- sh -c 'cat /etc/os-release'
      pvisor run -it --stage fix --workspace . debian:12 -- bash
      pvisor run docker://registry.example/team/app:v1
    """
    image = open_image(settings, name)
    return run_image(settings.config, image, command, replace(options, workspace=workspace), stage=stage_name)


@click.command(short_help="Mount an image on a directory.")
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@command_options
def mount(settings: Settings, name: str, directory: Path) -> None:
    """Mount an image read-only on a directory; its bytes arrive as they are read.

    \b
    Example:
      pvisor mount debian:12 /mnt/debian
    """
    image = open_image(settings, name)
    mounts.mount_user(settings.config, image, directory)
    settings.emit({"image": image.id, "directory": str(directory.absolute())}, "")


@click.command(short_help="Unmount what `mount` mounted.")
@click.argument("directory", type=click.Path(path_type=Path))
@command_options
def umount(settings: Settings, directory: Path) -> None:
    """Unmount a directory that `pvisor mount` mounted."""
    mounts.umount_user(settings.config, directory)
    settings.emit({"directory": str(directory.absolute())}, "")
