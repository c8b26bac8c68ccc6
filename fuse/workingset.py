"""The working set of a memory image: the ranges that a machine touches first when it goes on from there.

A startup profile (`imaged.profile`) names leaves and chunks; here these become places in the image, which the page
cache wants, and which mean something in another image as well: a machine that is parked again is a new image, of which
the places are those of the old one, and those it changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from imaged.blockimage import BlockImage
from imaged.changes import places
from imaged.derive import CELL_BYTES
from imaged.ids import ChunkId

WORKING_SET_BYTES = 64 << 20
"""Of memory, at most. A guest that idles needs some 20 MiB; all of it is verified before a machine goes on."""
_COUNT_LIMIT = 4096

Range = tuple[int, int]
"""Offset and length in bytes."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """`ranges` in the order of first touch, none of them twice, and the leaves and chunks they are read from."""

    ranges: tuple[Range, ...] = ()
    chunks: tuple[ChunkId, ...] = ()

    @classmethod
    def of_ranges(cls, image: BlockImage, ranges: Iterable[Range]) -> WorkingSet:
        """Errors as from reading leaves."""
        kept = tuple(_bounded(ranges))
        found = dict.fromkeys(chunk for offset, length in kept for chunk in image.way(offset, length))
        return cls(kept, tuple(found)[:_COUNT_LIMIT])

    @classmethod
    def of_profile(cls, image: BlockImage, chunks: Sequence[ChunkId]) -> WorkingSet:
        """Where these chunks are in the ranges of these leaves. What is not of this image is left out."""
        known = frozenset(chunks)
        leaves = image.root.leaves
        indexes = [index for index, leaf in enumerate(leaves) if leaf is not None and leaf in known]
        found: dict[bytes, list[Range]] = {}
        for index, leaf in zip(indexes, image.leaves(indexes), strict=True):
            leaf_id = leaves[index]
            if leaf is not None and leaf_id is not None:
                for place in places(leaf_id, leaf, index * image.root.leaf_bytes):
                    if place.chunk in known:
                        found.setdefault(place.chunk, []).append((place.offset, place.length))
        ranges = tuple(_bounded(_with_holes(place, image) for chunk in chunks for place in found.get(chunk, ())))
        read = {leaves[index] for index in indexes}
        return cls(ranges, tuple(chunk for chunk in chunks if chunk in found or chunk in read))


def _with_holes(place: Range, image: BlockImage) -> Range:
    """With all of the cells that it lies in: a profile can not name the holes there, which are touched as often."""
    first, end = place[0] // CELL_BYTES * CELL_BYTES, -(-sum(place) // CELL_BYTES) * CELL_BYTES
    return first, min(end, image.size_bytes) - first


def _bounded(ranges: Iterable[Range]) -> Iterator[Range]:
    """Each once, neighbours that follow each other as one, until that is enough."""
    room = WORKING_SET_BYTES
    seen: set[Range] = set()
    last: Range | None = None
    for place in ranges:
        if place in seen:
            continue
        seen.add(place)
        offset, length = place
        room -= length
        if room < 0:
            break
        if last is not None and sum(last) == offset:
            last = last[0], last[1] + length
        else:
            if last is not None:
                yield last
            last = place
    if last is not None:
        yield last
