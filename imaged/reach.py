"""What hangs below a name: record -> block images -> leaves -> chunks, and the layer memos that an image came from.

A snapshot hangs on an image record and on block images of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from imaged.blockformat import Leaf, Root
from imaged.blockimage import BlockImage, get_many, read_blob
from imaged.chunks import ChunkReader
from imaged.conversion.layer import chunk_ids as layer_chunk_ids
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.ids import ChunkId
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord

_LEAVES_AT_ONCE = 256


class Belonging(NamedTuple):
    """Chunks of one block image: its leaves, and what these name."""

    leaves: list[ChunkId]
    chunks: list[ChunkId]


def belonging(reader: ChunkReader, image: ChunkId, wanted: Sequence[ChunkId]) -> Belonging:
    """Which of the ids in `wanted`, whoever made that list, are of this block image; in their order, each once.

    A chunk counts when a leaf in `wanted` names it, so that what is read follows the list and not the image. Errors as
    from `reader`, and FormatError.
    """
    wanted = list(dict.fromkeys(wanted))
    known = frozenset(leaf for leaf in Root.parse(reader.get(image)).leaves if leaf is not None)
    leaves = [chunk for chunk in wanted if chunk in known]
    named: set[ChunkId] = set()
    for start in range(0, len(leaves), _LEAVES_AT_ONCE):
        for raw in get_many(reader, leaves[start : start + _LEAVES_AT_ONCE]).values():
            named.update(Leaf.parse(raw).chunks())
    return Belonging(leaves, [chunk for chunk in wanted if chunk in named and chunk not in known])


class PartialReader(ChunkReader, Protocol):
    """A ChunkReader that may lack chunks and can say which."""

    def absent(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that are not here."""
        ...


class MarkSet(Protocol):
    """Where a `Marker` notes chunks: a set, or `imaged.collection.marks.Marks`."""

    def add(self, chunk: ChunkId, /) -> None: ...

    def update(self, chunks: Iterable[ChunkId], /) -> None: ...

    def __contains__(self, chunk: ChunkId, /) -> bool: ...


def reachable(reader: ChunkReader, record: ChunkId) -> Iterator[ChunkId]:
    """Every chunk of an image, each once: record, then root, leaves and chunks of its metadata and of its data.

    Reads record, roots and leaves only; ChunkMissingError, ChunkCorruptError and FormatError come from those.
    """
    yield from _each_once(_of_image(reader, record))


def reachable_snapshot(reader: ChunkReader, snapshot: ChunkId) -> Iterator[ChunkId]:
    """Every chunk of a snapshot, each once: record, device state, memory and disk, then its image; not its parent.

    Reads records, roots and leaves only; ChunkMissingError, ChunkCorruptError and FormatError come from those.
    """
    yield from _each_once(_of_snapshot(reader, snapshot))


def _each_once(chunks: Iterable[ChunkId]) -> Iterator[ChunkId]:
    seen: set[ChunkId] = set()
    for chunk in chunks:
        if chunk not in seen:
            seen.add(chunk)
            yield chunk


def _of_image(reader: ChunkReader, record: ChunkId) -> Iterator[ChunkId]:
    yield record
    document = ImageRecord.parse(reader.get(record))
    for root in (document.metadata, document.data):
        yield from _of_block_image(reader, root)


def _of_snapshot(reader: ChunkReader, snapshot: ChunkId) -> Iterator[ChunkId]:
    yield snapshot
    document = SnapshotRecord.parse(reader.get(snapshot))
    for root in document.block_images:
        yield from _of_block_image(reader, root)
    yield from _of_image(reader, document.image)


def _of_block_image(reader: ChunkReader, root: ChunkId) -> Iterator[ChunkId]:
    image = BlockImage.open(reader, root)
    yield root
    yield from image.leaf_ids()
    yield from image.chunk_ids()


class Marker:
    """Collects in `kept`, or in `marks` when given, the present chunks of all that is shown to it, and says of each
    thing what it lacks. `roots` are the records and block images that were shown, present or not.

    A leaf is walked once, however many images share it.
    """

    def __init__(self, store: PartialReader, marks: MarkSet | None = None) -> None:
        self.kept: set[ChunkId] = set()
        self._marks: MarkSet = self.kept if marks is None else marks
        self.roots: set[ChunkId] = set()
        self._store = store
        self._lacking: dict[ChunkId, frozenset[ChunkId]] = {}

    def image(self, record: ChunkId) -> tuple[ImageRecord | None, set[ChunkId]]:
        """The record, None when it is missing itself, and the chunks that are missing. FormatError."""
        self.roots.add(record)
        raw = self._get(record)
        if raw is None:
            return None, {record}
        document = ImageRecord.parse(raw)
        return document, self.block_image(document.metadata) | self.block_image(document.data)

    def snapshot(self, snapshot: ChunkId) -> tuple[SnapshotRecord | None, set[ChunkId]]:
        """The record, None when it is missing itself, and the chunks that are missing; its parent is none of its own.
        FormatError."""
        self.roots.add(snapshot)
        raw = self._get(snapshot)
        if raw is None:
            return None, {snapshot}
        document = SnapshotRecord.parse(raw)
        _, lacking = self.image(document.image)
        for root in document.block_images:
            lacking = lacking | self.block_image(root)
        return document, lacking

    def layer(self, blob: ChunkId) -> set[ChunkId]:
        """The missing chunks of a layer memo: its own block image, and the file data it names. FormatError."""
        lacking = self.block_image(blob)
        if lacking:
            return lacking
        try:
            return set(self._data(layer_chunk_ids(read_blob(self._store, blob))))
        except (ChunkMissingError, ChunkCorruptError) as error:
            return {error.chunk}

    def block_image(self, root: ChunkId) -> set[ChunkId]:
        """The missing chunks of a block image. FormatError."""
        self.roots.add(root)
        raw = self._get(root)
        if raw is None:
            return {root}
        lacking: set[ChunkId] = set()
        for leaf in dict.fromkeys(leaf for leaf in Root.parse(raw).leaves if leaf is not None):
            if leaf not in self._lacking:
                raw = self._get(leaf)
                below = [leaf] if raw is None else self._data(Leaf.parse(raw).chunks())
                self._lacking[leaf] = frozenset(below)
            lacking |= self._lacking[leaf]
        return lacking

    def _get(self, chunk: ChunkId) -> bytes | None:
        try:
            raw = self._store.get(chunk)
        except (ChunkMissingError, ChunkCorruptError):
            return None
        self._marks.add(chunk)
        return raw

    def _data(self, chunks: list[ChunkId]) -> list[ChunkId]:
        """Keep those that are there and return the others."""
        absent = self._store.absent(chunk for chunk in chunks if chunk not in self._marks)
        lacking = frozenset(absent)
        self._marks.update(chunk for chunk in chunks if chunk not in lacking)
        return absent
