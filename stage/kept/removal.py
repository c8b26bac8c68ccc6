"""Removal of a directory tree that an untrusted process wrote."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stage.hostpath import empty


def remove_tree(root: Path) -> None:
    """Removes a directory with everything below, which is reached by descriptor only. Fine when it is not there."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        empty(fd)
    finally:
        os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        root.rmdir()
