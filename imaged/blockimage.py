"""Read a block image: a virtual disk of which only the leaves and chunks that are asked for are fetched."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Self, runtime_checkable

from imaged.blockformat import Leaf, Root, block_count
from imaged.chunks import ChunkReader
from imaged.errors import ChunkCorruptError, ChunkMissingError, FormatError
from imaged.frame import Codec
from imaged.ids import BLOCK_BYTES, ChunkId

LEAF_CACHE_BYTES = 16 << 20
"""Parsed leaves that one image keeps. A leaf of 32 KiB chunks takes about 3 KiB, so this maps some 10 GiB."""
BLOB_LIMIT_BYTES = 1 << 30
"""`read_blob` refuses more than this before it allocates: a root of a few bytes can claim to be 512 GiB of holes."""
_LEAVES_AT_ONCE = 4096
_RECENT_LEAVES = 32


@runtime_checkable
class ManyReader(Protocol):
    """A ChunkReader that has the verified bytes of many chunks faster than by opening frames."""

    def get_many(self, chunks: Sequence[ChunkId]) -> Mapping[ChunkId, bytes]:
        """All of them, or an error as from `ChunkReader.get`."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes of an image: those of `chunk` from `chunk_offset` on, or zeros when chunk is None."""

    length: int
    chunk: ChunkId | None
    chunk_offset: int = 0


def get_many(reader: ChunkReader, chunks: Sequence[ChunkId]) -> Mapping[ChunkId, bytes]:
    """The verified bytes of different chunks, in one request when there are several."""
    if len(chunks) == 1:
        return {chunks[0]: reader.get(chunks[0])}
    if not chunks:
        return {}
    if isinstance(reader, ManyReader):
        return reader.get_many(chunks)
    found: dict[ChunkId, bytes] = {}
    for wanted, frame in zip(chunks, reader.frames(chunks), strict=True):
        if frame.id != wanted:
            raise ChunkCorruptError(wanted, f"chunk {frame.id} came in its place")
        if frame.header.codec is Codec.MISSING:
            raise ChunkMissingError(wanted)
        found[wanted] = frame.open()
    return found


