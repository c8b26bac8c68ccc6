"""Removal of a directory tree that an untrusted process wrote."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def remove_tree(root: Path) -> None:
    """Removes a directory however deep it is: subdirectories move up to `root` first, so every path stays short.

    Symbolic links are removed, never followed. Nothing else may write there meanwhile.
    """
    pending, count, token = [root], 0, os.urandom(4).hex()
    while pending:
        directory = pending[-1]
        found = _empty(directory)
        for path in found:
            target = path
            if directory != root:
                count += 1
                target = root / f".removed-{token}-{count}"
                path.rename(target)
            pending.append(target)
        if not found and _removed(directory):
            pending.pop()


def _empty(directory: Path) -> list[Path]:
    """Removes what can go at once; returns the subdirectories that have something in them."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            path = Path(entry.path)
            if not entry.is_dir(follow_symlinks=False):
                path.unlink()
            elif not _removed(path):
                found.append(path)
    return found


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
