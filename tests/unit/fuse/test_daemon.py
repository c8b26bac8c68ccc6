"""The node daemon's end, without a mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuse import blockoperations, daemon, mounts, rundir
from fuse.fill import Filler
from fuse.opener import Opener
from imaged.config import Config
from imaged.errors import StoreError
from imaged.fetching.fetch import Fetcher


def test_whatever_fails_at_the_end_the_others_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(home=tmp_path / "home", run=tmp_path / "run")
    rundir.make(config)
    closed: list[str] = []
    for kind in (Fetcher, Opener, Filler):
        close = kind.close

        def noted(self: object, close: object = close, name: str = kind.__name__) -> None:
            closed.append(name)
            close(self)  # type: ignore[operator]

        monkeypatch.setattr(kind, "close", noted)

    def fail(config: Config) -> None:
        raise OSError("busy")

    monkeypatch.setattr(mounts, "detach_all", fail)
    monkeypatch.setattr(blockoperations, "run", lambda config, operations: None)
    with pytest.raises(OSError, match="busy"):
        daemon.serve(config, lambda: None)
    assert closed == ["Filler", "Opener", "Fetcher"]


def test_fills_that_can_not_be_resumed_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libfuse drops what is raised there."""
    config = Config(home=tmp_path / "home", run=tmp_path / "run")
    rundir.make(config)

    def fail(self: Filler) -> None:
        raise StoreError("the index went away")

    monkeypatch.setattr(Filler, "resume", fail)
    ready: list[bool] = []
    monkeypatch.setattr(blockoperations, "run", lambda config, operations: operations._on_mounted())
    monkeypatch.setattr(mounts, "detach_all", lambda config: None)
    daemon.serve(config, lambda: ready.append(True))
    assert ready == [True]
    assert "the index went away" in caplog.text
