"""Whether the memory that a machine touches first can be had, found out while the machine is being built.

A guest whose memory can not be read dies of SIGBUS in the middle of what it does. So the chunks of the working set are
brought, verified and kept in memory before it goes on, and a chunk that nobody has whole is named. That is done in the
background and waited for at the end: QEMU takes as long to start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from imaged.blockimage import BlockImage
from imaged.errors import PvisorError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.ids import ChunkId
from imaged.slices import slices

log = logging.getLogger(__name__)
_GROUP = 64
"""Chunks at a time: 4 MiB."""
_FRESH_S = 30.0
"""Forks that come so soon after each other are spared to look again."""
_LONGEST_S = 600.0


class Readiness:
    """One look at one memory image. Threads may share it.

    Verified is the working set; before a first run was recorded nothing is, as a read verifies too. The first look at
    an image of this host, `whole`, also finds a chunk that is not here and that no server has, wherever in the image.
    """

    def __init__(
        self, fetcher: Fetcher, image: BlockImage, chunks: Sequence[ChunkId], tally: Tally, *, whole: bool = True
    ) -> None:
        self._fetcher, self._image, self._tally, self._whole = fetcher, image, tally, whole
        self._chunks = chunks
        self._origin = fetcher.origin(image.id)
        self._done = threading.Event()
        self._error: Exception | None = None
        self._ended_s = 0.0

    @property
    def is_local(self) -> bool:
        """Whether its chunks were made on this host, or are all here."""
        return self._origin is None

    @property
    def was_whole(self) -> bool:
        """Whether all of the image was found."""
        return self._whole and self._done.is_set() and self._error is None

    def is_over(self, now_s: float) -> bool:
        """Whether who comes now has to look again."""
        return self._done.is_set() and (self._error is not None or now_s - self._ended_s > _FRESH_S)

    def run(self) -> None:
        """Look. In a thread of its own."""
        try:
            self._look()
        except PvisorError as error:
            log.warning("memory %s: %s", self._image.id, error.message)
            self._error = error
        except Exception as error:
            log.exception("memory %s", self._image.id)
            self._error = error
        self._ended_s = time.monotonic()
        self._done.set()

    def wait(self, within_s: float = _LONGEST_S) -> bool:
        """Whether all is here; False when that is not known within this time.

        ChunkError, UpstreamError, FormatError: for the first chunk that can not be had.
        """
        if not self._done.wait(within_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _look(self) -> None:
        if self.is_local and (self._whole or not self._chunks):
            absent = self._fetcher.store.missing([*self._image.leaf_ids(), *self._image.chunk_ids()])
            for group in slices(absent, _GROUP):
                self._resolve(group)
        if not self.is_local:
            self._fetcher.prefetch(self._chunks, self._tally, origin=self._origin)
        for group in slices(self._chunks, _GROUP):
            self._resolve(group)

    def _resolve(self, chunks: Sequence[ChunkId]) -> None:
        spent = Tally()  # to look is no use of the image
        for result in self._fetcher.resolve(chunks, spent, origin=self._origin).values():
            if isinstance(result, Exception):
                raise result
