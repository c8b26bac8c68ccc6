"""How much of a file system the cache leaves free."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.errors import StoreFullError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.room import Room, floor_bytes
from imaged.frame import Frame

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
MIB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_the_floor_follows_the_size() -> None:
    assert [floor_bytes(size) // MIB for size in (MIB, 100 * MIB, 1000 * MIB, 1 << 40)] == [16, 16, 50, 1024]


def test_what_is_cached_stays_above_the_floor(small: Path) -> None:
    room = Room(small)
    with pytest.raises(StoreFullError, match="nearly full") as failure:
        for number in range(20):
            room.take(MIB)
            (small / f"{number}").write_bytes(bytes(MIB))
    assert "store gc" in failure.value.hint
    assert len(list(small.iterdir())) == 4


def test_what_an_image_needs_is_stored_all_the_same(small: Path) -> None:
    (small / "others").write_bytes(bytes(10 * MIB))
    with ChunkStore.open(small / "store") as store:
        fetcher = Fetcher(store)
        cached, needed = Frame.of(b"cached" * 1000), Frame.of(b"needed" * 1000)
        fetcher.deliver(cached, cached.open())
        fetcher.admit(needed, Tally())
        fetcher.drain()
        assert (store.has(cached.id), store.has(needed.id)) == (False, True)
        assert fetcher.keeper.dropped == 1
        with pytest.raises(StoreFullError):
            fetcher.stow(cached, cached.open())
        fetcher.close()
        store.put_frame(cached)
        assert store.get(cached.id) == b"cached" * 1000
