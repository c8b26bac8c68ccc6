"""The overlay of a workspace: what the kernel made of its options, and when it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuse.mountinfo import mount_points
from stage.boundary import overlay
from stage.errors import StageSetupError
from tests.support.overlay import Layers, layers, over_image, run

pytestmark = pytest.mark.root


def test_directories_are_renamed_and_hard_links_survive(tmp_path: Path) -> None:
    made = layers(tmp_path, "mkdir -p d/sub; echo x > d/x; echo one > one; ln one d/two")
    with made.mounted() as merged:
        os.rename(merged / "d", merged / "e")  # noqa: PTH104 (the system call)
        run("echo more >> one; test one -ef e/two; grep -q more e/two; test $(stat -c %h one) = 2", merged)
    made.edit("test one -ef e/two; grep -q more e/two; test -e e/x -a ! -e d")
    assert [point.path for point in mount_points()].count(merged) == 0


def test_directories_of_an_image_are_copied(tmp_path: Path) -> None:
    made = over_image(tmp_path, "mkdir d; echo x > d/x")
    with made.mounted() as merged:
        with pytest.raises(OSError, match="cross-device"):
            os.rename(merged / "d", merged / "e")  # noqa: PTH104 (the system call)
        run("mv d e; test -e e/x", merged)


def test_a_mount_that_ends_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounts of a process that has ended go away a moment later; here, when the first try has failed."""
    made = layers(tmp_path, "echo a > a")
    with made.mounted() as merged:
        holder = subprocess.Popen(
            [sys.executable, "-c", f"import sys; open({str(merged / 'a')!r}); print(flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: overlay.linux.unshare(overlay.linux.CLONE_NEWNS),
        )
        assert holder.stdout is not None
        holder.stdout.readline()
    pauses: list[float] = []
    real_sleep = time.sleep

    def sleep(pause_s: float) -> None:
        if not pauses:
            holder.communicate()
        pauses.append(pause_s)
        real_sleep(pause_s)

    monkeypatch.setattr(overlay.time, "sleep", sleep)
    made.edit("cat a")
    assert pauses and pauses[0] == 0.001


def test_a_workspace_that_was_replaced_is_refused(tmp_path: Path) -> None:
    made = layers(tmp_path, "echo a > a")
    made.edit("echo more >> a")
    made.base.rename(tmp_path / "away")
    made.base.mkdir()
    with pytest.raises(StageSetupError, match="Stale file handle") as caught:
        made.edit("cat a")
    assert "put the directory back" in caught.value.hint
    made.base.rmdir()
    (tmp_path / "away").rename(made.base)
    made.edit("grep -q more a")


def test_the_host_may_replace_what_the_stage_has_changed(tmp_path: Path) -> None:
    """As an apply does it: then the names that have an entry of their own are the stage's, the others the host's."""
    made: Layers = layers(tmp_path, "echo a > a; ln a b; ln a c")
    made.edit("echo more >> a")
    assert made.told() == ["modified a", "modified b", "modified c"]
    run("printf 'a\\nmore\\n' > n; ln n m; ln n k; mv n a; mv m b; mv k c", made.base)
    assert made.told() == []
    made.edit("cmp a b; cmp a c; echo third >> b; grep -q third c")
    assert made.told() == ["modified b", "modified c"]
