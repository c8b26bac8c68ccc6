"""Run a command in an image or in a stage: mounts, the stage and its process put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fuse.mounts import mount_image
from fuse.node import OpenImage
from imaged.config import Config
from stage import launch
from stage.process import ProcessSpec, resolve
from stage.rootfs import WORKSPACE
from stage.stages import StageInfo, Stages

Network = Literal["none", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `pvisor run` may change of an image's configuration; see `launch.run` and `process.resolve`."""

    workspace: Path | None = None
    env: Sequence[str] = ()
    workdir: str | None = None
    user: str | None = None
    interactive: bool = False
    tty: bool = False
    net: Network = "none"


def run_image(config: Config, image: OpenImage, args: Sequence[str], options: RunOptions, *, stage: str | None) -> int:
    """Run the image's command, or `args` in place of its Cmd, and return the exit code.

    Writes stay in the stage of this name, or are dropped at exit when there is none. Without a workspace it is the one
    that the stage was made for. StageError, MountError.
    """
    spec = _spec(image, args, options)
    stages = Stages(config.stages)
    stages.sweep()
    lower = mount_image(config, image)
    make = stages.temporary if stage is None else partial(stages.use, stage)
    with make(image=image.id, image_name=image.name, workspace=options.workspace) as held:
        spec = _beside_workspace(spec, held.info, options)
        return launch.run(lower, spec, held, net=options.net, interactive=options.interactive, tty=options.tty)


def exec_in_stage(config: Config, image: OpenImage, name: str, argv: Sequence[str], options: RunOptions) -> int:
    """Run `argv` in a stage: beside what runs there now, or alone over its retained writes. Returns the exit code."""
    spec = _spec(image, argv, options, entrypoint=False)
    stages = Stages(config.stages)
    info = stages.get(name)
    spec = _beside_workspace(spec, info, options)
    terminal = {"interactive": options.interactive, "tty": options.tty}
    running = stages.running(name)
    if running is not None:
        return launch.join(running, spec, **terminal)
    with stages.use(name, image=info.image, image_name=info.image_name) as held:
        lower = mount_image(config, image)
        return launch.run(lower, spec, held, net=options.net, **terminal)


def _beside_workspace(spec: ProcessSpec, stage: StageInfo, options: RunOptions) -> ProcessSpec:
    """A workspace is what the command is about, so it starts there unless told otherwise."""
    if stage.workspace is None or options.workdir is not None:
        return spec
    return replace(spec, workdir=WORKSPACE)


def _spec(image: OpenImage, args: Sequence[str], options: RunOptions, *, entrypoint: bool = True) -> ProcessSpec:
    return resolve(
        {"config": image.config},
        args=args,
        env=options.env,
        workdir=options.workdir,
        user=options.user,
        tty=options.tty,
        entrypoint=entrypoint,
    )
