"""What a process in a stage runs as: the image's configuration with the command line's changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from imaged import runconfig
from stage.errors import StageSetupError


class ProcessSpec(NamedTuple):
    """A command and its surroundings, all as seen inside the stage.

    `user` is still text (`""`, `name`, `uid`, either with `:group`): only the stage's own /etc/passwd, which earlier
    runs may have changed, can say who that is. HOME is set from there when `env` has none.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str = "/"
    user: str = ""


def resolve(
    image_config: Mapping[str, Any],
    *,
    args: Sequence[str] = (),
    env: Sequence[str] = (),
    workdir: str | None = None,
    user: str | None = None,
    tty: bool = False,
    entrypoint: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> ProcessSpec:
    """Entrypoint + (`args` or Cmd), the image's Env under `env`, and its WorkingDir and User unless given here.

    `image_config` is the whole OCI image configuration. An `env` item is `K=V`, or `K` to take the caller's value from
    `environ` (nothing when it has none). `entrypoint=False` is for `stage exec`, where `args` is the whole command.
    Raises StageSetupError when no command is left, `workdir` is not absolute or the configuration is not what OCI says.
    """
    config = image_config.get("config") or {}
    if not isinstance(config, Mapping):
        raise StageSetupError(f"image configuration: config is {type(config).__name__}, not an object")
    command = [*args] or runconfig.strings(config, "Cmd", StageSetupError)
    argv = (runconfig.strings(config, "Entrypoint", StageSetupError) if entrypoint else []) + command
    if not argv:
        raise StageSetupError("the image has no Entrypoint and no Cmd", hint="give a command after --")
    if workdir is not None and not workdir.startswith("/"):
        raise StageSetupError(f"working directory {workdir!r} is not an absolute path", hint="give -w a path from / on")
    directory = workdir if workdir is not None else runconfig.string(config, "WorkingDir", StageSetupError)
    spec = ProcessSpec(
        argv=tuple(argv),
        env=runconfig.environment(
            runconfig.strings(config, "Env", StageSetupError), env, tty=tty, environ=environ, refusal=StageSetupError
        ),
        workdir=os.path.normpath(os.path.join("/", directory)).replace("//", "/", 1),
        user=user if user is not None else runconfig.string(config, "User", StageSetupError),
    )
    runconfig.refuse_nul((*spec.argv, *spec.env, *spec.env.values(), spec.workdir, spec.user), StageSetupError)
    return spec
