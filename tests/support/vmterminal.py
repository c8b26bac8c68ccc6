"""The `pvisor` command of a host on a terminal of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.command import ARGV, Host


class OnTerminal:
    """For `tests.support.stage_process.Terminal`: options are the command's words up to `--`."""

    def __init__(self, made: Host) -> None:
        self._env = [f"{key}={value}" for key, value in made.env.items()]

    def command(self, options: Sequence[str], command: Sequence[str]) -> list[str]:
        own = ["--", *command] if command else []
        return ["/usr/bin/env", *self._env, *ARGV, *options, *own]
