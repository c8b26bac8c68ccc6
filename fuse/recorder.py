"""Recording what a process touches when it starts in an image, for the next host that starts one; and what a virtual
machine touches when it goes on from a snapshot.

A run is recorded when it is the first of its image in this daemon: the kernel's page cache has nothing of it then, so
that every first touch is a read here. One that goes on to read as much as no start needs is not kept: it was a search,
a copy or a check of the image, and everybody's next start would be made to fetch all of that.

On the way of a read there is one append to a list; which chunks that was is told afterwards, from the leaves that are
then at hand. Reading ahead and prefetching go past this: they are no touch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from imaged.chunkstore.offers import Offer
from imaged.errors import PvisorError
from imaged.fetching.retry import RetryPolicy, UpstreamRefusedError
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.profile import ENTRY_LIMIT, RUN_BYTES

if TYPE_CHECKING:
    from fuse.files import BlockFile
    from imaged.fetching.fetch import Fetcher

log = logging.getLogger(__name__)
QUIET_S = 2.0
LONGEST_S = 20.0
"""What a start that is still reading touches after this comes too late to be worth a place before it."""
READ_LIMIT = 1 << 16
DISK_LIMIT_BYTES = 128 << 20
SMALL_BYTES = 4 << 20
"""Stored bytes that a start may always need: an image may be one program."""
MOST_OF_IMAGE = 3
"""A run that reads more than the third part of its image's disk is none that only starts."""
MEMORY_LONGEST_S = 10.0
MEMORY_BYTES = 64 << 20
"""Of memory that counts as touched first: as much as `fuse.workingset` takes."""
_OFFER_S = 5.0
_END_S = 10.0


class Recording:
    """The reads of one block image from the first one on. Threads may share it."""

    __slots__ = ("_begun", "_disk_bytes", "_reads", "_seen", "due_s", "file", "image", "started_s")
    longest_s = LONGEST_S

    def __init__(self, image: ChunkId, file: BlockFile, begun: Callable[[Recording], None]) -> None:
        """`begun` is called at the first read, or rarely at the first few."""
        self.image = image
        self.file = file
        self.started_s = self.due_s = 0.0
        self._begun = begun
        self._seen = self._disk_bytes = 0
        self._reads: list[tuple[int, int]] = []

    def note(self, offset: int, length: int) -> None:
        """A read was asked for."""
        reads = self._reads
        if not reads:
            self._begun(self)
        if len(reads) < READ_LIMIT:
            reads.append((offset, length))

    @property
    def reads(self) -> Sequence[tuple[int, int]]:
        """Offset and length of what was read until now, in order, some of it more than once."""
        return list(self._reads)

    def start(self, now_s: float) -> None:
        """Begin to look for quiet."""
        self.started_s, self.due_s, self._seen = now_s, now_s + QUIET_S, 0

    def is_over(self, now_s: float) -> bool:
        """Whether nothing was read for a while, or enough; to be asked each time that `due_s` is reached."""
        if now_s < self.due_s:
            return False
        count = len(self._reads)
        if count == self._seen or now_s - self.started_s >= self.longest_s or self.is_too_much():
            return True
        self._seen, self.due_s = count, now_s + QUIET_S
        return False

    def is_too_much(self) -> bool:
        """Whether more was read than any start reads."""
        self._disk_bytes = sum(length for _, length in dict.fromkeys(self._reads))
        return len(self._reads) >= READ_LIMIT or self._disk_bytes > DISK_LIMIT_BYTES

    def touched(self, stored: Callable[[ChunkId], tuple[int, int] | None]) -> list[ChunkId]:
        """The leaves and chunks of these reads, in order of first touch; none when that was no start.

        `stored` is `ChunkStore.sizes`. Errors as from reading leaves, which as a rule are in memory.
        """
        if self.is_too_much():
            return []
        image = self.file.image
        found: dict[ChunkId, None] = {}
        stored_bytes = 0
        for offset, length in dict.fromkeys(self._reads):
            fresh = [chunk for chunk in image.way(offset, length) if chunk not in found]
            for chunk in fresh:
                sizes = stored(chunk)
                stored_bytes += sizes[1] if sizes is not None else length // len(fresh)
            found.update(dict.fromkeys(fresh))
            if len(found) > ENTRY_LIMIT or stored_bytes > RUN_BYTES:
                return []
        if stored_bytes > SMALL_BYTES and self._disk_bytes * MOST_OF_IMAGE > image.size_bytes:
            return []
        return list(found)


