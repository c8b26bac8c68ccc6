"""Read every chunk of an image and check it against its id."""

from __future__ import annotations

from dataclasses import dataclass

from imaged.blockformat import Leaf, Root
from imaged.catalog import Entry
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.ids import ChunkId
from imaged.progress import Progress
from imaged.record import ImageRecord
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


class _Check:
    """Reads chunks, each once, and keeps how they are."""

    def __init__(self, store: ChunkStore, progress: Progress) -> None:
        self._store, self._progress = store, progress
        self.seen: set[ChunkId] = set()
        self.corrupt: list[str] = []
        self.verified = 0

    def read(self, chunk: ChunkId) -> bytes | None:
        """The bytes of a chunk that is here, sound, and was not read before."""
        if chunk in self.seen:
            return None
        self.seen.add(chunk)
        try:
            raw = self._store.get(chunk)
        except ChunkMissingError:
            return None
        except ChunkCorruptError:
            self.corrupt.append(str(chunk))
            return None
        self.verified += 1
        self._progress.advance(len(raw))
        return raw


def verify_image(store: ChunkStore, entry: Entry, progress: Progress) -> Verification:
    """Verify what is in the local store; no server is asked. A corrupt chunk is dropped, so that the next read fetches
    it anew.

    What hangs below a root or leaf that is not here is counted as the ref says. FormatError.
    """
    progress.start(f"verifying {entry.ref.chunks} chunks", None)
    check = _Check(store, progress)
    raw = check.read(entry.ref.record)
    roots, leaves, chunks = [], [], []
    if raw is not None:
        record = ImageRecord.parse(raw)
        roots = [record.metadata, record.data]
    for root in roots:
        if (raw := check.read(root)) is not None:
            leaves += [leaf for leaf in Root.parse(raw).leaves if leaf is not None]
    for leaf in leaves:
        if (raw := check.read(leaf)) is not None:
            chunks += Leaf.parse(raw).chunks()
    for chunk in chunks:
        check.read(chunk)
    count = max(entry.ref.chunks, len(check.seen))
    return Verification(
        chunks=count,
        verified=check.verified,
        absent=count - check.verified - len(check.corrupt),
        corrupt=tuple(check.corrupt),
        lazy=bool(entry.ref.origin),
    )
