"""From layer tars to a tree in memory."""

from __future__ import annotations

import io

from imaged.conversion.apply import Tree
from imaged.conversion.cutter import Cutter
from imaged.conversion.ingest import read_layer
from imaged.conversion.layer import Layer
from imaged.erofs.tree import Inode
from tests.support.memory_store import MemoryStore
from tests.support.trees import content as read_content


def ingest(tar: bytes, store: MemoryStore) -> Layer:
    """One layer tar as a Layer whose data is in the store."""
    return read_layer(io.BytesIO(tar), Cutter(store), name="test")


def build(*layers: bytes, store: MemoryStore | None = None) -> Inode:
    """The root of the tree that these layer tars make; every layer goes through its memo as well."""
    store = store or MemoryStore()
    tree = Tree()
    for tar in layers:
        layer = ingest(tar, store)
        parsed = Layer.parse(layer.to_bytes())
        assert parsed.to_bytes() == layer.to_bytes()
        tree.apply(parsed, name="test")
    return tree.root


def content(inode: Inode, store: MemoryStore) -> bytes:
    """The bytes of a regular file."""
    return read_content(store, inode)
