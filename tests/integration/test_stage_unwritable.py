"""Workspaces that can not be written, or not be used: an error that says what to do, and nothing else in the way."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fuse import linux
from stage.batch import apply_stage
from stage.errors import StageError, StageNotFoundError, StageSetupError
from stage.kept.stages import Stages
from stage.review import workspace_review
from tests.integration.test_stage_apply import killed_at
from tests.support import trees
from tests.support.staged import content, staged

pytestmark = pytest.mark.root


@contextmanager
def read_only_mount(directory: Path) -> Iterator[None]:
    linux.mount(directory, directory, "", linux.MS_BIND)
    try:
        linux.mount("", directory, "", linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY)
        yield
    finally:
        linux.umount(directory, linux.MNT_DETACH)


@contextmanager
def immutable(directory: Path) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", directory], capture_output=True).returncode != 0:
        pytest.skip("no immutable files here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", directory], check=True)


Unwritable = Callable[[Path], AbstractContextManager[None]]
BOTH = [pytest.param(read_only_mount, "Read-only", "mount it"), pytest.param(immutable, "not permitted", "lsattr")]


@pytest.mark.parametrize(("unwritable", "reason", "hint"), BOTH)
@pytest.mark.parametrize("below", ["", "d"])
def test_a_workspace_that_can_not_be_written(
    tmp_path: Path, unwritable: Unwritable, reason: str, hint: str, below: str
) -> None:
    made = staged(tmp_path, "mkdir d; echo a > d/a; echo b > b")
    made.edit("echo A > d/a; echo n > d/n; rm b; ln d/a l")
    if below and unwritable is read_only_mount:
        pytest.skip("what is mounted inside a workspace is not part of it")
    before = trees.found(made.workspace)
    with unwritable(made.workspace / below):
        for _ in range(2):
            with pytest.raises(StageError) as caught:
                made.apply()
            assert f"nothing was applied to {made.workspace}: " in caught.value.message
            assert reason in caught.value.message and hint in caught.value.hint
        with workspace_review(made.stages, made.name) as shown:
            assert len(shown.changes) == 4
        with made.mounted() as merged:
            assert (merged / "d/a").read_text() == "A\n"
    assert trees.found(made.workspace) == before
    made.assert_clean()
    made.apply()
    made.assert_shown()


@pytest.mark.parametrize("point", ["journal", "place", "copy", "step", "commit"])
@pytest.mark.parametrize(("unwritable", "reason", "hint"), BOTH)
def test_a_crash_and_then_a_workspace_that_can_not_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unwritable: Unwritable, reason: str, hint: str, point: str
) -> None:
    made = staged(tmp_path, "mkdir d; echo a > d/a; echo b > b")
    made.edit("echo A > d/a; echo n > d/n; rm b")
    old = content(made.workspace)
    killed_at(made, 1, point)
    with unwritable(made.workspace):
        with workspace_review(made.stages, made.name):
            pass
        with made.mounted() as merged:
            assert (merged / "d/a").read_text() == "A\n"
        with pytest.raises(StageError, match=reason) as caught:
            made.apply()
        assert hint in caught.value.hint
        if point == "journal":  # nothing was done
            assert caplog.text == ""
        else:
            assert f"an apply to {made.workspace} is unfinished" in caplog.text and ".pvisor-apply-" in caplog.text
    made.stages.recover(made.name)
    made.assert_clean()
    assert (content(made.workspace) == old) == (point != "commit")


@pytest.mark.parametrize(("unwritable", "reason", "hint"), BOTH)
def test_drop_needs_no_workspace_that_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unwritable: Unwritable, reason: str, hint: str
) -> None:
    made = staged(tmp_path, "echo a > a; echo b > b")
    made.edit("echo A > a; rm b")
    killed_at(made, 1, "step")
    with unwritable(made.workspace):
        made.stages.drop(made.name)
    (place,) = made.workspace.glob(".pvisor-apply-*")
    assert str(place) in caplog.text and reason in caplog.text
    with pytest.raises(StageNotFoundError):
        made.apply()


def test_a_stage_that_never_started_is_not_kept(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "stages")
    with pytest.raises(StageSetupError), stages.use("fix", image="one", workspace=Path("/")):
        raise StageSetupError("refused")
    assert stages.list() == [] and list(stages.root.iterdir()) == []
    with stages.use("fix", image="two", workspace=tmp_path):
        pass
    with pytest.raises(StageSetupError), stages.use("fix", image="two"):
        raise StageSetupError("refused again")
    assert [info.workspace for info in stages.list()] == [str(tmp_path)]


def test_a_workspace_by_another_name_is_the_same(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "stages")
    (tmp_path / "w").mkdir()
    (tmp_path / "link").symlink_to("w")
    for name in ("w", "link", "w/../w"):
        with stages.use("fix", image="one", workspace=tmp_path / name) as stage:
            assert stage.workspace == tmp_path / "w"


def test_a_workspace_that_was_replaced_is_not_compared(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("echo A > a")
    made.workspace.rename(tmp_path / "old")
    made.workspace.mkdir()
    for look in (lambda: workspace_review(made.stages, made.name).__enter__(), made.apply):
        with pytest.raises(StageError, match="is not the directory that the stage was made for"):
            look()


def test_a_record_is_for_its_owner_only(tmp_path: Path) -> None:
    made = staged(tmp_path, "true")
    assert (made.files.path / "stage.json").stat().st_mode & 0o777 == 0o600


def test_one_path_as_text(tmp_path: Path) -> None:
    made = staged(tmp_path, "true")
    made.edit("echo 1 > new; echo 2 > n")
    assert [change.path for change in apply_stage(made.stages, made.name, "new").changes] == [b"new"]
    for paths in ("", [""], b"", ["n", ""]):
        with pytest.raises(ValueError, match="an empty path"):
            apply_stage(made.stages, made.name, paths)


def test_a_clock_that_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others change then may have a time from before the stage began, and is in the way all the same."""
    from stage.applying import moment
    from stage.kept import record

    made = staged(tmp_path, "echo a > a; echo b > b; touch -d @1 b")
    made.edit("echo A > a")
    assert made.apply().changes
    made.edit("echo B > b")
    real = record.booted_ns
    monkeypatch.setattr(moment, "booted_ns", lambda: real() - 3600 * 10**9)
    with pytest.raises(StageError, match="b was changed on the host"):
        made.apply()
    made.edit("echo again > a")
    assert made.applied("a") == ["modified a"]  # that is what the last apply left
    monkeypatch.setattr(moment, "boot", lambda: 1)
    assert made.applied() == ["modified b"]