class MemoryRecording(Recording):
    """The reads of a memory image by the first machine that goes on from it. `image` is the snapshot.

    Every machine touches its memory, a busy one all of it: what comes after the bounds is left out, and what came
    before them kept.
    """

    __slots__ = ()
    longest_s = MEMORY_LONGEST_S

    def is_too_much(self) -> bool:
        """Whether what comes now would be left out."""
        self._disk_bytes = sum(length for _, length in dict.fromkeys(self._reads))
        return len(self._reads) >= READ_LIMIT or self._disk_bytes >= MEMORY_BYTES

    def touched(self, stored: Callable[[ChunkId], tuple[int, int] | None]) -> list[ChunkId]:
        """The leaves and chunks of the first reads, in order of first touch. Errors as from reading leaves."""
        found: dict[ChunkId, None] = {}
        room = MEMORY_BYTES
        for offset, length in dict.fromkeys(self._reads):
            room -= length
            fresh = [chunk for chunk in self.file.image.way(offset, length) if chunk not in found]
            if room < 0 or len(found) + len(fresh) > ENTRY_LIMIT:
                break
            found.update(dict.fromkeys(fresh))
        return list(found)


class Recorder:
    """Ends recordings when their process is quiet, keeps the profile, and offers the run to the image's server.

    One thread, which sleeps while nothing is recorded. Threads may share it.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._begun: SimpleQueue[Recording | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def watch(self, image: ChunkId, file: BlockFile) -> None:
        """Record the reads of `file`, the data of an image, from its next read on."""
        file.recording = Recording(image, file, self._begun.put)

    def watch_memory(self, snapshot: ChunkId, file: BlockFile) -> None:
        """Record the reads of `file`, the memory of a snapshot, from the next one on, unless that is being done."""
        if file.recording is None:
            file.recording = MemoryRecording(snapshot, file, self._begun.put)

    def leave(self, file: BlockFile) -> None:
        """Record nothing of `file` any more, nor keep what is being recorded of it: others than a start read it."""
        file.recording = None

    def close(self) -> None:
        """End what is being recorded, and keep it."""
        self._begun.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        active: list[Recording] = []
        closing = False
        while not closing:
            wait_s = max(0.0, min(one.due_s for one in active) - time.monotonic()) if active else None
            try:
                begun = self._begun.get(timeout=wait_s)
            except Empty:
                pass
            else:
                closing = begun is None
                if begun is not None and begun not in active:
                    begun.start(time.monotonic())
                    active.append(begun)
            now_s = time.monotonic()
            for one in [one for one in active if closing or one.is_over(now_s)]:
                active.remove(one)
                self._end(one)

    def _end(self, recording: Recording) -> None:
        if recording.file.recording is not recording:
            return
        recording.file.recording = None
        try:
            touched = recording.touched(self._fetcher.store.sizes)
            if not touched:
                log.info("%s: the run is not kept: nothing was read, or too much for a start", recording.image)
            self._keep(recording.image, recording.file.image.id, touched)
        except PvisorError as error:
            log.warning("profile of %s: %s", recording.image, error.message)
        except Exception:
            log.exception("profile of %s", recording.image)

    def _keep(self, image: ChunkId, block_image: ChunkId, touched: list[ChunkId]) -> None:
        """Merge the run into the profile here and at the server, unless the profile is exactly this run. The server is
        also told what it could not be told before."""
        if not touched:
            return
        fresh = self._merge(image, block_image, touched)
        away = set[str]()
        if fresh:
            self._tell(block_image, Offer(image, touched), away)
        offers = self._fetcher.store.offers
        for other in offers.ids():
            held = offers.get(other)
            if held is None or self._tell(other, held, away):
                offers.delete(other)

    def _merge(self, image: ChunkId, block_image: ChunkId, touched: list[ChunkId]) -> bool:
        """Whether that makes another profile."""
        profiles = self._fetcher.store.profiles
        held = profiles.get(block_image)
        if held is not None:
            merged = held.merged(touched)
            if (merged.chunks, merged.ages) == (held.chunks, held.ages):
                return False
        profile = profiles.merge(block_image, touched)
        log.info("%s: %d chunks touched, %d in its profile", image, len(touched), len(profile.chunks))
        return True

    def _tell(self, block_image: ChunkId, offer: Offer, away: set[str]) -> bool:
        """Whether the server of the image knows now; else it is remembered. Who does not answer goes into `away`."""
        origin = self._fetcher.origin(block_image)
        if origin is None:
            return True
        if origin not in away:
            try:
                self._offer(origin, offer.image, offer.touched)
            except UpstreamRefusedError as error:
                log.info("profile of %s is not wanted: %s", offer.image, error.message)
                return True
            except PvisorError as error:
                log.warning("profile of %s is offered again later: %s", offer.image, error.message)
                away.add(origin)
            else:
                return True
        if self._fetcher.store.offers.get(block_image) != offer:
            self._fetcher.store.offers.add(block_image, offer.image, offer.touched)
        return False

    def _offer(self, origin: str, image: ChunkId, touched: list[ChunkId]) -> None:
        """Nobody waits for this: one try."""
        with HttpUpstream(origin, retry=RetryPolicy(total_s=0.0), timeout_s=_OFFER_S) as upstream:
            upstream.merge_profile(image, touched)
