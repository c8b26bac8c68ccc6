"""An image or snapshot that is there is not left out of a list because the disk did not give it just now."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from imaged import snapshots
from imaged.chunkstore.pack import PackReader
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkUnreadableError, PvisorError, StoreBusyError
from imaged.serving.imageapi import _list
from tests.support.synthetic import add_image


@pytest.mark.parametrize(("number", "kind"), [(errno.EMFILE, StoreBusyError), (errno.EIO, ChunkUnreadableError)])
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[PvisorError]) -> None:
    with ChunkStore.open(tmp_path) as store:
        add_image(store, "x:1", chunks=1)
        store.flush()
        with monkeypatch.context() as patch:
            patch.setattr(PackReader, "read", _failing(number))
            with pytest.raises(kind, match=os.strerror(number)):
                _list(store)
        assert [image["name"] for image in _list(store)] == ["x:1"]


@pytest.mark.parametrize(("number", "kind"), [(errno.EMFILE, StoreBusyError), (errno.EIO, ChunkUnreadableError)])
def test_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[PvisorError]) -> None:
    with ChunkStore.open(tmp_path) as store:
        record = add_image(store, "x:1", chunks=1).id
        store.snapshots.set("s", SnapshotRef(record=record, created_at=1))
        store.flush()
        monkeypatch.setattr(PackReader, "read", _failing(number))
        with pytest.raises(kind, match=os.strerror(number)):
            snapshots.listing(store)


def _failing(number: int) -> object:
    def fail(*_: object) -> bytes:
        raise OSError(number, os.strerror(number))

    return fail
