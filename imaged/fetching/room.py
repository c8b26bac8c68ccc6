"""How full a store, and the file system it is on, may get with chunks that were only kept because they came by."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from imaged.errors import StoreFullError

if TYPE_CHECKING:
    from imaged.collection.eviction import Evictor

log = logging.getLogger(__name__)
_SHARE = 20
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 1 << 30
_LOOK_S = 0.5
_LOOK_BYTES = 4 << 20
_LOOK_SHARE = 64
"""Of a bound: what may come between two looks."""
_EARLY_SHARE = 32


class Room:
    """Says whether a copy may still be cached. Threads may share it.

    What runs needs space too: stages, metadata files, names, an upload. So a twentieth of the file system stays free,
    at most 1 GiB and at least 16 MiB; a smaller one caches nothing. Who stores because a user asked for it does not ask
    here. With an `evictor` what was used longest ago makes room, there and below the evictor's bound.
    """

    def __init__(self, directory: Path) -> None:
        self.evictor: Evictor | None = None
        self._directory = directory
        self._lock = threading.Lock()
        self._left_bytes = 0
        self._until_s = 0.0

    def take(self, byte_count: int) -> None:
        """So many bytes are about to be cached. StoreFullError when they would take what has to stay free."""
        if self._fits(byte_count) or (self.evict(byte_count) and self._fits(byte_count, anew=True)):
            return
        left_bytes = self.evictor.left_bytes if self.evictor is not None else None
        if left_bytes is not None and left_bytes < byte_count and self.evictor is not None:
            why = self.evictor.status().held_back or "nothing can be given away"
            raise StoreFullError(
                f"the cache in {self._directory} has reached its bound of {self.evictor.max_bytes} bytes: {why}",
                hint="a larger --cache-max or PVISOR_CACHE_MAX; `pvisor image rm` then `pvisor store gc`",
            )
        raise StoreFullError(
            f"{self._directory} is on a file system that is nearly full: nothing more is cached",
            hint="free space with `pvisor image rm` then `pvisor store gc`; a pull without --lazy takes the rest",
        )

    def evict(self, byte_count: int) -> bool:
        """Make room for so many bytes; whether there is more of it now."""
        if self.evictor is None:
            return False
        return self.evictor.make_room(byte_count, lacking_bytes=max(0, byte_count - self._above_floor()))

    def _fits(self, byte_count: int, *, anew: bool = False) -> bool:
        """Looks at the file system every few MiB, or after half a second."""
        with self._lock:
            now_s = time.monotonic()
            if anew or now_s >= self._until_s or 0 <= self._left_bytes < byte_count:
                self._left_bytes, self._until_s = min(self._above_floor(), self._below_bound()), now_s + _LOOK_S
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

    def _below_bound(self) -> int:
        """What may come before the next look."""
        left_bytes = self.evictor.left_bytes if self.evictor is not None else None
        if left_bytes is None or self.evictor is None or self.evictor.max_bytes is None:
            return _LOOK_BYTES
        if left_bytes < self.evictor.max_bytes // _EARLY_SHARE:
            self.evictor.poke()
        return min(left_bytes, _LOOK_BYTES, self.evictor.max_bytes // _LOOK_SHARE)


def floor_bytes(size_bytes: int) -> int:
    """What stays free of a file system of this size."""
    return max(_LEAST_BYTES, min(_MOST_BYTES, size_bytes // _SHARE))
