"""Which frames leave the local packs of a mirror when its cache is too large: those used longest ago."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import disk_bytes
from imaged.chunkstore.rows import Location
from imaged.ids import ChunkId
from imaged.s3.packtable import PackTable, locations
from imaged.s3.reading import Reading

_STEP_BYTES = 16 << 20


class _Kept(NamedTuple):
    """A frame that is in a local pack; one that was never asked for has no last use."""

    used: bytes
    place: Location


def evict_copies(root: Path, index: Index, packs: PackTable, reading: Reading, byte_count: int) -> int:
    """Free so many bytes of the disk, as far as the bucket has what goes; how many. No chunk leaves the index."""
    uses = {ChunkId(key): value[:8] for key, value in index.rows("uses")}
    kept = sorted(_kept(root, packs, reading, uses))
    freed = 0
    step: list[Location] = []
    step_bytes = 0
    for one in kept:
        step.append(one.place)
        step_bytes += one.place.stored_bytes
        if freed + step_bytes >= byte_count or step_bytes >= _STEP_BYTES:
            freed += _evict(root, reading, step)
            step, step_bytes = [], 0
            if freed >= byte_count:
                return freed
    return freed + _evict(root, reading, step)


def _kept(root: Path, packs: PackTable, reading: Reading, uses: dict[ChunkId, bytes]) -> Iterator[_Kept]:
    for pack in packs.all():
        if not packs.is_safe(pack.number) or not disk_bytes(root, pack.number):
            continue
        contents = packs.contents(pack.id)
        for chunk, place in locations(pack.number, contents) if contents is not None else ():
            if reading.is_here(place):
                yield _Kept(uses.get(chunk, bytes(8)), place)


def _evict(root: Path, reading: Reading, places: list[Location]) -> int:
    """By what the file system then has less: only whole blocks are given back."""
    numbers = {place.pack for place in places}
    before = sum(disk_bytes(root, number) for number in numbers)
    reading.evict(places)
    return before - sum(disk_bytes(root, number) for number in numbers)
