"""Modules of these packages as programs of their own: `python -m NAME`, without what that brings along.

`-m` alone puts the current directory first on the module path, where anyone may have left a file called `json.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def command(module: str) -> list[str]:
    """The start of a command line that runs this module."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """The caller's, with the place these packages were imported from, in case they are not installed."""
    root = Path(__file__).resolve().parent.parent
    if root.name in ("site-packages", "dist-packages"):
        return dict(os.environ)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else str(root)}
