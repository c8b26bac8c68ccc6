"""A startup profile: which chunks of a block image processes touch when they start, in the order of first touch.

    offset  size  field
         0     4  magic "pvT1"
         4     4  runs: how many recorded runs were merged, little endian
         8     4  n: entries, at most 4096, little endian
        12  32 n  chunk ids, all different, in order of first touch: leaves, and the chunks that they name
         -     n  age of each: runs merged since one touched it, at most 7

A profile is advice. Whoever follows it fetches only what belongs to the image (`imaged.reach.belonging`), so a wrong
one costs bytes and never correctness. docs/formats/profile.md describes the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from imaged.errors import FormatError
from imaged.ids import ChunkId

MAGIC = b"pvT1"
ENTRY_LIMIT = 4096
"""As many ids as one batch takes: with chunks of 64 KiB, 256 MiB of image."""
AGE_LIMIT = 7
"""What the last eight runs did not touch goes: a fleet that runs several programs in an image keeps the set of each."""
RUN_BYTES = 32 << 20
"""Of the frames that one run touches; who needs more is not starting. `import numpy` in Debian takes 10 MB."""
PROFILE_BYTES = 64 << 20
"""Of the frames of a profile: two such runs, or the starts of many programs."""
AHEAD_BYTES = 256 << 20
"""Frames of the profile's chunks, at most, that come behind a boot answer without being asked for one by one."""
_HEADER = struct.Struct("<4sII")
_RUNS_LIMIT = 0xFFFFFFFF
_ID = ChunkId.SIZE_BYTES


@dataclass(frozen=True, slots=True)
class Profile:
    """`chunks` in order of first touch, and the age of each in `ages`."""

    runs: int = 0
    chunks: tuple[ChunkId, ...] = ()
    ages: bytes = b""

    def merged(self, touched: Sequence[ChunkId], sizes: Mapping[ChunkId, int] | None = None) -> Profile:
        """With one run more. What it touched has age 0 and what is new comes last, in the order given; the rest ages.

        Above the limit of entries, or of bytes as far as `sizes` knows those of the frames, the oldest go first, and of
        those the last touched.
        """
        fresh = dict.fromkeys(touched)
        entries = [(chunk, 0 if chunk in fresh else age + 1) for chunk, age in zip(self.chunks, self.ages, strict=True)]
        known = frozenset(self.chunks)
        entries += [(chunk, 0) for chunk in fresh if chunk not in known]
        kept = [entry for entry in entries if entry[1] <= AGE_LIMIT]
        room = PROFILE_BYTES
        chosen: list[int] = []
        for place in sorted(range(len(kept)), key=lambda place: (kept[place][1], place))[:ENTRY_LIMIT]:
            room -= sizes.get(kept[place][0], 0) if sizes is not None else 0
            if room < 0:
                break
            chosen.append(place)
        kept = [kept[place] for place in sorted(chosen)]
        chunks = tuple(chunk for chunk, _ in kept)
        return Profile(min(self.runs + 1, _RUNS_LIMIT), chunks, bytes(age for _, age in kept))

    def pack(self) -> bytes:
        return _HEADER.pack(MAGIC, self.runs, len(self.chunks)) + b"".join(self.chunks) + self.ages

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """FormatError when the bytes are not exactly one profile."""
        if len(raw) < _HEADER.size or raw[:4] != MAGIC:
            expected = f"magic {MAGIC!r} and a header of {_HEADER.size} bytes"
            raise FormatError("profile", expected=expected, found=f"{raw[:4]!r}, {len(raw)} bytes")
        _, runs, count = _HEADER.unpack_from(raw)
        if count > ENTRY_LIMIT:
            raise FormatError("profile", expected=f"at most {ENTRY_LIMIT} entries", found=f"{count}")
        ages_at = _HEADER.size + count * _ID
        if len(raw) != ages_at + count:
            expected = f"{ages_at + count} bytes for {count} entries"
            raise FormatError("profile", expected=expected, found=f"{len(raw)} bytes")
        chunks = tuple(ChunkId(raw[at : at + _ID]) for at in range(_HEADER.size, ages_at, _ID))
        ages = raw[ages_at:]
        if len(frozenset(chunks)) != count:
            raise FormatError("profile", expected="different chunk ids", found="one of them twice")
        if ages and max(ages) > AGE_LIMIT:
            raise FormatError("profile", expected=f"ages of at most {AGE_LIMIT}", found=f"{max(ages)}")
        return cls(runs, chunks, ages)
