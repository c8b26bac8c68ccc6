"""What a process in a stage runs as: the image's configuration with the command line's changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stage.errors import StageSetupError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TERM = "xterm"


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
    command = [*args] or _strings(config, "Cmd")
    argv = (_strings(config, "Entrypoint") if entrypoint else []) + command
    if not argv:
        raise StageSetupError("the image has no Entrypoint and no Cmd", hint="give a command after --")
    if workdir is not None and not workdir.startswith("/"):
        raise StageSetupError(f"working directory {workdir!r} is not an absolute path", hint="give -w a path from / on")
    directory = workdir if workdir is not None else _string(config, "WorkingDir")
    spec = ProcessSpec(
        argv=tuple(argv),
        env=_environment(_strings(config, "Env"), env, tty=tty, environ=environ),
        workdir=os.path.normpath(os.path.join("/", directory)).replace("//", "/", 1),
        user=user if user is not None else _string(config, "User"),
    )
    for text in (*spec.argv, *spec.env, *spec.env.values(), spec.workdir, spec.user):
        if "\0" in text:
            raise StageSetupError(f"{text[:80]!r} has a NUL byte, which no argument, variable or path can have")
    return spec


def _environment(image: list[str], given: Sequence[str], *, tty: bool, environ: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {"PATH": DEFAULT_PATH}
    if tty:
        values["TERM"] = DEFAULT_TERM
    for item in image:
        name, _, value = item.partition("=")
        if name:
            values[name] = value
    for item in given:
        name, has_value, value = item.partition("=")
        if not name:
            raise StageSetupError(f"environment {item!r} has no name", hint="give -e NAME=VALUE or -e NAME")
        if has_value:
            values[name] = value
        elif name in environ:
            values[name] = environ[name]
    return values


def _strings(config: Mapping[str, Any], key: str) -> list[str]:
    value = config.get(key)
    if value is None:
        return []
    if isinstance(value, str):  # images of very old builders
        return [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise StageSetupError(f"image configuration: {key} is not a list of strings")
    return list(value)


def _string(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise StageSetupError(f"image configuration: {key} is not a string")
    return value or ""
