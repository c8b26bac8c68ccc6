"""What `pvisor run` may change of an image's configuration.

Apart from what carries it out, which a command imports once the node daemon is at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stage.errors import ArgumentError

Network = Literal["none", "host"]
WORKSPACE = "/workspace"
"""Where a stage shows its workspace."""
SMALLEST_MEMORY = 1 << 20
SMALLEST_CPUS, MOST_CPUS = 0.01, 1e6
MOST_PIDS = 1 << 22
"""The kernel has no process number above it, and refuses it as a limit."""
_MOST_MEMORY = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `pvisor run` may change of an image's configuration, and limits; see `launch.run` and `process.resolve`.

    Raises ArgumentError for values that are of another type or mean nothing.
    """

    workspace: Path | None = None
    env: Sequence[str] = ()
    workdir: str | None = None
    user: str | None = None
    interactive: bool = False
    tty: bool = False
    net: Network = "none"
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None

    def __post_init__(self) -> None:
        if self.net not in ("none", "host"):
            raise ArgumentError(f"net {self.net!r} is no network", hint="give 'none' or 'host'")
        for name, text in (("workdir", self.workdir), ("user", self.user)):
            if text is not None and not isinstance(text, str):
                raise ArgumentError(f"{name} {text!r} is no text", hint=f"give {name} as a str")
        _require_count("memory_bytes", self.memory_bytes, SMALLEST_MEMORY, _MOST_MEMORY, "1M or more")
        _require_count("pids", self.pids, 1, MOST_PIDS, f"1 to {MOST_PIDS}, which is as much as no limit")
        if self.cpus is not None and not (is_number(self.cpus) and SMALLEST_CPUS <= self.cpus < MOST_CPUS):
            raise ArgumentError(f"cpus {self.cpus!r} is no number of processors", hint=f"give {SMALLEST_CPUS} or more")


def is_number(value: object) -> bool:
    """Whether it is one that can be compared: True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_count(name: str, value: object, least: int, most: int, hint: str) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and least <= value <= most):
        return
    raise ArgumentError(f"{name} {value!r} is no limit", hint=f"give a whole number: {hint}")
