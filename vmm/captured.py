"""What a capture made: a block image, and how much of the guest went into it."""

from __future__ import annotations

from dataclasses import dataclass

from imaged.ids import ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """`id` names the block image; `dirty_bytes` were taken from the guest, the rest is the parent's.

    `dirty_bytes` counts what the guest had changed or touched, also where it turned out to be zeros: the work of this
    capture, not the bytes stored.
    """

    id: ChunkId
    dirty_bytes: int
