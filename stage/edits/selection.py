"""Which paths a user means."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence

from imaged.errors import NotFoundError, PvisorError
from stage.edits.changes import Change, Overlay
from stage.edits.names import quoted
from stage.edits.tree import ROOT
from stage.errors import ArgumentError

PathLike = str | bytes | os.PathLike[str]


def listed(paths: Sequence[PathLike] | PathLike) -> list[bytes]:
    """The paths that a caller gave: one alone is one path, not a path for each of its letters. ArgumentError."""
    several = [paths] if isinstance(paths, str | bytes | os.PathLike) else paths
    try:
        return [os.fsencode(path) for path in several]
    except (TypeError, UnicodeError) as error:
        raise ArgumentError(f"paths {paths!r}: {error}", hint="give a path, or a list of paths") from error


def relative(path: bytes, tops: Sequence[bytes], where: str) -> bytes:
    """A path in a tree that goes by the absolute names `tops` as well. PvisorError for one that leads out of it.

    ArgumentError for an empty one, which is what an unset variable gives, and would mean everything.
    """
    if not path:
        raise ArgumentError("an empty path is no path", hint="give . for everything")
    if b"\0" in path:
        raise ArgumentError(f"{path.decode(errors='backslashreplace')!r} has a NUL byte, which no path can have")
    wanted = os.path.normpath(path)
    for top in tops:
        if wanted.startswith(b"/") and within(wanted, os.path.normpath(top)):
            wanted = os.path.relpath(wanted, top)
    if wanted.startswith(b"/") or within(wanted, b".."):
        shown = path.decode(errors="backslashreplace")
        raise PvisorError(f"{shown} is not in {where}", hint="give a path below it, such as src/main.py")
    return wanted


def within(path: bytes, directory: bytes) -> bool:
    """Whether a path is the directory or below it."""
    return directory in (ROOT, path) or path.startswith(directory.rstrip(b"/") + b"/")


def selected(changes: Sequence[Change], paths: Sequence[bytes]) -> list[Change]:
    """The changes at or below one of the paths, before or after; all when no path is given."""
    if not paths:
        return list(changes)
    return [
        change
        for change in changes
        if any(within(change.path, path) or within(change.old_path or change.path, path) for path in paths)
    ]


def require_known(
    paths: Sequence[bytes], changes: Sequence[Change], overlay: Overlay, where: str, *, settled: Container[bytes] = ()
) -> None:
    """NotFoundError for a path that is nowhere. One without a change is fine when it exists, or was `settled`."""
    for path in paths:
        known = selected(changes, [path]) or path in settled
        if not known and overlay.upper.node(path) is None and overlay.lower.node(path) is None:
            raise NotFoundError(
                f"{quoted(path).decode()} is neither in {where} nor changed in the stage",
                hint="see pvisor stage diff --name-only",
            )
