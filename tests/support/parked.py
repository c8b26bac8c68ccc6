"""Snapshots without a virtual machine: memory of known bytes, for what only moves and maps them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from imaged.blockbuilder import write_blob
from imaged.chunkstore.pack import pack_path
from imaged.chunkstore.store import ChunkStore
from imaged.derive import derive
from imaged.frame import HEADER_BYTES
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.snapshot import Machine, SnapshotRecord
from imaged.snapshots import publish

MACHINE = Machine(
    qemu="7.2.22",
    machine="pc-q35-7.2",
    accelerator="tcg",
    cpu="max",
    cpus=1,
    memory_bytes=16 << 20,
    network="none",
    firmware="ab" * 32,
    kernel="6.1.0",
)


def opened_snapshot(directory: Path) -> Any:
    """As a node daemon gives one to who resumes it; its files are this directory, which QEMU never sees."""
    image = SimpleNamespace(id="ab" * 32, name="web", config={}, metadata_path=directory, data_path=directory)
    return SimpleNamespace(
        id="0" * 64,
        name="web",
        record=SimpleNamespace(machine=MACHINE, disk_bytes=0),
        image=image,
        memory_path=directory,
        disk_path=None,
        state_path=directory,
    )


@dataclass(frozen=True, slots=True)
class Parked:
    """A snapshot, and the bytes of its memory, device state and disk."""

    id: ChunkId
    record: SnapshotRecord
    memory: bytes
    state: bytes


def memory_bytes(seed: int, size_bytes: int = 16 << 20) -> bytes:
    """Memory of which every other 128 KiB were never touched, and the others are different everywhere."""
    source = random.Random(seed)
    cell = 128 << 10
    return b"".join(
        source.randbytes(cell // 2) + source.randbytes(cell // 2) if number % 2 else bytes(cell)
        for number in range(size_bytes // cell)
    )


def add_snapshot(
    store: ChunkStore,
    name: str | None,
    image: ChunkId,
    *,
    memory: bytes | None = None,
    parent: Parked | None = None,
    seed: int = 1,
    disk: bytes | None = None,
) -> Parked:
    """Put a snapshot into the store, with what its machine has changed since `parent`."""
    held = memory_bytes(seed) if memory is None else memory
    before = bytes(len(held)) if parent is None else parent.memory
    pages = range(0, len(held), BLOCK_BYTES)
    changes = [
        (at, held[at : at + BLOCK_BYTES])
        for at in pages
        if held[at : at + BLOCK_BYTES] != before[at : at + BLOCK_BYTES]
    ]
    state = random.Random(seed).randbytes(40_000)
    record = SnapshotRecord(
        image=image,
        memory=derive(store, None if parent is None else parent.record.memory, len(held), changes),
        disk=None if disk is None else write_blob(store, disk),
        disk_bytes=0 if disk is None else len(disk),
        state=write_blob(store, state),
        machine=replace(MACHINE, memory_bytes=len(held)),
        parent=None if parent is None else parent.id,
        created_ns=seed,
        vm="web",
        dirty_bytes=len(changes) * BLOCK_BYTES,
    )
    return Parked(publish(store, name, record), record, held, state)


def lose(store: ChunkStore, chunk: ChunkId) -> None:
    """As if it had never been stored."""
    location = store.index.find(chunk)
    assert location is not None
    store.index.drop([(chunk, location)], forget_memos=False)


def damage(store: ChunkStore, chunk: ChunkId) -> None:
    """Flip a bit of its payload on the disk."""
    store.flush()
    location = store.index.find(chunk)
    assert location is not None
    with open(pack_path(store.root, location.pack), "r+b") as pack:
        at = location.offset + HEADER_BYTES + location.payload_bytes // 2
        pack.seek(at)
        (byte,) = pack.read(1)
        pack.seek(at)
        pack.write(bytes([byte ^ 0x40]))
