"""Stage directories, their locks, and removal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stage.errors import StageBusyError, StageMismatchError, StageNotFoundError, StageSetupError
from stage.kept.removal import remove_tree
from stage.kept.stages import Stages


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    return Stages(tmp_path / "stages")


def test_a_named_stage_is_kept(stages: Stages, tmp_path: Path) -> None:
    with stages.use("one", image="id1", image_name="debian", workspace=tmp_path) as stage:
        stage.upper.mkdir()
        (stage.upper / "file").write_text("kept")
        assert not stage.temporary
    with stages.use("one", image="id1", workspace=tmp_path) as stage:
        assert (stage.upper / "file").read_text() == "kept"
    info = stages.get("one")
    assert (info.image, info.image_name, info.workspace) == ("id1", "debian", str(tmp_path))
    assert abs(info.created_at - time.time()) < 60
    assert stages.list() == [info]
    stages.drop("one")
    assert stages.list() == [] and not list(stages.root.iterdir())


def test_a_temporary_stage_is_dropped(stages: Stages) -> None:
    with stages.temporary(image="id") as stage:
        assert not stage.upper.exists() and stage.work.is_dir() and stage.temporary
        assert stages.list() == [] and stages.sweep() == 0
    assert not list(stages.root.iterdir())


def test_one_process_at_a_time(stages: Stages) -> None:
    with stages.use("one", image="id"):
        with pytest.raises(StageBusyError, match="in use") as caught, stages.use("one", image="id"):
            pass
        assert "stage exec one" in caught.value.hint
        with pytest.raises(StageBusyError):
            stages.drop("one")
    with stages.use("one", image="id"):
        pass


def test_another_image_or_workspace_is_refused(stages: Stages, tmp_path: Path) -> None:
    with stages.use("one", image="id1"):
        pass
    with pytest.raises(StageMismatchError, match="id1, not id2") as image, stages.use("one", image="id2"):
        pass
    with pytest.raises(StageMismatchError, match="none") as added, stages.use("one", image="id1", workspace=tmp_path):
        pass
    with stages.use("two", image="id1", workspace=tmp_path):
        pass
    away = stages.use("two", image="id1", workspace=Path("/other"))
    with pytest.raises(StageMismatchError, match="not /other") as other, away:
        pass
    assert "leave out --workspace" in added.value.hint
    assert f"give --workspace {tmp_path}, " in other.value.hint and "stage exec two -- CMD" in other.value.hint
    for caught in (image, added, other):
        assert "stage exec" in caught.value.hint and caught.value.hint.endswith("use another --stage")
        assert "drop" not in caught.value.hint


def test_no_workspace_means_the_stages_own(stages: Stages, tmp_path: Path) -> None:
    for given in (tmp_path, None):
        with stages.use("one", image="id", workspace=given) as stage:
            assert stage.workspace == tmp_path
    assert stages.get("one").workspace == str(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".tmp-1", "-x", "a" * 64, "a\n", "ä"])
def test_bad_names(stages: Stages, name: str) -> None:
    with pytest.raises(StageSetupError, match="not a stage name"), stages.use(name, image="id"):
        pass


def test_unknown_and_broken_stages(stages: Stages) -> None:
    with pytest.raises(StageNotFoundError):
        stages.get("no")
    with pytest.raises(StageNotFoundError):
        stages.drop("no")
    with stages.use("one", image="id") as stage:
        pass
    (stage.path / "stage.json").write_text("{")
    with pytest.raises(StageSetupError, match=r"stage\.json"):
        stages.get("one")


def test_the_root_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StageSetupError, match="stages directory"), Stages(tmp_path / "file/x").temporary(image="id"):
        pass


def test_sweep_takes_what_a_killed_process_left(stages: Stages) -> None:
    code = (
        "import sys, pathlib\nfrom stage.kept.stages import Stages\n"
        "with Stages(pathlib.Path(sys.argv[1])).temporary(image='id') as stage:\n"
        "    print(stage.path, flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(stages.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert stages.sweep() == 0 and path.is_dir()
        process.kill()
        process.wait()
    assert path.is_dir() and stages.sweep() == 1 and not path.exists()


def test_init_of_another_process_life_does_not_count(stages: Stages) -> None:
    with stages.use("one", image="id") as stage:
        assert stages.running("one") is None
        stage.record_init(os.getpid())
        running = stages.running("one")
        assert running is not None and running.pid == os.getpid()
        (stage.path / "init").write_text(f'{{"pid": {os.getpid()}, "started": {running.started - 1}}}')
        assert stages.running("one") is None
        (stage.path / "init").write_text("junk")
        assert stages.running("one") is None
    assert not (stage.path / "init").exists()


def test_removal_of_odd_trees(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("")
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).mkdir()
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe/\x80")).write_text("")
    here = os.open(root, os.O_RDONLY)
    for _ in range(1200):  # deeper than PATH_MAX, and than any recursion
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.close(here)
    remove_tree(root)
    assert not root.exists() and (outside / "precious").exists()


@pytest.mark.root
def test_a_leftover_that_can_not_be_removed_is_nobody_elses_trouble(
    stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    stages.root.mkdir()
    stuck, odd, free = (stages.root / f".tmp-1-{name}" for name in ("dead", "odd", "free"))
    for path in (stuck, free):
        (path / "upper").mkdir(parents=True)
        (path / "lock").touch()
        (path / "upper/file").touch()
    odd.write_text("no directory")
    (stages.root / ".tmp-1-without-lock/upper").mkdir(parents=True)
    subprocess.run(["chattr", "+i", stuck / "upper/file"], check=True)
    try:
        assert stages.sweep() == 1 and not free.exists() and stuck.exists()
        assert caplog.text.count("can not be removed") == 3 and str(stuck) in caplog.text
        with stages.use("one", image="id"):
            pass
        stages.drop("one")
    finally:
        subprocess.run(["chattr", "-i", stuck / "upper/file"], check=True)
    assert stages.sweep() == 1 and not stuck.exists()


def test_removal_and_sweep_at_once(tmp_path: Path) -> None:
    """A sweep never takes a stage that its owner is removing: both would fail on each other's steps."""
    code = """
import sys
from contextlib import suppress
from pathlib import Path
from stage.kept.stages import Stages
stages = Stages(Path(sys.argv[1]))
for _ in range(60):
    stages.sweep()
    with stages.temporary(image="x") as stage:
        for n in range(5):
            (stage.upper / f"d{n}/e").mkdir(parents=True)
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "stages")]
    processes = [subprocess.Popen(argv, stderr=subprocess.PIPE) for _ in range(4)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, errors
    assert list((tmp_path / "stages").iterdir()) == []


def test_a_damaged_stage_hides_no_other_and_can_be_dropped(tmp_path: Path) -> None:
    stages = Stages(tmp_path)
    for name in ("good", "torn"):
        with stages.use(name, image="x"):
            pass
    (tmp_path / "torn/stage.json").write_bytes(b"")
    (tmp_path / "begun").mkdir()
    assert [info.name for info in stages.list()] == ["good"]
    assert stages.damaged() == ("begun", "torn")
    with pytest.raises(StageSetupError, match="torn"):
        stages.get("torn")
    for name in ("begun", "torn"):
        stages.drop(name)
    assert stages.damaged() == ()
