"""Read every chunk of an image and check it against its id."""

from __future__ import annotations

from dataclasses import dataclass

from imaged.catalog import Entry
from imaged.chunks import ChunkReader
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.progress import Progress
from imaged.reach import reachable
from imaged.store import ChunkStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the chunks of an image are. `absent` chunks of a lazily pulled image are at its origin still."""

    chunks: int
    verified: int
    absent: int
    corrupt: tuple[str, ...]
    lazy: bool

    @property
    def sound(self) -> bool:
        """Nothing is corrupt, and nothing is absent that no server holds."""
        return not self.corrupt and (self.lazy or not self.absent)


def verify_image(store: ChunkStore, reader: ChunkReader, entry: Entry, progress: Progress) -> Verification:
    """Verify what is in the local store. A corrupt chunk is dropped, so that the next read fetches it anew.

    `reader` gives the roots and leaves, from the origin where they are not local. ChunkMissingError when it can not.
    """
    chunks = list(reachable(reader, entry.ref.record))
    progress.start(f"verifying {len(chunks)} chunks", None)
    verified = absent = 0
    corrupt: list[str] = []
    for chunk in chunks:
        try:
            progress.advance(len(store.get(chunk)))
            verified += 1
        except ChunkMissingError:
            absent += 1
        except ChunkCorruptError:
            corrupt.append(str(chunk))
    lazy = bool(entry.ref.origin)
    return Verification(chunks=len(chunks), verified=verified, absent=absent, corrupt=tuple(corrupt), lazy=lazy)
