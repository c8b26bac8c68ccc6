"""Snapshots in a store, made without a virtual machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.chunks import ChunkWriter
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.record import ImageRecord
from imaged.snapshot import Machine, SnapshotRecord
from tests.support.store_images import block_bytes, noise

PIECE_BYTES = 4 * BLOCK_BYTES
MACHINE = Machine(
    qemu="7.2.22 (Debian 1:7.2+dfsg-7)",
    machine="pc-q35-7.2",
    accelerator="tcg",
    cpu="qemu64",
    cpus=1,
    memory_bytes=0,
    network="none",
    firmware="ab" * 32,
    kernel="6.1.0-40-cloud-amd64",
)


def build_disk(store: ChunkWriter, seeds: Sequence[int | None]) -> ChunkId:
    """A block image with 16 KiB for each seed, a hole for None."""
    builder = BlockImageBuilder(store)
    for seed in seeds:
        builder.append(Extent(4, None if seed is None else store.put(block_bytes(seed))))
    return builder.finish()


def disk_bytes(seeds: Sequence[int | None]) -> bytes:
    """What `build_disk` put."""
    return b"".join(bytes(PIECE_BYTES) if seed is None else block_bytes(seed) for seed in seeds)


def build_snapshot(
    store: ChunkWriter,
    image: ImageRecord,
    memory: Sequence[int | None],
    *,
    disk: Sequence[int | None] | None = None,
    parent: ChunkId | None = None,
    created_ns: int = 1_700_000_000_000_000_000,
    vm: str = "box",
) -> SnapshotRecord:
    """The record of a machine with this memory, whose chunks are all in the store, but for the record itself."""
    return SnapshotRecord(
        image=image.id,
        memory=build_disk(store, memory),
        disk=None if disk is None else build_disk(store, disk),
        disk_bytes=0 if disk is None else len(disk) * PIECE_BYTES,
        state=write_blob(store, noise(30_000, seed=created_ns % 1000)),
        machine=replace(MACHINE, memory_bytes=len(memory) * PIECE_BYTES),
        parent=parent,
        created_ns=created_ns,
        vm=vm,
        dirty_bytes=len(memory) * PIECE_BYTES,
    )
