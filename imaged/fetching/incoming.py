"""Chunks that are on their way though nobody waits for them yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from imaged.errors import ChunkCorruptError
from imaged.fetching.download import Download
from imaged.fetching.tally import Tally
from imaged.fetching.upstream import BATCH_LIMIT
from imaged.frame import Codec, Frame
from imaged.ids import ChunkId

if TYPE_CHECKING:
    from imaged.fetching.fetch import Fetcher
    from imaged.fetching.lanes import Lane

log = logging.getLogger(__name__)
_RETRY_S = 0.05
_KEEP_WAIT_S = 0.25


class Incoming:
    """A promise to bring `wanted`: those of the chunks it was made for that are neither here nor under way.

    Whoever reads one of them waits for it here first, and asks for itself when it takes too long. `hurry` is called
    when nothing has come for a while: it does what can be done about that, or gives the promise up; what arrives later
    is taken all the same. A context manager; threads may share it. Nothing that goes wrong here is an error of a read.
    """

    def __init__(self, fetcher: Fetcher, tally: Tally, lane: Lane) -> None:
        """Use `Fetcher.expect`."""
        self.wanted: tuple[ChunkId, ...] = ()
        self.heard_s = time.monotonic()
        self.lane = lane
        self.hurry: Callable[[], None] = self.close
        self._fetcher, self._tally = fetcher, tally

    def arrived(self, frame: Frame, url: str) -> None:
        """Verify what the server at `url` sent, give it to who waits for it, store it in the background. A corrupt one
        is logged and left to those who need it; a missing one, too."""
        try:
            data = None if frame.header.codec is Codec.MISSING else frame.open()
        except ChunkCorruptError as error:
            log.warning("%s: %s", url, error.message)
            data = None
        if data is None:
            self._fetcher.release(self, [frame.id])
        else:
            self.deliver(frame, data, keep_wait_s=_KEEP_WAIT_S)

    def deliver(self, frame: Frame, data: bytes, *, keep_wait_s: float = 0.0) -> None:
        """As `arrived`, for a frame that was verified: `data` is what it holds."""
        self.heard_s = time.monotonic()
        self._tally.count(fetched_chunks=1, fetched_bytes=frame.stored_bytes)
        self._fetcher.deliver(frame, data, keep_wait_s=keep_wait_s)

    def close(self) -> None:
        """Promise nothing any more: whoever waits for what did not come asks for it."""
        self._fetcher.release(self, self.wanted)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Prefetch:
    """Chunks that are being brought in the background. Threads may share it."""

    def __init__(self, fetcher: Fetcher, incoming: Incoming, tally: Tally, origin: str) -> None:
        """Use `Fetcher.prefetch`."""
        self._fetcher, self._incoming, self._tally, self._origin = fetcher, incoming, tally, origin
        self._stop, self._done = threading.Event(), threading.Event()
        self._download: Download | None = None
        incoming.hurry = self._hurry

    @property
    def wanted(self) -> tuple[ChunkId, ...]:
        """What is being asked for; the rest was here or under way."""
        return self._incoming.wanted

    def cancel(self) -> None:
        """Stop soon. What has come stays."""
        self._stop.set()
        download = self._download
        if download is not None:
            download.cancel()

    def wait(self, timeout_s: float) -> bool:
        """Whether it came to its end, however, within this time."""
        return self._done.wait(timeout_s)

    def run(self) -> None:
        """Bring them, in this thread; never raises."""
        try:
            wanted = self._incoming.wanted
            for start in range(0, len(wanted), BATCH_LIMIT):
                if not self._bring(wanted[start : start + BATCH_LIMIT]):
                    break
        except Exception:
            log.exception("prefetch")
        finally:
            self._incoming.close()
            self._done.set()

    def _bring(self, chunks: Sequence[ChunkId]) -> bool:
        """One batch, again while at least some of it comes each time. False when it is no use to go on."""
        left = len(chunks) + 1

        def arrived(frame: Frame, data: bytes) -> None:
            self._incoming.deliver(frame, data, keep_wait_s=_KEEP_WAIT_S)

        while not self._stop.is_set():
            download = self._download = self._fetcher.download(chunks, self._tally)
            if self._stop.is_set():  # by one who did not see this download yet
                return False
            answered = download.run(self._fetcher.routes.order(self._origin), arrived, patient=False)
            if answered or len(download.wanted) >= left:
                self._fetcher.release(self._incoming, list(download.wanted))
                return answered
            chunks, left = list(download.wanted), len(download.wanted)
            self._stop.wait(_RETRY_S)
        return False

    def _hurry(self) -> None:
        download = self._download
        if download is not None:
            download.hurry()
