"""Read every chunk of an image or a snapshot and check it against its id."""

from __future__ import annotations

from dataclasses import dataclass

from imaged.blockformat import Leaf, Root
from imaged.catalog import Entry
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.ids import ChunkId
from imaged.progress import Progress
from imaged.record import ImageRecord
from imaged.snapshots import Snapshot, snapshot_origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How the chunks of an image or snapshot are. `absent` ones of what was pulled lazily are at its origin still."""

    chunks: int
    verified: int
    absent: int
    corrupt: tuple[str, ...]
    lazy: bool

    @property
    def sound(self) -> bool:
        """Nothing is corrupt, and nothing is absent that no server holds."""
        return not self.corrupt and (self.lazy or not self.absent)

    def text(self, label: str) -> str:
        """Lines for a user who calls it `label`."""
        absent = f", {self.absent} are not here yet" if self.lazy else f", {self.absent} missing"
        counts = f"{self.verified} of {self.chunks} chunks verified{absent if self.absent else ''}"
        return "\n".join([*(f"corrupt: chunk {chunk}" for chunk in self.corrupt), f"{label}: {counts}"])


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

    def image(self, record: ChunkId) -> list[ChunkId]:
        """Read an image's record; the roots of its block images. FormatError."""
        raw = self.read(record)
        if raw is None:
            return []
        document = ImageRecord.parse(raw)
        return [document.metadata, document.data]

    def block_images(self, roots: list[ChunkId]) -> None:
        """Read these down to their chunks. FormatError."""
        leaves: list[ChunkId] = []
        chunks: list[ChunkId] = []
        for root in roots:
            if (raw := self.read(root)) is not None:
                leaves += [leaf for leaf in Root.parse(raw).leaves if leaf is not None]
        for leaf in leaves:
            if (raw := self.read(leaf)) is not None:
                chunks += Leaf.parse(raw).chunks()
        for chunk in chunks:
            self.read(chunk)

    def report(self, stated: int, *, lazy: bool) -> Verification:
        """How it went; what hangs below a root or leaf that is not here is counted as `stated` says."""
        count = max(stated, len(self.seen))
        return Verification(
            chunks=count,
            verified=self.verified,
            absent=count - self.verified - len(self.corrupt),
            corrupt=tuple(self.corrupt),
            lazy=lazy,
        )


def verify_image(store: ChunkStore, entry: Entry, progress: Progress) -> Verification:
    """Verify what is in the local store; no server is asked. A corrupt chunk is dropped, so that the next read fetches
    it anew. FormatError."""
    progress.start(f"verifying {entry.ref.chunks} chunks", None)
    check = _Check(store, progress)
    check.block_images(check.image(entry.ref.record))
    return check.report(entry.ref.chunks, lazy=bool(entry.ref.origin))


def verify_snapshot(store: ChunkStore, snapshot: Snapshot, progress: Progress) -> Verification:
    """As `verify_image`, for a snapshot with its image."""
    progress.start(f"verifying {snapshot.label}", None)
    check = _Check(store, progress)
    check.read(snapshot.id)
    check.block_images([*snapshot.record.block_images, *check.image(snapshot.record.image)])
    stated = snapshot.ref.chunks if snapshot.ref is not None else None
    return check.report(stated or 0, lazy=bool(snapshot_origin(store, snapshot)))
