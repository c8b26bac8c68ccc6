"""How large something is that hangs below a record, when all of it is in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from imaged.chunks import ChunkReader
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkError, PvisorError
from imaged.ids import ChunkId


class IncompleteError(PvisorError):
    """An image or snapshot of which chunks are not in the store."""


class Measured(NamedTuple):
    """Different chunks, and the bytes of their frames."""

    chunks: int
    stored_bytes: int


def measure(
    store: ChunkStore, what: str, record: ChunkId, walk: Callable[[ChunkReader, ChunkId], Iterator[ChunkId]]
) -> Measured:
    """Of what `walk` (`imaged.reach`) finds below this record, for who holds a lease and goes to name it.

    IncompleteError when a chunk is damaged, or missing as `ChunkStore.missing` says. FormatError when the record is
    none of what `walk` walks.
    """
    hint = "upload the missing chunks first: POST /v1/chunks/missing says which"
    try:
        chunks = list(walk(store, record))
    except ChunkError as error:
        raise IncompleteError(f"{what} {record} is not complete: {error.message}", hint=hint) from error
    sizes = [store.sizes(chunk) for chunk in chunks]
    missing = store.missing(chunks)
    if missing:
        raise IncompleteError(f"{len(missing)} of {len(chunks)} chunks of {what} {record} are missing", hint=hint)
    return Measured(len(sizes), sum(size[1] for size in sizes if size is not None))
