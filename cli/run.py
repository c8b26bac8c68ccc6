"""`pvisor run`, `mount` and `umount`. The hot path: imports are few, and some wait until the node daemon is at work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cli import startup
from cli.arguments import OPTIONS_FIRST, failing_with, memory_size, own_command, process_arguments
from cli.common import Settings, command_options, log_to_stderr, output_options, signature_options
from fuse import node
from fuse.node import OpenImage, Opening
from imaged.names import ImageName, SourceName
from stage.errors import SETUP_FAILED
from stage.options import Network, RunOptions

# A daemon answers sooner than this, unless it has to ask a server.
_KNOWN_IMAGE_S = 0.003


def open_image(settings: Settings, name: str) -> OpenImage:
    """The image by name, id or source; one that is not local is pulled lazily first."""
    return begin_open(settings, name).wait()


def begin_open(settings: Settings, name: str, *, start: bool = False) -> Opening:
    """As `open_image`, while this process does something else; `start` as in `fuse.node`."""
    if SourceName.is_source(name):
        from cli.convert import pull_image

        log_to_stderr()
        startup.done()
        name = pull_image(settings, name, lazy=True).name
    ImageName.parse(name)  # a bad name is wrong usage; the daemon could only say that it failed
    config = settings.config
    return node.begin_open(config, name, server=config.server, start=start)


def process_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that starts a process, passed on as `options`; its own failures are exit code 125."""

    @process_arguments
    @click.option("--memory", callback=memory_size, metavar="SIZE", help="Limit of memory, as in 512M; without swap.")
    @click.option("--cpus", type=click.FloatRange(min=0.01), metavar="N", help="Limit of processor time, as in 1.5.")
    @click.option("--pids", type=click.IntRange(min=1), metavar="N", help="Limit of processes and threads.")
    @click.option(
        "--net",
        type=click.Choice(["host", "none"]),
        default="none",
        show_default=True,
        help="none: loopback only; host: the host's network. Beside running commands, stage exec has theirs.",
    )
    @functools.wraps(function)
    def command(
        *arguments: Any,
        env: tuple[str, ...],
        workdir: str | None,
        user: str | None,
        interactive: bool,
        tty: bool,
        net: Network,
        memory: int | None,
        cpus: float | None,
        pids: int | None,
        **others: Any,
    ) -> Any:
        options = RunOptions(
            env=env,
            workdir=workdir,
            user=user,
            interactive=interactive,
            tty=tty,
            net=net,
            memory_bytes=memory,
            cpus=cpus,
            pids=pids,
        )
        with failing_with(SETUP_FAILED):
            return function(*arguments, options=options, **others)

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
@signature_options
def run(
    settings: Settings,
    name: str,
    command: tuple[str, ...],
    stage_name: str | None,
    workspace: Path | None,
    options: RunOptions,
) -> int:
    """Run a process in an image, its bytes arriving as they are read. The exit code is the process's own.

    It is a process of this host: it shares the host's kernel. What --workspace shows is at /workspace, where the
    process then starts. Stdout is the process's own: --json changes nothing here.

    \b
    Examples:
      pvisor run debian:12 -- sh -c 'cat /etc/os-release'
      pvisor run -it --stage fix --workspace . debian:12 -- bash
      pvisor run --memory 512M --cpus 1.5 --pids 200 -e CI=1 debian:12 -- env
      pvisor run docker://registry.example/team/app:v1
      pvisor run --require-signature team.pub registry.example/team/app:v1
    """
    opening = begin_open(settings, name, start=True)
    from stage.session import run_image

    if not opening.is_answered(_KNOWN_IMAGE_S):  # one that is new here: there is time for what its first mount needs
        import fuse.erofs  # noqa: F401
    image = opening.wait()
    startup.done()
    return run_image(settings.config, image, command, replace(options, workspace=workspace), stage=stage_name)


@click.command(short_help="Mount an image on a directory.")
@click.argument("name")
@click.argument("directory", type=click.Path(path_type=Path))
@command_options
@signature_options
def mount(settings: Settings, name: str, directory: Path) -> None:
    """Mount an image read-only on a directory; its bytes arrive as they are read. Prints nothing on success.

    \b
    Example:
      pvisor mount debian:12 /mnt/debian
    """
    from fuse import mounts

    image = open_image(settings, name)
    mounts.mount_user(settings.config, image, directory)
    settings.emit({"image": image.id, "directory": str(directory.absolute())}, "")


@click.command(short_help="Unmount what `mount` mounted.")
@click.argument("directory", type=click.Path(path_type=Path))
@output_options
def umount(settings: Settings, directory: Path) -> None:
    """Unmount a directory that `pvisor mount` mounted. Prints nothing on success.

    \b
    Example:
      pvisor umount /mnt/debian
    """
    from fuse import mounts

    mounts.umount_user(settings.config, directory)
    settings.emit({"directory": str(directory.absolute())}, "")
