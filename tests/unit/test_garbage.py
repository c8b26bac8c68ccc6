"""What stages and VMs of a host stand on, as a collection asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.garbage import Users
from imaged.config import Config
from imaged.errors import PvisorError
from imaged.ids import ChunkId
from stage.kept import stagelock
from stage.kept.stages import Stages

IMAGE = ChunkId.of(b"an image")


def test_a_stage_that_is_just_being_made_stops_no_collection(tmp_path: Path) -> None:
    """Its stage.json is not there yet, and the node daemon keeps its image; one that nobody makes may need anything."""
    config = Config(home=tmp_path / "home", run=tmp_path / "run", server="")
    stages = Stages(config.stages)
    with stages.use("kept", image=str(IMAGE), image_name="box:1"):
        pass
    lock = stagelock.hold(stages.root / "begun", make=True)
    assert Users(config).images() == {IMAGE}
    stagelock.release(lock)
    with pytest.raises(PvisorError, match="'begun' does not say which image") as caught:
        Users(config).images()
    assert "pvisor stage drop begun" in caught.value.hint
    stages.drop("begun")
    assert Users(config).images() == {IMAGE}
