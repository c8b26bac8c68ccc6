"""When a store was last collected, and what that freed: a row in its index, whoever did it."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass

from imaged.chunkstore.index import Index
from imaged.errors import StoreError

_ROW = b"last_collection"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCollection:
    """`ended_at` is in Unix seconds."""

    ended_at: float
    removed_chunks: int
    freed_bytes: int


def note(index: Index, *, removed_chunks: int, freed_bytes: int) -> None:
    """A collection has ended. That it could not be noted, on a full disk for one, does not undo it."""
    row = LastCollection(ended_at=time.time(), removed_chunks=removed_chunks, freed_bytes=freed_bytes)
    try:
        with index.write("note a collection") as txn:
            index.put(txn, "meta", _ROW, json.dumps(asdict(row)).encode())
    except StoreError as error:
        log.warning("that this store was collected is not noted: %s", error.message)


def noted(index: Index) -> LastCollection | None:
    """None when there was none yet, or its row can not be read."""
    raw = index.get("meta", _ROW)
    if raw is None:
        return None
    try:
        found = json.loads(raw)
        return LastCollection(
            ended_at=float(found["ended_at"]),
            removed_chunks=int(found["removed_chunks"]),
            freed_bytes=int(found["freed_bytes"]),
        )
    except (ValueError, LookupError, TypeError) as error:
        log.warning("the row of the last collection can not be read: %s", error)
        return None
