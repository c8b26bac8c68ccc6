"""ChunkStore against a dict: any order of puts, flushes, damage, collections, rebuilds and reopenings."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from imaged.chunkstore.fsck import check
from imaged.chunkstore.pack import pack_path
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import ChunkCorruptError, ChunkMissingError
from imaged.frame import HEADER_BYTES, Codec, Frame
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.record import ImageRecord
from tests.support.store_images import build_image, name_image, noise

SEEDS = st.integers(0, 30)


def data_of(seed: int) -> bytes:
    """Different lengths, some of them compressible."""
    return noise(1 + seed * 97, seed) + bytes(seed % 3 * 5000)


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one directory. `model` is what must be readable, `damaged` what must fail before it is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pvisor-store-"))
        self.model: dict[ChunkId, bytes] = {}
        self.damaged: set[ChunkId] = set()
        self.images: dict[str, ImageRecord] = {}
        self.stores: list[ChunkStore] = []

    @initialize()
    def open(self) -> None:
        self.stores = [ChunkStore.open(self.root), ChunkStore.open(self.root)]

    def teardown(self) -> None:
        self._close()
        shutil.rmtree(self.root)

    def _close(self) -> None:
        for store in self.stores:
            store.close()
        self.stores = []

    def _flush(self) -> None:
        for store in self.stores:
            store.flush()

    def _put_is_known(self, chunk: ChunkId) -> bool:
        """A damaged chunk that nobody has read yet hides a new put of it."""
        return chunk not in self.damaged

    @rule(seed=SEEDS, which=st.integers(0, 1))
    def put(self, seed: int, which: int) -> None:
        chunk = self.stores[which].put(data_of(seed))
        if self._put_is_known(chunk):
            self.model[chunk] = data_of(seed)
            assert self.stores[which].get(chunk) == data_of(seed)

    @rule(seed=SEEDS, which=st.integers(0, 1))
    def put_frame(self, seed: int, which: int) -> None:
        frame = Frame.of(data_of(seed), level=1)
        self.stores[which].put_frame(frame)
        if self._put_is_known(frame.id):
            self.model[frame.id] = data_of(seed)

    @rule(which=st.integers(0, 1))
    def flush_one(self, which: int) -> None:
        self.stores[which].flush()

    @rule(name=st.sampled_from(["a:1", "b:1"]), first=st.integers(0, 5), count=st.integers(1, 5))
    def convert(self, name: str, first: int, count: int) -> None:
        self._flush()
        for chunk in sorted(self.damaged):
            # Unnoticed damage would go into the image: put trusts what the index says is there.
            with pytest.raises(ChunkCorruptError):
                self.stores[0].get(chunk)
        self.damaged.clear()
        record = build_image(self.stores[0], range(first, first + count))
        name_image(self.stores[0], name, record)
        self.images[name] = record
        for chunk in reachable(self.stores[0], record.id):
            self.model.setdefault(chunk, self.stores[0].get(chunk))

    @rule(name=st.sampled_from(["a:1", "b:1"]))
    def remove(self, name: str) -> None:
        assert self.stores[1].refs.delete(name) == (self.images.pop(name, None) is not None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Flip a payload bit of a chunk that no image needs."""
        self._flush()
        needed = {chunk for record in self.images.values() for chunk in reachable(self.stores[0], record.id)}
        free = sorted(self.model.keys() - needed)
        if not free:
            return
        chunk = data.draw(st.sampled_from(free))
        location = self.stores[0].index.find(chunk)
        assert location is not None
        with pack_path(self.root, location.pack).open("r+b") as file:
            file.seek(location.offset + HEADER_BYTES)
            byte = file.read(1)
            file.seek(location.offset + HEADER_BYTES)
            file.write(bytes([byte[0] ^ 1]))
        del self.model[chunk]
        self.damaged.add(chunk)

    @precondition(lambda self: self.damaged)
    @rule(data=st.data(), which=st.integers(0, 1))
    def read_damaged(self, data: st.DataObject, which: int) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.damaged)))
        with pytest.raises(ChunkCorruptError):
            self.stores[which].get(chunk)
        self.damaged.discard(chunk)
        with pytest.raises(ChunkMissingError):
            self.stores[which].get(chunk)

    @rule()
    def reopen(self) -> None:
        self._close()
        self.open()

    @rule()
    def collect_garbage(self) -> None:
        self._close()
        report = collect(self.root)
        self.open()
        kept = {chunk for record in self.images.values() for chunk in reachable(self.stores[0], record.id)}
        assert report.kept_chunks == len(kept)
        self.model = {chunk: data for chunk, data in self.model.items() if chunk in kept}
        self.damaged.clear()

    @rule()
    def rebuild(self) -> None:
        # It may find again what a collection or a drop had only taken out of the index, so the model grows.
        self._close()
        check(self.root, rebuild=True)
        self.open()
        self.damaged.clear()
        for chunk, _ in self.stores[0].index.chunks():
            self.model.setdefault(chunk, self.stores[0].get(chunk))

    @invariant()
    def everything_is_there(self) -> None:
        if not self.stores:
            return
        self._flush()
        for store in self.stores:
            frames = store.frames(list(self.model))
            assert [frame.open() for frame in frames] == list(self.model.values())
        present = {chunk for chunk, _ in self.stores[0].index.chunks()}
        assert present == self.model.keys() | self.damaged
        usage = self.stores[0].df()
        assert usage.chunks == len(present)
        absent = [ChunkId.of(data_of(seed)) for seed in range(31) if ChunkId.of(data_of(seed)) not in present]
        assert self.stores[1].missing(absent) == absent
        assert all(frame.header.codec is Codec.MISSING for frame in self.stores[1].frames(absent))
        sizes = [self.stores[0].sizes(chunk) for chunk in present]
        assert usage.logical_bytes == sum(size[0] for size in sizes if size)
        assert usage.stored_bytes == sum(size[1] for size in sizes if size)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
