"""Recorded runs that a server should still be told of, kept in the store until it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from imaged.chunkstore.index import Index
from imaged.ids import ChunkId
from imaged.profile import ENTRY_LIMIT

log = logging.getLogger(__name__)


class Offer(NamedTuple):
    """What runs of an image touched, in order of first touch."""

    image: ChunkId
    touched: list[ChunkId]


class OfferTable:
    """Block image id -> one offer. Only a courtesy to other hosts: any row may go at any time."""

    def __init__(self, index: Index, check_writable: Callable[[], None]) -> None:
        self._index, self._check_writable = index, check_writable

    def get(self, block_image: ChunkId) -> Offer | None:
        raw = self._index.get("offers", block_image)
        if raw is None:
            return None
        if not raw or len(raw) % ChunkId.SIZE_BYTES:
            log.warning("offer of %s: %d bytes are no ids", block_image, len(raw))
            return None
        ids = ChunkId.several(raw)
        return Offer(ids[0], ids[1:])

    def ids(self) -> list[ChunkId]:
        """The block images that have one."""
        return [ChunkId(key) for key, _ in self._index.rows("offers")]

    def add(self, block_image: ChunkId, image: ChunkId, touched: Sequence[ChunkId]) -> None:
        """Keep a run, after those that are kept already, as far as there is room."""
        held = self.get(block_image)
        ids = list(dict.fromkeys([*(held.touched if held is not None else ()), *touched]))[:ENTRY_LIMIT]
        self._check_writable()
        with self._index.write("keep an offer") as txn:
            self._index.put(txn, "offers", block_image, b"".join([image, *ids]))

    def delete(self, block_image: ChunkId) -> bool:
        self._check_writable()
        with self._index.write("forget an offer") as txn:
            return self._index.delete(txn, "offers", block_image)
