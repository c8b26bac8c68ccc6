"""What a collection is about to remove from a bucket, as the object gc/NAME.condemned; see docs/s3.md.

    one line of JSON    version, packs: ids of the packs that are to go, counts of chunks and copies
    then                ids of the dead chunks, 32 bytes each; and copies: chunks of 32 bytes that lie in one of these
                        packs and in another one, whose id of 26 bytes follows

A chunk is condemned where it lies: the same chunk in a pack that is not listed is not.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import NamedTuple

from imaged.errors import FormatError
from imaged.ids import ChunkId

LISTS = "gc/"
SUFFIX = ".condemned"
_VERSION = 1
_PACK_ID_BYTES = 26
_PAIR_BYTES = ChunkId.SIZE_BYTES + _PACK_ID_BYTES


class Copy(NamedTuple):
    """A chunk of a listed pack that another pack has, too."""

    chunk: ChunkId
    other: str


class CondemnedList(NamedTuple):
    """`chunks` are dead, wherever in `packs` they lie; of `copies` only the one in `packs` goes."""

    packs: tuple[str, ...]
    chunks: tuple[ChunkId, ...]
    copies: tuple[Copy, ...]


def new_key() -> str:
    return f"{LISTS}{int(time.time()):010x}{secrets.token_hex(8)}{SUFFIX}"


def pack(listed: CondemnedList) -> bytes:
    head = {"version": _VERSION, "packs": listed.packs, "chunks": len(listed.chunks), "copies": len(listed.copies)}
    pairs = [copy.chunk + copy.other.encode() for copy in listed.copies]
    return b"".join([json.dumps(head).encode(), b"\n", *listed.chunks, *pairs])


def parse(raw: bytes) -> CondemnedList:
    """FormatError."""
    line, _, body = raw.partition(b"\n")
    try:
        head = json.loads(line)
        version, packs = head["version"], tuple(str(one) for one in head["packs"])
        chunk_count, copy_count = int(head["chunks"]), int(head["copies"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise FormatError("condemned list", expected="a line of JSON", found=str(error)[:80]) from error
    if version != _VERSION or any(len(one) != _PACK_ID_BYTES for one in packs):
        raise FormatError("condemned list", expected=f"version {_VERSION} and ids of packs", found=repr(line)[:80])
    split = chunk_count * ChunkId.SIZE_BYTES
    if chunk_count < 0 or copy_count < 0 or len(body) != split + copy_count * _PAIR_BYTES:
        raise FormatError("condemned list", expected=f"{chunk_count} and {copy_count} ids", found=f"{len(body)} bytes")
    size = ChunkId.SIZE_BYTES
    chunks = tuple(ChunkId(body[at : at + size]) for at in range(0, split, size))
    copies = tuple(
        Copy(ChunkId(body[at : at + size]), body[at + size : at + _PAIR_BYTES].decode("ascii", "replace"))
        for at in range(split, len(body), _PAIR_BYTES)
    )
    return CondemnedList(packs, chunks, copies)
