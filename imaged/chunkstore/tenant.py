"""A chunk store as one namespace sees it: its own names, the chunks that it holds, and nothing of anybody else.

The store below keeps each chunk once, whoever has it. What may tell a namespace that others have something is kept
from it, or is the same for what others have and for what nobody has:

- what it does not hold is not here, in reads, in `missing`, and when a record that names it is published;
- what it puts is verified, compressed and appended to a pack also when the store has it already. A collection makes
  one of the two again;
- a chunk that a namespace holds is stored as this server compresses it, which is a function of its bytes: a frame that
  somebody else compressed is replaced. So what comes back is not a sign of who put it;
- layer memos count only for a namespace that holds the memo: who merely claims in an image's configuration that it
  has a layer must bring it;
- startup profiles are each namespace's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from imaged.chunks import ChunkReader
from imaged.chunkstore.lease import Leases, LeaseState
from imaged.chunkstore.refs import MemoTable, ProfileTable, Ref, RefTable
from imaged.chunkstore.snapshotrefs import SnapshotRef, SnapshotTable
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.uses import Uses
from imaged.collection.owned import PROFILES, row_key
from imaged.errors import ChunkError, ChunkMissingError, FormatError, PvisorError
from imaged.frame import CHUNK_LIMIT_BYTES, ZSTD_LEVEL, Frame
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.reach import reachable, reachable_snapshot
from imaged.signature import Signature

log = logging.getLogger(__name__)
_LOOKUP_COUNT = 256
Walk = Callable[[ChunkReader, ChunkId], Iterator[ChunkId]]


class ForeignNameError(PvisorError):
    """A name outside the namespace of whoever wants to use it."""


def require_own(namespace: str | None, name: str, separator: str, what: str) -> str:
    """The name, when somebody of this namespace may give it. ForeignNameError."""
    if namespace is not None and not name.startswith(namespace + separator):
        message = f"this token is for {what} called {namespace}{separator}..., not {name[:200]!r}"
        raise ForeignNameError(message, hint=f"name it {namespace}{separator}{name[:200]}")
    return name


def name_within(namespace: str, name: ImageName) -> ImageName:
    """The name in this namespace: itself, or below it. InvalidNameError when that is too long.

    Only what a name begins with has a port: `HOST:5000/app:v1` becomes `NS/HOST_5000/app:v1`.
    """
    if name.repo.startswith(f"{namespace}/"):
        return name
    return ImageName.parse(f"{namespace}/{name.repo.replace(':', '_')}:{name.tag}")


def tenant_view(store: ChunkStore, namespace: str | None) -> ChunkStore:
    """The store as this namespace sees it; None is no namespace, and sees everything."""
    return store if namespace is None else TenantStore(store, namespace)


class TenantStore(ChunkStore):
    """A view of a store, for one thread at a time. What is not defined here fails: it is not made with `open`.

    Made for each request, which costs next to nothing; the store below is the owner's to close.
    """

    def __init__(self, store: ChunkStore, namespace: str) -> None:
        self.root, self.readonly = store.root, store.readonly
        self.namespace = self._namespace = namespace
        self._store = store
        self._noted: dict[ChunkId, None] = {}
        self.refs = _Refs(self, store.refs)
        self.snapshots = _Snapshots(self, store.snapshots)
        self.memos = _Memos(self, store.memos)
        self.profiles = ProfileTable(store.index, store.require_writable, table=PROFILES, prefix=row_key(namespace))

    def close(self) -> None:
        raise NotImplementedError

    # Reading

    def get(self, chunk: ChunkId) -> bytes:
        if not self.holds(chunk):
            raise ChunkMissingError(chunk)
        return self._store.get(chunk)

    def frame(self, chunk: ChunkId) -> Frame | None:
        return self._store.frame(chunk) if self.holds(chunk) else None

    def frames(self, chunks: Sequence[ChunkId]) -> Iterator[Frame]:
        for start in range(0, len(chunks), _LOOKUP_COUNT):
            wanted = chunks[start : start + _LOOKUP_COUNT]
            held = self._held(wanted)
            found = self._store.frames([chunk for chunk in wanted if chunk in held])
            for chunk in wanted:
                yield next(found) if chunk in held else Frame.missing(chunk)

    def packed_cached(self, chunk: ChunkId) -> bytes | None:
        return self._store.packed_cached(chunk) if self.holds(chunk) else None

    def has(self, chunk: ChunkId) -> bool:
        return self.holds(chunk) and self._store.has(chunk)

    def sizes(self, chunk: ChunkId) -> tuple[int, int] | None:
        return self._store.sizes(chunk) if self.holds(chunk) else None

    def frames_bytes(self, chunks: Sequence[ChunkId]) -> int:
        held = self._held(chunks)
        absent = [chunk for chunk in chunks if chunk not in held]
        present = [chunk for chunk in chunks if chunk in held]
        return self._store.frames_bytes(present) + sum(Frame.missing(chunk).stored_bytes for chunk in absent)

    def prepare(self, chunks: Sequence[ChunkId]) -> int | None:
        return self.frames_bytes(chunks)

    def missing(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that it does not hold, or that may not be relied on."""
        wanted = list(dict.fromkeys(chunks))
        held = self._store.owned.rely(self._namespace, wanted).union(self._noted)
        lacking = set(self._store.missing(chunk for chunk in wanted if chunk in held))
        return [chunk for chunk in wanted if chunk not in held or chunk in lacking]

    def absent(self, chunks: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that it does not hold, or that can not be read."""
        wanted = list(dict.fromkeys(chunks))
        held = self._held(wanted)
        lacking = set(self._store.absent(chunk for chunk in wanted if chunk in held))
        return [chunk for chunk in wanted if chunk not in held or chunk in lacking]

    def holds(self, chunk: ChunkId) -> bool:
        """Whether the namespace may know that there is such a chunk."""
        return chunk in self._noted or self._store.owned.has(self._namespace, chunk)

    def _held(self, chunks: Iterable[ChunkId]) -> set[ChunkId]:
        chunks = list(chunks)
        return self._store.owned.held(self._namespace, chunks).union(chunk for chunk in chunks if chunk in self._noted)

    # Writing

    def put(self, data: bytes, *, level: int = ZSTD_LEVEL, anew: bool = False) -> ChunkId:
        """The same whatever `level` is asked for: what the chunk is for must not show."""
        if not 0 < len(data) <= CHUNK_LIMIT_BYTES:
            raise FormatError("chunk", expected=f"1 to {CHUNK_LIMIT_BYTES} bytes", found=f"{len(data)}")
        chunk = ChunkId.of(data)
        if anew or self.missing([chunk]):
            self._store.put(data, anew=True)
            self._noted[chunk] = None
        return chunk

    def put_all(self, pieces: Sequence[bytes], *, level: int = ZSTD_LEVEL) -> list[ChunkId]:
        return [self.put(data, level=level) for data in pieces]

    def put_frame(self, frame: Frame, *, anew: bool = False) -> None:
        data = frame.open()
        if not data:
            raise FormatError("chunk", expected=f"1 to {CHUNK_LIMIT_BYTES} bytes", found="0")
        if anew or self.missing([frame.id]):
            self._store.put_frame(Frame.of(data, chunk=frame.id), anew=True)
            self._noted[frame.id] = None

    def flush(self) -> None:
        """Chunks first: a row never stands for bytes that are not here."""
        self._store.flush()
        noted, self._noted = self._noted, {}
        if noted:
            self._store.owned.add(self._namespace, noted)

    # Names

    def adopt(self, record: ChunkId, walk: Walk) -> None:
        """Hold everything of what has a name of this namespace. Its own tokens name only what it holds; this is for
        what somebody without a namespace published for it."""
        owned = self._store.owned
        if self.readonly or owned.is_whole(self._namespace, record):
            return
        try:
            owned.add(self._namespace, list(walk(self._store, record)), whole=record)
        except (ChunkError, FormatError) as error:
            log.error("%s of namespace %s: %s", record, self.namespace, error.message)

    def hold_whole(self, record: ChunkId) -> None:
        """Everything of this record is known to be held."""
        self.flush()
        self._store.owned.add(self._namespace, (), whole=record)

    # Of the store below: neither shows or reads anything

    @property
    def leases(self) -> Leases:  # type: ignore[override]
        return self._store.leases

    @property
    def uses(self) -> Uses:  # type: ignore[override]
        return self._store.uses

    def relying(self, lease: str | None, *, namespace: str | None = None) -> AbstractContextManager[LeaseState | None]:
        return self._store.relying(lease, namespace=self._namespace)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a view of a store has no {name!r}")


class _Refs(RefTable):
    """Names of images that begin with `NS/`."""

    def __init__(self, view: TenantStore, below: RefTable) -> None:
        self._view, self._below = view, below
        self._prefix = f"{view.namespace}/"

    def get(self, name: str) -> Ref | None:
        found = self._below.get(name) if name.startswith(self._prefix) else None
        if found is not None:
            self._view.adopt(found.record, reachable)
        return found

    def items(self, prefix: str = "") -> list[tuple[str, Ref]]:
        found = [one for one in self._below.items(self._prefix) if one[0].startswith(prefix)]
        for _, ref in found:
            self._view.adopt(ref.record, reachable)
        return found

    def set(self, name: str, row: Ref) -> None:
        """The caller has seen, through this view, that all of it is here."""
        require_own(self._view.namespace, name, "/", "images")
        self._view.hold_whole(row.record)
        self._below.set(name, row)

    def sign(self, name: str, record: ChunkId, signatures: Sequence[Signature]) -> Ref | None:
        return self._below.sign(require_own(self._view.namespace, name, "/", "images"), record, signatures)

    def delete(self, name: str) -> bool:
        return name.startswith(self._prefix) and self._below.delete(name)


class _Snapshots(SnapshotTable):
    """Names of snapshots that begin with `NS.`: they have no slashes, and a namespace has no dot."""

    def __init__(self, view: TenantStore, below: SnapshotTable) -> None:
        self._view, self._below = view, below
        self._prefix = f"{view.namespace}."

    def get(self, name: str) -> SnapshotRef | None:
        found = self._below.get(name) if name.startswith(self._prefix) else None
        if found is not None:
            self._view.adopt(found.record, reachable_snapshot)
        return found

    def items(self, prefix: str = "") -> list[tuple[str, SnapshotRef]]:
        found = [one for one in self._below.items(self._prefix) if one[0].startswith(prefix)]
        for _, ref in found:
            self._view.adopt(ref.record, reachable_snapshot)
        return found

    def set(self, name: str, row: SnapshotRef) -> None:
        require_own(self._view.namespace, name, ".", "snapshots")
        self._view.hold_whole(row.record)
        self._below.set(name, row)

    def replace(self, name: str, row: SnapshotRef, *, over: ChunkId | None) -> bool:
        require_own(self._view.namespace, name, ".", "snapshots")
        self._view.hold_whole(row.record)
        return self._below.replace(name, row, over=over)

    def delete(self, name: str) -> bool:
        return name.startswith(self._prefix) and self._below.delete(name)


class _Memos(MemoTable):
    """Memos of layers that the namespace has converted itself. The rows are everybody's: a memo is made only from a
    layer that matches its diff_id."""

    def __init__(self, view: TenantStore, below: MemoTable) -> None:
        self._view, self._below = view, below

    def get(self, diff_id: str) -> ChunkId | None:
        found = self._below.get(diff_id)
        return found if found is not None and self._view.holds(found) else None

    def set(self, diff_id: str, blob: ChunkId) -> None:
        self._view.flush()
        self._below.set(diff_id, blob)
