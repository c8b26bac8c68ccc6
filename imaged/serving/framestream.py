"""Frames down one answer, a group at a time: the next is looked up or read while one is sent, and no further ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from imaged.chunkstore.packranges import PackPlanner, PackRanges
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId
from imaged.serving.access import grant
from imaged.serving.blocking import Blocking
from imaged.serving.chunkprotocol import ChunkProtocol

READ_GROUP = 16
"""Frames read in one go: at 64 KiB, a megabyte waits for a client that reads slowly, and one more is read ahead."""
_RANGE_GROUP = 256
"""Frames looked up in one go, when the kernel sends them from the packs: nothing of them is in our memory."""


class FrameStream:
    """The frames of a store, for answers of one event loop."""

    def __init__(self, store: ChunkStore, blocking: Blocking) -> None:
        self._planner, self._blocking = store.planner(), blocking

    async def send(
        self, request: web.Request, response: web.StreamResponse, store: ChunkStore, chunks: Sequence[ChunkId]
    ) -> int:
        """How many bytes were sent of a prepared answer's body. `store` is what the client may see.

        ChunkError and StoreError from reading; ConnectionError.
        """
        protocol = _range_sender(request)
        plain = store.namespace is None and response.content_length is not None
        planner = self._planner if protocol is not None and plain else None
        size = READ_GROUP if planner is None else _RANGE_GROUP
        groups = [chunks[start : start + size] for start in range(0, len(chunks), size)]
        sent = 0
        following = asyncio.ensure_future(self._blocking.run(_group, store, planner, groups[0]))
        try:
            for number, group in enumerate(groups):
                part = await following
                if number + 1 < len(groups):
                    following = asyncio.ensure_future(self._blocking.run(_group, store, planner, groups[number + 1]))
                if isinstance(part, PackRanges) and protocol is not None:
                    await _flush(request, response)
                    await protocol.send_ranges(part)
                    sent += part.byte_count
                elif isinstance(part, bytes):
                    await response.write(part)
                    sent += len(part)
                else:
                    sent += await self._read(response, store, group)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return sent

    async def _read(self, response: web.StreamResponse, store: ChunkStore, chunks: Sequence[ChunkId]) -> int:
        """For a group of which something is not simply there."""
        sent = 0
        for at in range(0, len(chunks), READ_GROUP):
            body = await self._blocking.run(packed, store, chunks[at : at + READ_GROUP])
            await response.write(body)
            sent += len(body)
        return sent


def _range_sender(request: web.Request) -> ChunkProtocol | None:
    """The connection, when parts of packs may go down it as they lie there."""
    protocol = request.protocol
    if not isinstance(protocol, ChunkProtocol) or not protocol.sends_ranges or request.method == "HEAD":
        return None
    return protocol if grant(request).namespace is None else None


async def _flush(request: web.Request, response: web.StreamResponse) -> None:
    """The head of an answer, which aiohttp keeps to send it with the first part of a body."""
    writer = await response.prepare(request)
    assert writer is not None
    writer.send_headers()


def _group(store: ChunkStore, planner: PackPlanner | None, chunks: Sequence[ChunkId]) -> PackRanges | bytes | None:
    """Where the frames lie, or without a planner the frames; None when they do not simply lie there."""
    if planner is None:
        return packed(store, chunks)
    plan = planner.plan(chunks, wait=True)
    if plan is not None:
        store.uses.touch(chunks)
    return plan


def packed(store: ChunkStore, chunks: Sequence[ChunkId]) -> bytes:
    """The frames of these chunks, one after another."""
    parts: list[bytes] = []
    found: list[ChunkId] = []
    for frame in store.frames(chunks):
        parts += (frame.header.pack(), frame.payload)
        if frame.payload:
            found.append(frame.id)
    store.uses.touch(found)
    return b"".join(parts)
