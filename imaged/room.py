"""How full the file system of a store may get with chunks that were only kept because they came by."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from imaged.errors import StoreFullError

log = logging.getLogger(__name__)
_SHARE = 20
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 1 << 30
_LOOK_S = 0.5
_LOOK_BYTES = 4 << 20


class Room:
    """Says whether a copy may still be cached. Threads may share it.

    What runs needs space too: stages, metadata files, names, an upload. So a twentieth of the file system stays free,
    at most 1 GiB and at least 16 MiB; a smaller one caches nothing. Who stores because a user asked for it does not ask
    here.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._left_bytes = 0
        self._until_s = 0.0

    def take(self, byte_count: int) -> None:
        """So many bytes are about to be cached. StoreFullError when they would take what has to stay free."""
        if not self._fits(byte_count):
            raise StoreFullError(
                f"{self._directory} is on a file system that is nearly full: nothing more is cached",
                hint="free space with `pvisor image rm` then `pvisor store gc`; a pull without --lazy takes the rest",
            )

    def _fits(self, byte_count: int) -> bool:
        """Looks at the file system every few MiB, or after half a second."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._until_s or 0 <= self._left_bytes < byte_count:
                self._left_bytes, self._until_s = min(self._above_floor(), _LOOK_BYTES), now_s + _LOOK_S
            if self._left_bytes < byte_count:
                return False
            self._left_bytes -= byte_count
            return True

    def _above_floor(self) -> int:
        try:
            found = os.statvfs(self._directory)
        except OSError as error:
            log.warning("%s: %s", self._directory, error.strerror)
            return 0
        return found.f_bavail * found.f_frsize - floor_bytes(found.f_blocks * found.f_frsize)


def floor_bytes(size_bytes: int) -> int:
    """What stays free of a file system of this size."""
    return max(_LEAST_BYTES, min(_MOST_BYTES, size_bytes // _SHARE))
