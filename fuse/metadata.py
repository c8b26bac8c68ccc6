"""EROFS metadata images as files, for the commands that mount them. They last no longer than the node daemon.

Where PVISOR_HOME is full they are written beside the daemon's socket instead, which is in memory as a rule: an image
that is here can then still be started.

A mount holds its file open and does without the name, so the names go as soon as no daemon is left that may just have
told one to a command. What is there then is rubbish, or written without fsync before a power cut.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from imaged.errors import StoreError
from imaged.flock import try_lock

log = logging.getLogger(__name__)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_HINT = "free space under PVISOR_HOME: `pvisor image rm` then `pvisor store gc`"


class MetadataFiles:
    """Files in one directory, `<metadata id>.erofs`, or in a spare one as long as the first is full.

    Threads and daemons (each with its own object) may share it.
    """

    def __init__(self, directory: Path, spare: Path | None = None) -> None:
        """StoreError when the directory can not be used."""
        self._spare: MetadataFiles | None = None
        try:
            self._use(directory)
        except StoreError as error:
            if spare is None or getattr(error.__cause__, "errno", None) not in _FULL:
                raise
            log.warning("%s; using %s", error.message, spare)
            self._use(spare)
        else:
            self._spare = MetadataFiles(spare) if spare is not None else None

    def _use(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._remove_unused()
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError as error:
            raise StoreError(
                f"can not use {directory}: {error.strerror}",
                hint=_FULL_HINT if error.errno in _FULL else "PVISOR_HOME must be writable",
            ) from error

    def file(self, name: str, read: Callable[[], bytes]) -> Path:
        """The file of the image `name`; `read` gives its bytes when it is not there. StoreError."""
        path = self._directory / f"{name}.erofs"
        if path.exists():
            return path
        return self._written(path, read())

    def _written(self, path: Path, data: bytes) -> Path:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if self._spare is not None and error.errno in _FULL:
                log.warning("can not write %s: %s; writing to %s", path, error.strerror, self._spare._directory)
                return self._spare.file(path.stem, lambda: data)
            raise StoreError(f"can not write {path}: {error.strerror}", hint=_FULL_HINT) from error
        return path

    def close(self) -> None:
        """Remove the files, unless another daemon uses the directory."""
        self._remove_unused()
        os.close(self._lock)
        if self._spare is not None:
            self._spare.close()

    def _remove_unused(self) -> None:
        """All files, if no daemon but this one has the directory open."""
        if not try_lock(self._lock):
            return
        for path in self._directory.iterdir():
            path.unlink()
