"""The moment at which a stage began, held against the times of files: what is younger is others'.

Files are stamped by a clock that people set. Within one boot the kernel has another that nobody sets, and so the base
notes both: when the first was set back meanwhile, later changes may have times from before the base, and as much time
before the base is taken for later.
"""

from __future__ import annotations

from collections.abc import Callable

from stage.applying.history import UNKNOWN, History
from stage.edits.tree import Node, join, parents
from stage.kept.record import Base, StageInfo, boot, booted_ns

# Two clocks are not read at once.
_TOLERANCE_NS = 1_000_000


def began_ns(info: StageInfo) -> int:
    """When the stage first mounted its workspace."""
    return info.base.time_ns if info.base is not None else info.created_at * 10**9


def unchanged_ns(info: StageInfo) -> int:
    """The latest ctime of what is surely as it was then."""
    return began_ns(info) - (set_back_ns(info.base) if info.base is not None else 0)


def set_back_ns(base: Base) -> int:
    """How far the clock was set back since; 0 after a reboot, where nobody knows."""
    if not base.boot or base.boot != boot():
        return 0
    back_ns = base.booted_ns - booted_ns()
    return back_ns if back_ns > _TOLERANCE_NS else 0


def unseen(history: History, info: StageInfo) -> Callable[[bytes, Node], bool]:
    """Whether a name, over whose directory the stage has made its own, was never there for the stage to see.

    That is so in a directory that others have made since it began, but for what an apply of the stage put there.
    """
    applied = {
        above
        for path, entry in history.entries.items()
        if entry.stage not in (None, UNKNOWN)
        for above in (path, *parents(path))
    }
    directories: dict[bytes, bool] = {}

    def ask(path: bytes, directory: Node) -> bool:
        if directory.location not in directories:
            directories[directory.location] = _came_after(directory, began_ns(info))
        return directories[directory.location] and path not in applied

    return ask


def _came_after(directory: Node, moment_ns: int) -> bool:
    """By its birth; on a file system that knows none, when neither it nor anything in it is older."""
    born_ns = directory.tree.born_ns(directory.location)
    if born_ns is not None:
        return born_ns > moment_ns
    inside = (directory.tree.node(join(directory.location, name)) for name in directory.tree.names(directory.location))
    return directory.ctime_ns > moment_ns and all(node is None or node.ctime_ns > moment_ns for node in inside)
