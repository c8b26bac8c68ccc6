"""An image made of random files without an OCI source: enough for what only moves chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.extent import Extent
from imaged.ids import ChunkId
from imaged.record import ImageRecord


@dataclass(frozen=True, slots=True)
class Synthetic:
    id: ChunkId
    record: ImageRecord
    metadata: bytes
    data: bytes


def add_image(store: ChunkStore, name: str, *, seed: int = 1, chunks: int = 40, chunk_bytes: int = 65536) -> Synthetic:
    """Put an image into the store under `name`."""
    source = random.Random(seed)
    metadata = source.randbytes(300_000)
    builder = BlockImageBuilder(store)
    parts = []
    for _ in range(chunks):
        part = source.randbytes(chunk_bytes // 2) * 2
        parts.append(part)
        builder.append(Extent(len(part) // 4096, store.put(part)))
    data = b"".join(parts)
    record = ImageRecord(
        metadata=write_blob(store, metadata),
        metadata_bytes=len(metadata),
        data=builder.finish(),
        data_bytes=len(data),
        entries=chunks,
        platform="linux/amd64",
        config={"Cmd": ["sh"], "Env": ["NAME=ünïcode"]},
    )
    image = store.put(record.to_bytes())
    ref = Ref(record=image, created_at=1, source="synthetic", origin="", chunks=chunks, stored_bytes=len(data) // 2)
    store.refs.set(name, ref)
    return Synthetic(image, record, metadata, data)
