"""Processes of this host over lazily mounted images, with their writes kept apart: the Python API.

    import stage

    result = stage.run("debian:12", ["cat", "/etc/os-release"], capture_output=True)

Names are imported on first use: `import stage` costs nothing, and the `pvisor` command takes only the parts it needs.
No module of this package may have the name of a function here, because importing it would replace the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stage.api import Result, drop, run
    from stage.batch import Applied, apply
    from stage.review import Diff, diff

_API = {
    "Applied": "stage.batch",
    "apply": "stage.batch",
    "Diff": "stage.review",
    "Result": "stage.api",
    "diff": "stage.review",
    "drop": "stage.api",
    "run": "stage.api",
}

__all__ = ["Applied", "Diff", "Result", "apply", "diff", "drop", "run"]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_API[name]), name)
    return value
