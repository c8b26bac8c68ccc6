from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.s3 import bucket
from imaged.s3.address import BucketAddress
from imaged.s3.mirror import make_mirror
from imaged.s3.store import MirrorStore
from tests.support.memory_objects import MemoryObjects

Open = Callable[[str], MirrorStore]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    """A bucket in memory, which stores of this test then are mirrors of. They look at it only when they are told to."""
    made = MemoryObjects(conditional=False)
    monkeypatch.setattr(bucket, "connect", lambda address, patience: made)
    for name, value in {"POLL_S": "3600", "SETTLE_S": "0", "WAIT_S": "0", "LEASE_S": "3600"}.items():
        monkeypatch.setenv(f"PVISOR_S3_{name}", value)
    return made


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: these tests make many small durable changes, and are not about the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="pvisor-s3-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def server(objects: MemoryObjects, tmp_path: Path) -> Iterator[Open]:
    """Opens the store of one server, by its name."""
    with ExitStack() as stack:

        def opened(name: str) -> MirrorStore:
            make_mirror(tmp_path / name, BucketAddress("images", "p"))
            store = stack.enter_context(ChunkStore.open(tmp_path / name))
            assert isinstance(store, MirrorStore)
            return store

        yield opened
