"""What a process in a guest runs as: the image's configuration with the command line's changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from imaged import runconfig
from vmm.errors import VmSetupError

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


def check(args: Sequence[str], options: WorkloadOptions) -> None:
    """What can not be resolved with any image, before one is booted. VmSetupError."""
    resolve({}, args or ("/",), options, entrypoint=False)


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
    command = [*args] or runconfig.strings(config, "Cmd", VmSetupError)
    argv = (runconfig.strings(config, "Entrypoint", VmSetupError) if entrypoint else []) + command
    if not argv:
        raise VmSetupError("the image has no Entrypoint and no Cmd", hint="give a command after --")
    directory = options.workdir
    if directory is None:
        directory = runconfig.string(config, "WorkingDir", VmSetupError) or "/"
    if not directory.startswith("/"):
        if options.workdir is not None:
            raise VmSetupError(
                f"working directory {directory!r} is not an absolute path", hint="give -w a path from / on"
            )
        directory = f"/{directory}"
    workload = Workload(
        argv=tuple(argv),
        env=runconfig.environment(
            runconfig.strings(config, "Env", VmSetupError),
            options.env,
            tty=options.tty,
            environ=environ,
            refusal=VmSetupError,
        ),
        cwd=directory,
        user=options.user if options.user is not None else runconfig.string(config, "User", VmSetupError) or None,
    )
    texts = (*workload.argv, *workload.env, *workload.env.values(), directory, workload.user or "")
    runconfig.refuse_nul(texts, VmSetupError)
    return workload
