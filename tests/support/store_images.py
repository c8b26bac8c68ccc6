"""Small whole images in a store, made without a conversion: for tests of what walks, collects and checks them."""

from __future__ import annotations

from blake3 import blake3

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.chunks import ChunkWriter
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.conversion.layer import Layer, LayerEntry, NodeEntry
from imaged.erofs.tree import Inode
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.record import ImageRecord

DIFF_ID = "sha256:" + "0" * 64


def block_bytes(seed: int) -> bytes:
    """A chunk of 16 KiB that is different for each seed and compresses to about half."""
    return b"".join(ChunkId.of(b"%d %d" % (seed, number)) + bytes(32) for number in range(4 * BLOCK_BYTES // 64))


def noise(length: int, seed: int = 0) -> bytes:
    """Bytes that do not compress."""
    return blake3(b"noise %d" % seed).digest(length)


def build_image(store: ChunkWriter, seeds: range, *, layers: tuple[str, ...] = ()) -> ImageRecord:
    """An image with one data chunk for each seed, a metadata blob, and a durable record chunk."""
    builder = BlockImageBuilder(store)
    for seed in seeds:
        builder.append(Extent(4, store.put(block_bytes(seed))))
    data = builder.finish()
    metadata = write_blob(store, b"metadata of " + repr(seeds).encode() * 100)
    record = ImageRecord(
        metadata=metadata,
        metadata_bytes=4096,
        data=data,
        data_bytes=len(seeds) * 4 * BLOCK_BYTES,
        entries=len(seeds),
        platform="linux/amd64",
        layers=layers,
    )
    store.put(record.to_bytes())
    store.flush()
    return record


def build_layer(store: ChunkWriter, seeds: range) -> ChunkId:
    """The memo of a layer with one file for each seed."""
    entries: list[LayerEntry] = []
    for seed in seeds:
        inode = Inode(0o100644, size_bytes=4 * BLOCK_BYTES, extents=[Extent(4, store.put(block_bytes(seed)))])
        entries.append(NodeEntry(b"file%d" % seed, inode))
    return write_blob(store, Layer(entries).to_bytes())


def name_image(store: ChunkStore, name: str, record: ImageRecord, *, origin: str = "") -> Ref:
    """Give the image a name."""
    ref = Ref(record=record.id, created_at=1, source="test", origin=origin, chunks=1, stored_bytes=1)
    store.refs.set(name, ref)
    return ref