class BlockImage:
    """One image, read through any ChunkReader. May be shared by threads if the reader may."""

    def __init__(self, reader: ChunkReader, image: ChunkId, root: Root, *, cache_bytes: int) -> None:
        self.id = image
        self.root = root
        self._reader = reader
        self._cache: OrderedDict[ChunkId, Leaf] = OrderedDict()
        self._cache_room = cache_bytes
        self._lock = threading.Lock()

    @classmethod
    def open(cls, reader: ChunkReader, image: ChunkId, *, cache_bytes: int = LEAF_CACHE_BYTES) -> Self:
        """Read the root, nothing else. FormatError when the chunk is not a root, and what `reader.get` raises."""
        return cls(reader, image, Root.parse(reader.get(image)), cache_bytes=cache_bytes)

    @property
    def size_bytes(self) -> int:
        return self.root.size_bytes

    def pieces(self, offset: int, length: int) -> list[Piece]:
        """What the bytes from offset on consist of, in order; together `length` bytes, fewer only at the end."""
        if offset < 0 or length < 0:
            raise ValueError(f"offset {offset}, length {length}: neither may be negative")
        end = min(offset + length, self.size_bytes)
        if offset >= end:
            return []
        found: list[Piece] = []
        leaf_bytes = self.root.leaf_bytes
        indexes = range(offset // leaf_bytes, (end - 1) // leaf_bytes + 1)
        for index, leaf in zip(indexes, self.leaves(indexes), strict=True):
            start = index * leaf_bytes
            first, last = max(offset - start, 0), min(end - start, leaf_bytes)
            if leaf is None:
                found.append(Piece(last - first, None))
            else:
                found.extend(_leaf_pieces(leaf, first, last))
        return found

    def way(self, offset: int, length: int) -> list[ChunkId]:
        """What reading these bytes takes, each once, in order: the leaves of the range, then the chunks they name."""
        end = min(offset + length, self.size_bytes)
        leaf_bytes = self.root.leaf_bytes
        leaves = self.root.leaves[offset // leaf_bytes : (end - 1) // leaf_bytes + 1] if offset < end else ()
        found = [*leaves, *(piece.chunk for piece in self.pieces(offset, length))]
        return list(dict.fromkeys(chunk for chunk in found if chunk is not None))

    def read(self, offset: int, length: int) -> bytes:
        """The bytes from offset on, short only at the end of the image.

        All chunks of the range are asked for at once and held together, so keep ranges to some MiB. FormatError when a
        chunk is shorter than an entry says.
        """
        pieces = self.pieces(offset, length)
        chunks = get_many(self._reader, list(dict.fromkeys(piece.chunk for piece in pieces if piece.chunk is not None)))
        parts = [_part(piece, chunks) for piece in pieces]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def recent_leaves(self) -> list[tuple[ChunkId, Leaf]]:
        """Some of the leaves that were read, the one used last first."""
        with self._lock:
            return list(islice(reversed(self._cache.items()), _RECENT_LEAVES))

    def leaf_ids(self) -> list[ChunkId]:
        """The different leaves, in disk order; holes have none."""
        return list(dict.fromkeys(leaf for leaf in self.root.leaves if leaf is not None))

    def chunk_ids(self) -> Iterator[ChunkId]:
        """The different data chunks, in disk order. Needs all leaves; root and leaves are not among them."""
        seen: set[ChunkId] = set()
        count, step = len(self.root.leaves), 64
        for first in range(0, count, step):
            for leaf in self.leaves(range(first, min(first + step, count))):
                for chunk in leaf.chunks() if leaf is not None else ():
                    if chunk not in seen:
                        seen.add(chunk)
                        yield chunk

    def preload(self) -> None:
        """Fetch all leaves, in one request for each 4096 of them, so that no read waits for one."""
        count = len(self.root.leaves)
        for first in range(0, count, _LEAVES_AT_ONCE):
            self.leaves(range(first, min(first + _LEAVES_AT_ONCE, count)))

    def leaves(self, indexes: Sequence[int]) -> list[Leaf | None]:
        """The leaves of these ranges, None for a hole; those not in the cache are fetched together."""
        ids = [self.root.leaves[index] for index in indexes]
        held: dict[ChunkId, Leaf] = {}
        with self._lock:
            for leaf_id in ids:
                if leaf_id is not None and (leaf := self._cache.get(leaf_id)) is not None:
                    self._cache.move_to_end(leaf_id)
                    held[leaf_id] = leaf
        missing = list(dict.fromkeys(leaf_id for leaf_id in ids if leaf_id is not None and leaf_id not in held))
        for leaf_id, raw in get_many(self._reader, missing).items():
            held[leaf_id] = self._keep(leaf_id, Leaf.parse(raw))
        found: list[Leaf | None] = []
        for index, leaf_id in zip(indexes, ids, strict=True):
            found.append(None if leaf_id is None else held[leaf_id])
            if leaf_id is not None and held[leaf_id].block_count != self.root.blocks_of(index):
                expected = f"{self.root.blocks_of(index)} blocks"
                raise FormatError(f"leaf {leaf_id}", expected=expected, found=f"{held[leaf_id].block_count}")
        return found

    def _keep(self, leaf_id: ChunkId, leaf: Leaf) -> Leaf:
        with self._lock:
            if leaf_id not in self._cache:
                self._cache[leaf_id] = leaf
                self._cache_room -= len(leaf.raw)
            while self._cache_room < 0 and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cache_room += len(dropped.raw)
        return leaf


def _leaf_pieces(leaf: Leaf, first: int, last: int) -> Iterator[Piece]:
    """The pieces of bytes first to last (exclusive) of a leaf's range."""
    entry = leaf.find(first // BLOCK_BYTES)
    while first < last:
        extent = leaf.extent(entry)
        start, end = leaf.starts[entry] * BLOCK_BYTES, leaf.end(entry) * BLOCK_BYTES
        length = min(end, last) - first
        chunk_offset = 0 if extent.chunk is None else extent.first_block * BLOCK_BYTES + first - start
        yield Piece(length, extent.chunk, chunk_offset)
        first += length
        entry += 1


def _part(piece: Piece, chunks: Mapping[ChunkId, bytes]) -> bytes:
    """The bytes of a piece; a chunk's last block may be short and reads as if padded with zeros."""
    if piece.chunk is None:
        return bytes(piece.length)
    data = chunks[piece.chunk]
    end = piece.chunk_offset + piece.length
    if end > block_count(len(data)) * BLOCK_BYTES:
        raise FormatError(f"chunk {piece.chunk}", expected=f"at least {end} bytes", found=f"{len(data)}")
    part = data[piece.chunk_offset : end]
    return part if len(part) == piece.length else part.ljust(piece.length, b"\0")


def open_blob(reader: ChunkReader, blob: ChunkId, *, limit_bytes: int = BLOB_LIMIT_BYTES) -> BlockImage:
    """One that is to be read whole, or whose chunks are to be listed: FormatError when it is larger than it may be."""
    image = BlockImage.open(reader, blob)
    if image.size_bytes > limit_bytes:
        raise FormatError(f"blob {blob}", expected=f"at most {limit_bytes} bytes", found=f"{image.size_bytes}")
    return image


def read_blob(reader: ChunkReader, blob: ChunkId, *, limit_bytes: int = BLOB_LIMIT_BYTES) -> bytes:
    """The bytes that `imaged.blockbuilder.write_blob` stored: at most three requests (root, leaves, chunks)."""
    image = open_blob(reader, blob, limit_bytes=limit_bytes)
    return image.read(0, image.size_bytes)
