"""The files of the FUSE mount, without FUSE: which there are, how long, and what bytes they hold."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from fuse.readahead import Prefetcher, Runs
from fuse.recorder import Recording
from imaged.blockimage import BlockImage
from imaged.errors import ChunkMissingError, FormatError, NotFoundError, PvisorError
from imaged.fetching.fetch import Fetcher, FetchingReader, Tally
from imaged.ids import ChunkId

_AHEAD_S = 30.0
_IDLE_FILES = 64
"""Block images kept ready, with the leaves they have read, after their last reader closed them."""


@dataclass(frozen=True, slots=True)
class ImageUse:
    """What reading one image cost since the daemon started. `name` is how it was asked for last. `snapshot`: it is the
    memory, disk and device state of one.
    """

    id: ChunkId
    name: str
    tally: Tally
    snapshot: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **self.tally.to_dict()}


@dataclass(slots=True, eq=False)
class BlockFile:
    """One file. `handles` counts who has it open; guarded by the table's lock. `failed`: a chunk could not be had for a
    read since somebody looked."""

    image: BlockImage
    reader: FetchingReader
    tally: Tally
    prefetcher: Prefetcher
    handles: int = 0
    recording: Recording | None = None
    failed: bool = False
    runs: Runs = field(init=False)

    def __post_init__(self) -> None:
        self.runs = Runs(self.image.size_bytes)

    @property
    def size_bytes(self) -> int:
        return self.image.size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """All `length` bytes that the file has at `offset`, or an error: never fewer."""
        self.tally.count(reads=1)
        recording = self.recording
        if recording is not None:
            recording.note(offset, length)
        ahead = self.runs.note(offset, length)
        if ahead is not None:
            self.prefetcher.start(self._bring, *ahead)
        try:
            data = self.image.read(offset, length)
        except PvisorError:
            self.failed = True
            raise
        expected = max(0, min(length, self.size_bytes - offset))
        if len(data) != expected:
            where = f"read of {self.image.id} at {offset}"
            raise FormatError(where, expected=f"{expected} bytes", found=f"{len(data)}")
        return data

    def _bring(self, offset: int, length: int) -> None:
        """Have what these bytes consist of in memory, and take no part in who is asked for what is waited for."""
        pieces = self.image.pieces(offset, length)
        chunks = dict.fromkeys(piece.chunk for piece in pieces if piece.chunk is not None)
        self.reader.bring(list(chunks), _AHEAD_S)


class BlockFiles:
    """A flat directory: the name of a file is a block image id. Any block image that can be had is a file.

    Threads may share it. The counters of a block image are those of the image it was opened for with `assign`, else
    its own.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._prefetcher = Prefetcher()
        self._lock = threading.Lock()
        self._files: OrderedDict[ChunkId, BlockFile] = OrderedDict()
        self._handles: dict[int, BlockFile] = {}
        self._numbers = itertools.count(1)
        self._uses: dict[ChunkId, ImageUse] = {}
        self._memories: set[ChunkId] = set()

    def use(self, image: ChunkId, name: str, spent: Tally | None = None, *, snapshot: bool = False) -> ImageUse:
        """The counters of an image, under the name it has now. `spent` is what opening it has cost; for an image that
        is new here it becomes its counters, so that they also have what opening still costs in the background."""
        with self._lock:
            held = self._uses.get(image)
            if held is None or held.name != name:
                tally = held.tally if held is not None else spent or Tally()
                held = self._uses[image] = ImageUse(image, name, tally, snapshot)
        if spent is not None and held.tally is not spent:
            held.tally.count(**spent.to_dict())
        return held

    def assign(self, block_image: ChunkId, tally: Tally) -> BlockFile:
        """Count reads of this block image there, and make the file ready. Errors as `lookup`."""
        with self._lock:
            held = self._files.get(block_image)
            if held is not None and held.tally is tally:
                return held
        fresh = self._load(block_image, tally)
        with self._lock:
            held = self._files.get(block_image)
            if held is None or not held.handles:
                self._files[block_image] = fresh
                return fresh
            return held

    def map_as_memory(self, block_image: ChunkId) -> None:
        """From now on this is a machine's memory: a file that may be opened for writing, which nobody can do."""
        self._memories.add(block_image)

    def is_memory(self, name: str) -> bool:
        """Whether `map_as_memory` was called for the file of this name."""
        return ChunkId.is_id(name) and ChunkId.parse(name) in self._memories

    def held(self, block_image: ChunkId) -> BlockFile | None:
        """The file if it is at hand."""
        with self._lock:
            return self._files.get(block_image)

    def lookup(self, name: str) -> BlockFile:
        """NotFoundError when this names no block image; UpstreamError, StoreError, ChunkCorruptError when one can not
        tell."""
        if not ChunkId.is_id(name):
            raise NotFoundError(f"{name[:80]!r} is not a block image id")
        block_image = ChunkId.parse(name)
        with self._lock:
            held = self._files.get(block_image)
            if held is not None:
                self._files.move_to_end(block_image)
                return held
        tally = Tally()
        try:
            fresh = self._load(block_image, tally)
        except (ChunkMissingError, FormatError) as error:
            raise NotFoundError(f"no block image {block_image}: {error.message}") from error
        with self._lock:
            held = self._files.setdefault(block_image, fresh)
            if held is fresh:
                self._uses.setdefault(block_image, ImageUse(block_image, name, tally))
                self._forget_idle()
            return held

    def open(self, name: str) -> int:
        """A handle for `read`; errors as `lookup`."""
        file = self.lookup(name)
        with self._lock:
            handle = next(self._numbers)
            self._handles[handle] = file
            file.handles += 1
            return handle

    def file(self, handle: int) -> BlockFile:
        """The open file; KeyError when the handle is not open."""
        return self._handles[handle]

    def release(self, handle: int) -> None:
        with self._lock:
            self._handles.pop(handle).handles -= 1
            self._forget_idle()

    def is_open(self, block_image: ChunkId) -> bool:
        """Whether somebody has this file open."""
        with self._lock:
            held = self._files.get(block_image)
            return held is not None and held.handles > 0

    def names(self) -> list[str]:
        """The files that have been looked up or opened: all others are there, too, once someone asks for them."""
        with self._lock:
            return [str(block_image) for block_image in self._files]

    def status(self, *, snapshots: bool = False) -> dict[str, dict[str, Any]]:
        """By image id, or by snapshot id: name and counters."""
        with self._lock:
            uses = list(self._uses.values())
        return {str(use.id): use.to_json() for use in uses if use.snapshot is snapshots}

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()

    def _load(self, block_image: ChunkId, tally: Tally) -> BlockFile:
        reader = self._fetcher.reader(block_image, tally)
        image = BlockImage.open(reader, block_image)
        reader.guess_in(image)
        return BlockFile(image, reader, tally, self._prefetcher)

    def _forget_idle(self) -> None:
        idle = [block_image for block_image, file in self._files.items() if not file.handles]
        for block_image in idle[: max(0, len(idle) - _IDLE_FILES)]:
            del self._files[block_image]
