"""Applies while others write in the workspace, work in the stage, drop it, or have left something behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stage.errors import ApplyConflictError, StageBusyError, StageError, StageNotFoundError
from stage.kept.record import StageInfo
from stage.kept.stages import Stages
from tests.integration.test_stage_apply import at, killed_at
from tests.support import trees
from tests.support.staged import Staged, content, staged

pytestmark = pytest.mark.root


def sh(script: str, directory: Path) -> None:
    subprocess.run(["sh", "-ec", script], cwd=directory, check=True)


def refused(made: Staged, *, path: str, reason: str = "was changed on the host") -> None:
    """The next apply is in conflict, and leaves the workspace as it is."""
    before = trees.found(made.workspace)
    with pytest.raises(ApplyConflictError, match=reason) as caught:
        made.apply()
    assert path in [os.fsdecode(found) for found, _ in caught.value.conflicts]
    assert trees.found(made.workspace) == before
    made.assert_clean()


# --- what others write between a step and its note


@pytest.mark.parametrize("point", ["step", "synced", "commit"])
def test_what_others_write_after_a_step_is_theirs(tmp_path: Path, point: str) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("echo ours > a")
    made.apply(reached=at(point, lambda: sh("echo theirs >> a", made.workspace)))
    assert (made.workspace / "a").read_text() == "ours\ntheirs\n"
    made.edit("echo more >> a")
    refused(made, path="a")


def test_what_others_write_after_a_crash_is_theirs(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a; echo b > b")
    made.edit("echo ours > a; rm b; echo new > b")
    assert killed_at(made, 1, "commit") == -signal.SIGKILL
    sh("echo theirs >> a; rm b", made.workspace)
    made.stages.recover(made.name)
    made.edit("echo more >> a; echo more >> b")
    refused(made, path="a")
    refused(made, path="b", reason=r"was changed on the host")


def test_a_host_file_with_several_names_that_gets_another_time(tmp_path: Path) -> None:
    """The stage makes a link to a file of the host and gives it another time: what the host then has is known."""
    made = staged(tmp_path, "echo a > a")
    made.both("ln a b; touch -d @1000000000 a; chmod 600 b")
    made.apply()
    made.both("rm a; echo again > a; rm b; echo again > b")
    made.apply()
    made.assert_as_direct()


# --- attributes


def test_attributes_are_not_set_on_what_others_changed(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a; echo z > z")
    made.edit("chmod 700 a; touch -d @1000000000 a; echo zz > z")
    with pytest.raises(ApplyConflictError, match="was changed when its turn came"):
        made.apply(reached=at("copy", lambda: sh("echo theirs >> a", made.workspace)))
    assert (made.workspace / "a").read_text() == "a\ntheirs\n" and (made.workspace / "z").read_text() == "z\n"
    made.assert_clean()
    refused(made, path="a")


def test_a_mode_that_others_set_stays(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir d; echo a > d/a; echo z > z")
    made.edit("mv d e; chmod 700 e; echo zz > z")
    with pytest.raises(ApplyConflictError, match="was changed when its turn came"):
        made.apply(reached=at("copy", lambda: sh("echo theirs > d/theirs; chmod 777 d", made.workspace)))
    assert (made.workspace / "d").stat().st_mode & 0o777 == 0o777
    assert (made.workspace / "d/theirs").exists() and (made.workspace / "z").read_text() == "z\n"
    made.assert_clean()


def test_an_undo_leaves_what_others_wrote_its_time(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a; touch -d @1000000000 a; echo c > c")
    made.edit("chmod 700 a; touch -d @1100000000 a; echo d > c")
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    sh("echo theirs >> a", made.workspace)
    written = (made.workspace / "a").stat().st_mtime_ns
    made.stages.recover(made.name)
    found = (made.workspace / "a").stat()
    assert (found.st_mtime_ns, found.st_mode & 0o777) == (written, 0o644)
    refused(made, path="a")


# --- the stage runs


def test_renamed_directories_wait_for_the_end_of_what_runs(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir x; echo f > x/f; echo q > q")
    made.both("mv x y; echo Q > q")
    before = content(made.workspace)
    with made.mounted() as merged:
        with pytest.raises(StageBusyError, match="renamed directories are applied when nothing runs"):
            made.apply()
        assert content(made.workspace) == before and (merged / "y/f").read_text() == "f\n"
        made.assert_clean()
        assert made.applied("q") == ["modified q"]
    made.apply()
    made.assert_as_direct()
    made.assert_shown()


def test_who_begins_meanwhile_waits_for_the_renamed_directories(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir x; echo f > x/f")
    made.edit("mv x y")
    shown: list[list[str]] = []

    def look() -> None:
        with made.mounted() as merged:
            shown.append(sorted(path.name for path in (merged / "y").iterdir()))

    thread = threading.Thread(target=look)
    made.apply(reached=at("place", thread.start))
    thread.join(timeout=60)
    assert shown == [["f"]]


# --- directories


@pytest.mark.parametrize(
    ("work", "path"),
    [("echo more >> d/s/x", "d/s/x"), ("rm d/s/x", "d/s/x"), ("rm -r d/s", "d/s"), ("echo n > d/s/n", "d/s/n")],
)
def test_a_directory_above_that_was_exchanged(tmp_path: Path, work: str, path: str) -> None:
    made = staged(tmp_path, "mkdir -p d/s n/s; echo d > d/s/x; echo precious > n/s/x")
    made.edit(work)
    sh("mv d old; mv n d", made.workspace)
    refused(made, path=path, reason="is in a directory that was replaced on the host")


def test_nested_directories_that_moved_keep_what_was_applied(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir -p x/sub; echo f > x/sub/f; echo g > x/g; mkdir a b; echo a > a/f; echo b > b/f")
    for work in (
        "echo F > x/sub/f; echo G > x/g; echo A > a/f; echo B > b/f",
        "mv x y; mv y/sub z; mv a t; mv b a; mv t b",
        "echo more >> z/f; echo more >> y/g; echo more >> a/f; echo more >> b/f",
    ):
        made.both(work)
        made.apply()
        made.assert_as_direct()


# --- the stage is dropped


def dropped_and_made_again(made: Staged) -> None:
    other = made.root / "other"
    other.mkdir()
    made.stages.drop(made.name)
    with made.stages.use(made.name, image="image", workspace=other) as again:
        again.workspace_upper.mkdir()
        (again.workspace_upper / "b").write_text("for another workspace")


@pytest.mark.parametrize(
    ("meanwhile", "error"),
    [(dropped_and_made_again, StageBusyError), (lambda made: made.stages.drop(made.name), StageNotFoundError)],
)
def test_a_stage_that_is_another_when_the_workspace_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Staged], None], error: type[StageError]
) -> None:
    """It was looked up before the wait."""
    made = staged(tmp_path, "echo a > a")
    made.edit("echo one > a")
    look, calls = Stages.get, 0

    def get(stages: Stages, name: str) -> StageInfo:
        nonlocal calls
        calls += 1
        found = look(stages, name)
        if calls == 1:
            meanwhile(made)
        return found

    monkeypatch.setattr(Stages, "get", get)
    with pytest.raises(error):
        made.apply()
    assert content(made.workspace) == content(made.direct)


@pytest.mark.parametrize("point", ["journal", "place", "copy", "step", "synced", "commit"])
def test_dropped_while_it_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """A drop that saw no apply when it looked undoes the one that has begun since, or finishes it."""
    made = staged(tmp_path, "echo a > a; echo b > b")
    made.edit("echo A > a; echo B > b")
    errors: list[BaseException] = []
    looked, begun = threading.Event(), threading.Event()
    import stage.kept.stages as module

    end = module._end_apply

    def end_apply(path: Path) -> None:
        end(path)
        if path.name == made.name:  # it has looked, and the name is still there
            looked.set()
            assert begun.wait(60)

    def drop() -> None:
        try:
            made.stages.drop(made.name)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(module, "_end_apply", end_apply)
    dropper = threading.Thread(target=drop)
    directory = made.files.path

    def reached(what: str) -> None:
        if what == point and not begun.is_set():
            begun.set()
            while directory.exists():  # the drop takes the name away at once
                os.sched_yield()

    dropper.start()
    assert looked.wait(60)
    try:
        made.apply(reached=reached)
    except StageNotFoundError as error:
        assert "was dropped" in error.message
    dropper.join(timeout=60)
    assert errors == []
    assert not list(made.workspace.glob(".pvisor*")) and list(made.stages.root.iterdir()) == []
    texts = (made.workspace / "a").read_text(), (made.workspace / "b").read_text()
    assert texts == (("A\n", "B\n") if point == "commit" else ("a\n", "b\n"))


def test_a_drop_that_can_not_undo_gives_the_stage_back(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("echo A > a")
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    made.workspace.rename(tmp_path / "elsewhere")
    with pytest.raises(StageError, match="unfinished"):
        made.stages.drop(made.name)
    assert made.stages.get(made.name).name == made.name
    (tmp_path / "elsewhere").rename(made.workspace)
    made.stages.drop(made.name)
    assert (made.workspace / "a").read_text() == "a\n"


def test_a_drop_gives_the_name_back_when_an_apply_that_has_just_begun_can_not_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("echo A > a")
    looked: list[str] = []

    def end_apply(path: Path) -> None:
        looked.append(path.name)
        if len(looked) == 2:
            raise StageError("can not be undone")

    monkeypatch.setattr("stage.kept.stages._end_apply", end_apply)
    with pytest.raises(StageError, match="can not be undone"):
        made.stages.drop(made.name)
    assert looked[0] == made.name and looked[1].startswith(".tmp-")
    assert [path.name for path in made.stages.root.iterdir()] == [made.name]
    assert (made.files.workspace_upper / "a").exists()


def test_the_next_command_ends_the_apply_of_a_drop_that_was_killed(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("echo A > a")
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    made.files.path.rename(made.stages.root / ".tmp-1-dead")
    assert made.stages.sweep() == 1
    assert (made.workspace / "a").read_text() == "a\n" and not list(made.workspace.glob(".pvisor*"))


# --- what other stages left


def test_a_damaged_journal_of_another_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("echo b > a")
    other = made.stages.root / "other/apply"
    other.mkdir(parents=True)
    (other / "journal.json").write_text('{"version": 2}')
    with caplog.at_level(logging.WARNING):
        assert made.applied() == ["modified a"]
    assert "stage other has an apply" in caplog.text and (other / "journal.json").exists()
