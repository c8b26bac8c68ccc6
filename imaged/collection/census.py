"""Counts what hangs below many snapshots and images that share most of it."""

from __future__ import annotations

from collections.abc import Collection

from imaged.blockformat import Leaf, Root
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.ids import ChunkId
from imaged.measure import Measured
from imaged.record import ImageRecord
from imaged.snapshot import SnapshotRecord

_AT_ONCE = 4096


class Census:
    """Which chunks belong to what, as far as the records, roots and leaves are here. Each leaf is read once, however
    many generations share it. For one thread."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._below: dict[ChunkId, frozenset[ChunkId]] = {}
        self._sizes: dict[ChunkId, int | None] = {}

    def snapshot(self, snapshot: ChunkId) -> set[ChunkId]:
        """The chunks of a snapshot, its image's among them. FormatError."""
        found = {snapshot}
        raw = self._read(snapshot)
        if raw is not None:
            record = SnapshotRecord.parse(raw)
            found |= self.image(record.image)
            for root in record.block_images:
                found |= self._block_image(root)
        return found

    def image(self, image: ChunkId) -> set[ChunkId]:
        """The chunks of an image. FormatError."""
        found = {image}
        raw = self._read(image)
        if raw is not None:
            record = ImageRecord.parse(raw)
            found |= self._block_image(record.metadata) | self._block_image(record.data)
        return found

    def present(self, chunks: Collection[ChunkId]) -> Measured:
        """Those of them that are here."""
        unknown = [chunk for chunk in chunks if chunk not in self._sizes]
        for start in range(0, len(unknown), _AT_ONCE):
            part = unknown[start : start + _AT_ONCE]
            for chunk, place in zip(part, self._store.index.find_many(part), strict=True):
                self._sizes[chunk] = None if place is None else place.stored_bytes
        sizes = [size for chunk in chunks if (size := self._sizes[chunk]) is not None]
        return Measured(len(sizes), sum(sizes))

    def _block_image(self, root: ChunkId) -> frozenset[ChunkId]:
        if root not in self._below:
            raw = self._read(root)
            leaves = [leaf for leaf in Root.parse(raw).leaves if leaf is not None] if raw is not None else []
            self._below[root] = frozenset({root}).union(*(self._leaf(leaf) for leaf in leaves))
        return self._below[root]

    def _leaf(self, leaf: ChunkId) -> frozenset[ChunkId]:
        if leaf not in self._below:
            raw = self._read(leaf)
            self._below[leaf] = frozenset({leaf} if raw is None else {leaf, *Leaf.parse(raw).chunks()})
        return self._below[leaf]

    def _read(self, chunk: ChunkId) -> bytes | None:
        """None for a chunk that is not here, or not sound: what hangs below it is not known."""
        try:
            return self._store.get(chunk)
        except (ChunkMissingError, ChunkCorruptError):
            return None
