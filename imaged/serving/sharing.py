"""How much of each image and snapshot of a store no other has: all at once, in a process of its own.

    python -m imaged.serving.sharing --store DIR [--namespace NS]

Prints {id: bytes}. A store may have millions of chunks: to count them takes seconds of a core and a hundred bytes for
each, which a server that answers meanwhile has better uses for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from imaged.blockformat import Leaf, Root
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.tenant import tenant_view
from imaged.errors import ChunkError, FormatError, PvisorError
from imaged.ids import ChunkId
from imaged.record import ImageRecord
from imaged.slices import slices
from imaged.snapshot import SnapshotRecord

_SEVERAL = -1
_NICE = 10
_AT_ONCE = 4096


def own_bytes(store: ChunkStore) -> dict[ChunkId, int]:
    """Of each named image and snapshot, the stored bytes that go when its names go: of chunks no other one has.

    A snapshot has the chunks of its image. What can not be read counts for nobody.
    """
    owners = _owners(store)
    holders: dict[ChunkId, int] = {}
    leaves: set[ChunkId] = set()
    for number, owner in enumerate(owners):
        try:
            for root in _roots(store, owner, holders, number):
                _note(holders, root, number)
                below = {leaf for leaf in Root.parse(store.get(root)).leaves if leaf is not None}
                leaves |= below
                for leaf in below:
                    _note(holders, leaf, number)
        except (ChunkError, FormatError):
            continue
    for leaf in leaves:
        try:
            chunks = Leaf.parse(store.get(leaf)).chunks()
        except (ChunkError, FormatError):
            continue
        for chunk in chunks:
            _note(holders, chunk, holders[leaf])
    own = [0] * len(owners)
    alone = ((chunk, number) for chunk, number in holders.items() if number != _SEVERAL)
    for part in slices(alone, _AT_ONCE):
        for (_, number), stored_bytes in zip(part, _sizes(store, [chunk for chunk, _ in part]), strict=True):
            own[number] += stored_bytes
    return dict(zip(owners, own, strict=True))


def _owners(store: ChunkStore) -> list[ChunkId]:
    """Each image and snapshot that has a name, once."""
    images, snapshots = store.refs.items(), store.snapshots.items()
    return list(dict.fromkeys([*(ref.record for _, ref in images), *(ref.record for _, ref in snapshots)]))


def _roots(store: ChunkStore, owner: ChunkId, holders: dict[ChunkId, int], number: int) -> Iterator[ChunkId]:
    """The block images below a record, which is noted itself."""
    _note(holders, owner, number)
    raw = store.get(owner)
    try:
        snapshot = SnapshotRecord.parse(raw)
    except FormatError:
        image = ImageRecord.parse(raw)
    else:
        yield from snapshot.block_images
        _note(holders, snapshot.image, number)
        image = ImageRecord.parse(store.get(snapshot.image))
    yield from (image.metadata, image.data)


def _note(holders: dict[ChunkId, int], chunk: ChunkId, number: int) -> None:
    holders[chunk] = number if holders.get(chunk, number) == number else _SEVERAL


def _sizes(store: ChunkStore, chunks: list[ChunkId]) -> Iterable[int]:
    found = (store.sizes(chunk) for chunk in chunks)
    return (0 if size is None else size[1] for size in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="imaged.serving.sharing")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--namespace")
    options = parser.parse_args()
    os.nice(_NICE)
    try:
        with ChunkStore.open(options.store, readonly=True) as store:
            found = own_bytes(tenant_view(store, options.namespace))
    except PvisorError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    json.dump({str(owner): stored_bytes for owner, stored_bytes in found.items()}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
