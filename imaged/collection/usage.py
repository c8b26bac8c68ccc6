"""What each image and snapshot of a store takes, and how much of that others have too."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imaged.blockformat import Leaf, Root
from imaged.chunkstore.index import Index
from imaged.chunkstore.rows import Location
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError, FormatError
from imaged.ids import ChunkId
from imaged.record import ImageRecord
from imaged.slices import slices
from imaged.snapshot import SnapshotRecord

_PREFIX_BYTES = 8
_AT_ONCE = 4096
_NOBODY, _SEVERAL = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUsage:
    """An image or snapshot (`kind`) and its names. `live_bytes` are of the frames of it that are here, `shared_bytes`
    those of them that another image or snapshot has too, and `own_bytes` the rest: what goes with its last name."""

    kind: str
    id: str
    names: tuple[str, ...]
    chunks: int
    live_bytes: int
    shared_bytes: int
    own_bytes: int


def image_usage(store: ChunkStore) -> list[ImageUsage]:
    """Everything that has a name, the largest own share first. What is damaged counts as far as it can be read."""
    names: dict[tuple[str, ChunkId], list[str]] = {}
    for name, ref in store.refs.items():
        names.setdefault(("image", ref.record), []).append(name)
    for name, held in store.snapshots.items():
        names.setdefault(("snapshot", held.record), []).append(name)
    walk = _Walk(store)
    found = {key: walk.of(*key) for key in names}
    owners = _owners(found.values(), len(walk.places))
    usages = []
    for (kind, record), chunks in found.items():
        live_bytes = sum(map(walk.places.sizes.__getitem__, chunks))
        own_bytes = sum(walk.places.sizes[chunk] for chunk in chunks if owners[chunk] != _SEVERAL)
        usages.append(
            ImageUsage(
                kind=kind,
                id=str(record),
                names=tuple(names[kind, record]),
                chunks=len(chunks),
                live_bytes=live_bytes,
                shared_bytes=live_bytes - own_bytes,
                own_bytes=own_bytes,
            )
        )
    return sorted(usages, key=lambda usage: (-usage.own_bytes, usage.names))


def _owners(sets: Iterable[array[int]], count: int) -> array[int]:
    """Of each chunk the number of the set that it is in, or that it is in several."""
    owners = array("i", [_NOBODY]) * count
    for number, chunks in enumerate(sets):
        for chunk in chunks:
            owners[chunk] = number if owners[chunk] == _NOBODY else _SEVERAL
    return owners


class _Places:
    """The chunks of an index by number, in the order of their ids, and the bytes of their frames: twelve bytes each.

    Two chunks that share the first eight bytes of their ids count as one.
    """

    def __init__(self, index: Index) -> None:
        self._prefixes, self.sizes = array("Q"), array("I")
        for some in slices(index.rows("chunks"), _AT_ONCE):
            self._prefixes.frombytes(b"".join(key[:_PREFIX_BYTES] for key, _ in some))
            self.sizes.extend(Location.unpack(value).stored_bytes for _, value in some)
        if sys.byteorder == "little":
            self._prefixes.byteswap()

    def __len__(self) -> int:
        return len(self._prefixes)

    def numbers(self, chunks: Iterable[ChunkId]) -> array[int]:
        """Of those that are here."""
        found = array("I")
        for chunk in chunks:
            prefix = int.from_bytes(chunk[:_PREFIX_BYTES], "big")
            at = bisect_left(self._prefixes, prefix)
            if at < len(self._prefixes) and self._prefixes[at] == prefix:
                found.append(at)
        return found


class _Walk:
    """Reads every record, root and leaf once, however many images share it."""

    def __init__(self, store: ChunkStore) -> None:
        self.places = _Places(store.index)
        self._store = store
        self._leaves: dict[ChunkId, array[int]] = {}
        self._images: dict[ChunkId, array[int]] = {}

    def of(self, kind: str, record: ChunkId) -> array[int]:
        """The numbers of its chunks, each once."""
        parts = [self.places.numbers([record])]
        try:
            raw = self._read(record)
            if raw is not None and kind == "snapshot":
                document = SnapshotRecord.parse(raw)
                parts += [self._block_image(root) for root in document.block_images]
                parts.append(self.of("image", document.image))
            elif raw is not None:
                image = ImageRecord.parse(raw)
                parts += [self._block_image(image.metadata), self._block_image(image.data)]
        except FormatError:
            pass
        return _united(parts)

    def _block_image(self, root: ChunkId) -> array[int]:
        if root not in self._images:
            parts = [self.places.numbers([root])]
            raw = self._read(root)
            if raw is not None:
                parts += [self._leaf(leaf) for leaf in Root.parse(raw).leaves if leaf is not None]
            self._images[root] = _united(parts)
        return self._images[root]

    def _leaf(self, leaf: ChunkId) -> array[int]:
        if leaf not in self._leaves:
            raw = self._read(leaf)
            self._leaves[leaf] = self.places.numbers([leaf, *(Leaf.parse(raw).chunks() if raw is not None else ())])
        return self._leaves[leaf]

    def _read(self, chunk: ChunkId) -> bytes | None:
        try:
            return self._store.get(chunk)
        except (ChunkMissingError, ChunkCorruptError):
            return None


def _united(parts: Sequence[array[int]]) -> array[int]:
    return array("I", set().union(*parts))
