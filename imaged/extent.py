"""An extent: a run of 4 KiB blocks, and where their bytes are."""

from __future__ import annotations

from dataclasses import dataclass

from imaged.ids import ChunkId


@dataclass(frozen=True, slots=True)
class Extent:
    """`block_count` blocks that are equal to the blocks of `chunk` from `first_block` on; a hole when chunk is None.

    A chunk's last block may be short: it reads as if padded with zeros.
    """

    block_count: int
    chunk: ChunkId | None
    first_block: int = 0
