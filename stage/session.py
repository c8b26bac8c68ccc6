"""Run a command in an image or in a stage: mounts, the stage and its process put together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from fuse.imagemount import using_image
from fuse.node import OpenImage
from imaged.config import Config
from stage.boundary import launch
from stage.boundary.process import ProcessSpec, resolve
from stage.boundary.streams import Streams
from stage.errors import StageMismatchError
from stage.kept.cgroups import Limits
from stage.kept.disposal import aside, at_once
from stage.kept.record import StageInfo
from stage.kept.stagefiles import Stage
from stage.kept.stages import Stages
from stage.options import WORKSPACE, RunOptions


def run_image(
    config: Config,
    image: OpenImage,
    args: Sequence[str],
    options: RunOptions,
    *,
    stage: str | None,
    streams: Streams | None = None,
    timeout_s: float | None = None,
) -> int:
    """Run the image's command, or `args` in place of its Cmd, and return the exit code.

    Writes stay in the stage of this name, or are dropped at exit when there is none. Without a workspace it is the one
    that the stage was made for. `streams` are those of a program, in place of its own; it does not wait until what was
    dropped is removed, too. StageError, MountError.
    """
    spec = _spec(image, args, options)
    stages = Stages(config.stages)
    stages.sweep()
    disposal = at_once if streams is None else aside
    make = partial(stages.temporary, disposal=disposal) if stage is None else partial(stages.use, stage)
    held = make(image=image.id, image_name=image.name, workspace=options.workspace)
    return _run(config, image, spec, held, options, streams=streams, timeout_s=timeout_s)


def exec_in_stage(config: Config, image: OpenImage, name: str, argv: Sequence[str], options: RunOptions) -> int:
    """Run `argv` in a stage: beside what runs there now, or alone over its retained writes. Returns the exit code."""
    spec = _spec(image, argv, options, entrypoint=False)
    stages = Stages(config.stages)
    info = stages.get(name)
    stages.recover(name)
    running = stages.running(name)
    if running is not None:
        if _limits(options).wanted():
            raise StageMismatchError(
                f"stage {name!r} is running, and what runs in it has its limits already",
                hint="leave out --memory, --cpus and --pids, or run the command when the stage is free",
            )
        if options.net != "none":
            raise StageMismatchError(
                f"stage {name!r} is running, and what runs in it has its network already",
                hint="leave out --net, or run the command when the stage is free",
            )
        with using_image(config, image):  # for as long as this command: the one that mounted it may end before
            spec = _beside_workspace(spec, info, options)
            return launch.join(running, stages.root / name, spec, interactive=options.interactive, tty=options.tty)
    held = stages.use(name, image=info.image, image_name=info.image_name)
    return _run(config, image, spec, held, options)


def _run(
    config: Config,
    image: OpenImage,
    spec: ProcessSpec,
    making: AbstractContextManager[Stage],
    options: RunOptions,
    *,
    streams: Streams | None = None,
    timeout_s: float | None = None,
) -> int:
    """In a stage that nothing runs in."""
    with making as held:
        lower = held.rest.enter_context(using_image(config, image))
        return launch.run(
            lower,
            _beside_workspace(spec, held.info, options),
            held,
            net=options.net,
            interactive=options.interactive,
            tty=options.tty,
            streams=streams,
            timeout_s=timeout_s,
            limits=_limits(options),
        )


def _beside_workspace(spec: ProcessSpec, stage: StageInfo, options: RunOptions) -> ProcessSpec:
    """A workspace is what the command is about, so it starts there unless told otherwise."""
    if stage.workspace is None or options.workdir is not None:
        return spec
    return spec._replace(workdir=WORKSPACE)


def _limits(options: RunOptions) -> Limits:
    return Limits(memory_bytes=options.memory_bytes, cpus=options.cpus, pids=options.pids)


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
