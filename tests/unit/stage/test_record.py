"""stage.json, and the base that tells later changes of a workspace from earlier ones."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from stage.errors import StageSetupError
from stage.kept import record
from stage.kept.record import StageInfo
from stage.kept.stages import Stages


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "space").mkdir()
    info = record.based(record.new("fix", "id", "debian:12", tmp_path / "space"))
    assert info.base is not None
    record.save(tmp_path, info)
    assert record.load(tmp_path) == info
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["stage.json"]


def test_a_record_without_base_is_loaded(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    fields = asdict(StageInfo(name="fix", image="id", image_name="", workspace="/space", created_at=5))
    del fields["base"]
    (tmp_path / "stage.json").write_text(json.dumps(fields))
    assert record.load(tmp_path) == StageInfo(name="fix", image="id", workspace="/space", created_at=5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x"}', '{"base": 1}'])
def test_a_damaged_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "stage.json").write_text(text)
    with pytest.raises(StageSetupError, match=r"stage\.json does not say"):
        record.load(tmp_path)


def test_every_change_is_before_or_after_the_base(tmp_path: Path) -> None:
    """However close: the kernel's clock for files stands still between ticks, and is finer for files just looked at."""
    early, late = tmp_path / "early", tmp_path / "late"
    for _ in range(20):
        for mode in (0o600, 0o644):  # the look between the two makes the second stamp a fine one
            early.touch()
            early.chmod(mode)
            early.stat()
        base = record.based(record.new("fix", "id", "", tmp_path)).base
        late.write_text("x")
        assert base is not None
        assert early.stat().st_ctime_ns <= base.time_ns < late.stat().st_ctime_ns
        assert (base.device, base.inode) == (tmp_path.stat().st_dev, tmp_path.stat().st_ino)
        late.unlink()


def test_the_base_is_that_of_the_first_mount(tmp_path: Path) -> None:
    stages, space = Stages(tmp_path / "stages"), tmp_path / "space"
    with stages.use("fix", image="id", workspace=space) as stage:  # no such directory: nothing can be mounted
        assert stage.info.base is None
    space.mkdir()
    bases = []
    for _ in range(2):  # two starts that failed before the mount, one that did not, and a later one
        with stages.use("fix", image="id") as stage:
            bases.append(stage.info.base)
        assert stages.get("fix").base == bases[-1] != None  # noqa: E711
    with stages.use("fix", image="id") as stage:
        stage.workspace_upper.mkdir()
        bases.append(stage.info.base)
    times = [base.time_ns for base in bases if base is not None]
    assert len(times) == 3 and times == sorted(set(times))
    with stages.use("fix", image="id", workspace=space) as stage:
        assert stage.info.base == bases[-1]
    assert stages.get("fix").base == bases[-1]


def test_no_workspace_no_base(tmp_path: Path) -> None:
    with Stages(tmp_path).use("fix", image="id") as stage:
        assert stage.info.base is None
    assert stage.applied == stage.path / "apply" == Stages(tmp_path).files("fix").applied
    assert os.fspath(stage.path) == os.fspath(tmp_path / "fix")
