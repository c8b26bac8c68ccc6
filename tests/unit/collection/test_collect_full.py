"""A disk that is full at each write of a collection, for a moment or from then on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imaged.chunkstore import pack
from imaged.chunkstore.environment import Txn
from imaged.chunkstore.fsck import check
from imaged.chunkstore.index import Index
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import StoreFullError
from imaged.frame import Frame
from imaged.reach import reachable
from tests.support.store_images import DIFF_ID, build_image, build_layer, name_image, noise


class Disk:
    """Counts writes; from the `full_from`-th on there is no room, for so many of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = 0
        self.full = range(0)
        write, append = Index.write, pack._write_at

        @contextmanager
        def checked(index: Index, what: str) -> Iterator[Txn]:
            with write(index, what) as txn:
                yield txn
                self._note()

        def appended(fd: int, buffers: list[bytes], offset: int) -> None:
            self._note()
            append(fd, buffers, offset)

        monkeypatch.setattr(Index, "write", checked)
        monkeypatch.setattr(pack, "_write_at", appended)

    def _note(self) -> None:
        self.writes += 1
        if self.writes in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Two packs with live chunks between garbage: one that is rewritten, one that gets holes; a memo that goes."""
    root = tmp_path / "template"
    with ChunkStore.open(root) as one, ChunkStore.open(root) as two:
        for seed in range(12):
            one.put(noise(20_000, seed))
        name_image(one, "kept:1", build_image(one, range(5)))
        for seed in range(20, 24):
            two.put_frame(Frame.of(noise(9000, seed)))
        name_image(two, "kept:2", build_image(two, range(10, 30)))
        two.memos.set(DIFF_ID, build_layer(two, range(40, 44)))
    return root


def whole(root: Path) -> None:
    with ChunkStore.open(root) as store:
        refs = dict(store.refs.items())
        assert list(refs) == ["kept:1", "kept:2"]
        for ref in refs.values():
            for chunk in reachable(store, ref.record):
                store.get(chunk)


def test_a_full_disk_at_each_write(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    shutil.copytree(template, tmp_path / "whole")
    expected = collect(tmp_path / "whole")
    assert (expected.removed_chunks, expected.rewritten_packs, expected.forgotten_layers) == (23, 1, 1)
    writes = disk.writes
    assert writes > 8
    for write in range(1, writes + 1):
        for full in (range(write, write + 1), range(write, 1 << 30)):
            root = tmp_path / "again"
            shutil.copytree(template, root)
            disk.writes, disk.full = 0, full
            try:
                report = collect(root)
            except StoreFullError:
                report = None
            disk.full = range(0)
            whole(root)
            if write % 4 == 1:
                assert check(root).errors == []
            if report is not None and len(full) == 1:
                assert report.kept_chunks == expected.kept_chunks
            after = collect(root)
            assert (after.kept_chunks, after.waiting_chunks) == (expected.kept_chunks, 0)
            shutil.rmtree(root)
