"""What a process in a guest runs as: the image's configuration with the command line's changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vmm.errors import VmSetupError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TERM = "xterm"
TAKEN_KEYS = ("Env", "Entrypoint", "Cmd", "WorkingDir", "User")
"""What of an OCI image configuration processes take; vm.json keeps no more."""


class Workload(NamedTuple):
    """A command and its surroundings, as seen inside the guest.

    `user` is still text (None, `name`, `uid`, either with `:group`): only the guest's own /etc/passwd can say who that
    is; HOME is set from there when `env` has none.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    user: str | None


class WorkloadOptions(NamedTuple):
    """What a command line may change of the image's configuration. An `env` item is `K=V`, or `K` for the caller's.
    With a terminal (`tty`) there is a TERM, unless image or command line say which."""

    env: Sequence[str] = ()
    workdir: str | None = None
    user: str | None = None
    tty: bool = False


def taken(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an image's `config` object that processes take."""
    return {key: config[key] for key in TAKEN_KEYS if config.get(key)}


def resolve(
    config: Mapping[str, Any],
    args: Sequence[str],
    options: WorkloadOptions,
    *,
    entrypoint: bool,
    environ: Mapping[str, str] = os.environ,
) -> Workload:
    """Entrypoint + (`args` or Cmd), the image's Env under the options', and its WorkingDir and User unless given.

    `entrypoint=False` is for `vm exec`, where `args` is the whole command. VmSetupError when no command is left, the
    working directory is not absolute, or the configuration is not what OCI says.
    """
    argv = (_strings(config, "Entrypoint") if entrypoint else []) + ([*args] or _strings(config, "Cmd"))
    if not argv:
        raise VmSetupError("the image has no Entrypoint and no Cmd", hint="give a command after --")
    directory = options.workdir if options.workdir is not None else _string(config, "WorkingDir") or "/"
    if not directory.startswith("/"):
        if options.workdir is not None:
            raise VmSetupError(
                f"working directory {directory!r} is not an absolute path", hint="give -w a path from / on"
            )
        directory = f"/{directory}"
    workload = Workload(
        argv=tuple(argv),
        env=_environment(_strings(config, "Env"), options, environ),
        cwd=directory,
        user=options.user if options.user is not None else _string(config, "User") or None,
    )
    for text in (*workload.argv, *workload.env, *workload.env.values(), directory, workload.user or ""):
        if "\0" in text:
            raise VmSetupError(f"{text[:80]!r} has a NUL byte, which no argument, variable or path can have")
    return workload


def _environment(image: Sequence[str], options: WorkloadOptions, environ: Mapping[str, str]) -> dict[str, str]:
    values = {"PATH": DEFAULT_PATH, "TERM": DEFAULT_TERM} if options.tty else {"PATH": DEFAULT_PATH}
    for item in image:
        name, _, value = item.partition("=")
        if name:
            values[name] = value
    for item in options.env:
        name, has_value, value = item.partition("=")
        if not name:
            raise VmSetupError(f"environment {item!r} has no name", hint="give -e NAME=VALUE or -e NAME")
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
        raise VmSetupError(f"image configuration: {key} is not a list of strings")
    return list(value)


def _string(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise VmSetupError(f"image configuration: {key} is not a string")
    return value or ""
