"""Reading an index in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.salvage import salvage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import StoreError
from tests.support.synthetic import add_image


def test_an_index_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        add_image(store, "made:latest", chunks=1)
    assert list(salvage(tmp_path / "store" / INDEX_NAME).refs) == ["made:latest"]
    monkeypatch.setattr("imaged.chunkstore.salvage._TIMEOUT_S", 0.001)
    with pytest.raises(StoreError, match="was not read within"):
        salvage(tmp_path / "store" / INDEX_NAME)


def test_modules_in_the_callers_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        add_image(store, "made:latest", chunks=1)
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert list(salvage(tmp_path / "store" / INDEX_NAME).refs) == ["made:latest"]
    assert not (tmp_path / "ran").exists()
