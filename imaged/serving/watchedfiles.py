"""Files of a server that are read again when they change: certificates, tokens."""

from __future__ import annotations

import errno
import logging
import os
import pwd
from collections.abc import Callable
from pathlib import Path

from imaged.errors import PvisorError

log = logging.getLogger(__name__)
_State = tuple[tuple[int, ...], ...]


class WatchedFiles:
    """Some files that belong together. For one thread at a time.

    What can not be used changes nothing but the log, which says so once, and is tried again at each look: a file may be
    half written, and a process out of descriptors.
    """

    def __init__(self, what: str, paths: tuple[Path, ...], load: Callable[[], str]) -> None:
        """`load` reads them, and says what it found; here it is called first, and raises. `what` is for the log: that
        something stays as it was."""
        self._what, self._paths, self._load = what, paths, load
        self._problem = ""
        self._seen = _state(paths)
        load()

    def look(self) -> None:
        """Read them again if they have changed since they were last read."""
        seen = _state(self._paths)
        if seen == self._seen:
            self._problem = ""
            return
        try:
            found = self._load()
        except Exception as error:
            self._tell(error)
            return
        self._seen, self._problem = seen, ""
        log.warning("%s", found)

    def _tell(self, error: Exception) -> None:
        problem = error.message if isinstance(error, PvisorError) else repr(error)
        if isinstance(error, PvisorError) and error.hint:
            problem += f" ({error.hint})"
        if problem == self._problem:
            return
        self._problem = problem
        trace = None if isinstance(error, PvisorError) else error
        log.error("%s: %s", self._what, problem, exc_info=trace)


def hint_of(error: OSError, instead: str) -> str:
    """What to do about a file that can not be read; `instead` is for where there is no file of this kind."""
    if isinstance(error, PermissionError):
        return f"let {_user()} read it, and enter its directory: `chgrp` to a group of that user, and `chmod 0640`"
    return instead if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL) else ""


def _user() -> str:
    user = os.geteuid()
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:  # as in containers
        return f"user id {user}"


def _state(paths: tuple[Path, ...]) -> _State | None:
    """What tells this state of the files from another; None when one is not there."""
    try:
        found = [path.stat() for path in paths]
    except OSError:
        return None
    return tuple((one.st_dev, one.st_ino, one.st_ctime_ns, one.st_mtime_ns, one.st_size) for one in found)
