"""Applies of a stage to its workspace: what comes over, what is in the way, and what a crash or an attack can do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stage
from fuse import linux
from imaged.errors import NotFoundError, PvisorError
from stage.applying.workspace import held
from stage.batch import Applied, apply_stage, preview
from stage.errors import ApplyConflictError, StageBusyError, StageError, StageNotFoundError
from tests.support import trees
from tests.support.command import busybox_layout, host
from tests.support.stage_process import REPOSITORY, eventually
from tests.support.staged import Staged, content, staged

pytestmark = pytest.mark.root
BASE = "mkdir -p d/sub; echo a > a; echo b > b; echo x > d/x; echo y > d/sub/y; ln -s a link"
WORK = """
echo more >> a; rm b; mkdir -p n/m; echo n > n/m/n; echo z > d/sub/z; chmod 700 d; mv d/x d/moved
rm link; echo l > link
"""
NAMES = r"""
printf x > "$(printf 'new\nline')"; mkdir "$(printf '\377\376')"; printf x > "$(printf '\377\376/\200')"
printf x > ' -n'
"""


def prepared(root: Path, base: str = BASE, work: str = WORK) -> Staged:
    """A stage with work in it, and the copy in which the same was done."""
    made = staged(root, base)
    made.both(work)
    return made


def conflicts(made: Staged, *paths: str) -> dict[str, str]:
    """What an apply finds in its way; nothing may have moved."""
    before = trees.found(made.workspace)
    with pytest.raises(ApplyConflictError) as caught:
        made.apply(*paths)
    assert trees.found(made.workspace) == before
    made.assert_clean()
    return {os.fsdecode(path): reason for path, reason in caught.value.conflicts}


@pytest.mark.parametrize(
    ("base", "work"),
    [
        ("", "echo one > one; mkdir empty; mkdir -p a/b/c; echo two > a/b/c/two; printf '' > nothing"),
        ("echo a > a; echo b > b", "echo A > a; chmod 755 b; rm -f c"),
        ("echo a > a", "chmod 4755 a; chown 12:34 a; touch -h -d @1000000001.5 a"),
        ("mkdir d; echo x > d/x", "rm -r d; mkdir d; echo n > d/n"),
        ("mkdir d; echo x > d/x", "rm -r d; echo file > d"),
        ("echo f > f", "rm f; mkdir f; echo x > f/x"),
        ("mkdir -p d/e; echo x > d/e/x", "mv d/e e; rm -r d; echo d > d; mv e/x x; rmdir e; mkdir e"),
        ("mkdir d; echo x > d/x", "rm -r d; echo f > d; rm d; mkdir d; echo x > d/x; touch -r . d"),
        ("echo x > x", "rm x; echo again > x; rm x; echo x > x"),
        ("mkdir a b; echo a > a/a; echo b > b/b", "mv a t; mv b a; mv t b"),
        ("mkdir -p a/s; echo x > a/s/x; echo w > a/w", "mv a b; mv b/s b/r; mv b/w w; echo new > b/r/new; chmod 711 b"),
        ("mkdir a; echo x > a/x", "mv a b; mkdir a; mv b a/b; echo y > a/b/y"),
        ("echo x > x; ln x y; ln x z", "echo more >> x; ln y w; rm z"),
        ("mkdir a b; echo x > a/x; ln -s x a/l; mkfifo a/f; ln a/x a/y", "rmdir b; mv a b"),
        ("mkdir a; echo x > a/x; ln -s x a/l; ln a/x a/y", "mkdir b; mv a/* b; rmdir a"),
        ("echo x > x; mkdir d", "ln x y; ln x d/z"),
        ("", "echo x > x; ln x y; mkdir d; ln x d/z; mkdir e; ln d/z e/w"),
        ("echo a > a; ln -s a l", "rm l; ln -s /etc/passwd l; ln -s nowhere new; rm a; ln -s l a"),
        ("ln -s a l; echo a > a", "rm l; mkdir l; echo x > l/x; rm a"),
        ("", "mkfifo f; mkdir d; mkfifo d/f; chmod 622 f"),
        (
            "echo a > a",
            "setfattr -n user.k -v v a; setfattr -n security.k -v 0x00ff a; mkdir d; setfattr -n user.d -v e d",
        ),
        ("echo a > a; setfattr -n user.k -v v a", "setfattr -x user.k a; chmod 600 ."),
        ("echo a > a; mkdir d", "setfacl -m u:7:rw a; setfacl -d -m g:8:rx d; echo inherits > d/new; mkdir d/sub"),
        ("setfacl -d -m u:9:rwx .; echo a > a", "echo b > b; mkdir d; echo c > d/c; setfacl -b a"),
        ("", "truncate -s 9G big; printf x | dd of=big bs=1 seek=5G conv=notrunc; seq 100000 > many"),
        ("mkdir d; chmod 2777 d; chgrp 77 d", "mkdir d/e; echo x > d/e/x; chmod 1755 d"),
        ("", NAMES),
        ("", "n=x; for i in 1 2 3 4 5 6 7; do n=$n$n; done; for i in $(seq 20); do mkdir $n; cd $n; done; echo x > x"),
    ],
)
def test_apply_is_as_if_done_there(tmp_path: Path, base: str, work: str) -> None:
    made = staged(tmp_path, base)
    before = trees.found(made.workspace)
    made.edit(work)
    assert trees.found(made.workspace) == before
    made.apply()
    with made.mounted() as merged:
        shown = {path: row[3] for path, row in trees.found(merged).items()}
    assert {path: row[3] for path, row in trees.found(made.workspace).items()} == shown
    if (made.workspace / "big").exists():
        assert (made.workspace / "big").stat().st_blocks < 1000
    subprocess.run(["sh", "-ec", work], cwd=made.direct, check=True)
    made.assert_as_direct()
    made.assert_clean()
    made.assert_shown()
    assert made.applied() == []


def test_again_after_the_host_went_on(tmp_path: Path) -> None:
    """What was applied is settled: later work of others on the same names is neither undone nor in the way."""
    made = prepared(tmp_path)
    assert made.applied() == [
        "modified a",
        "deleted b",
        "mode d",
        "renamed d/moved",
        "added d/sub/z",
        "type link",
        "added n",
        "added n/m",
        "added n/m/n",
    ]
    (made.workspace / "a").write_text("others\n")
    (made.workspace / "b").write_text("others again\n")
    (made.workspace / "n/m/n").unlink()
    (made.workspace / "n/others").write_text("new\n")
    after = trees.found(made.workspace)
    assert made.applied() == []
    assert trees.found(made.workspace) == after
    made.edit("echo only this > d/sub/z")
    assert made.applied() == ["modified d/sub/z"]
    made.edit("echo mine >> a; echo mine > n/m/n")
    assert conflicts(made) == {
        "a": "was changed on the host since the stage began",
        "n/m/n": "was removed or moved on the host",
    }


@pytest.mark.parametrize(
    ("work", "others", "found"),
    [
        ("echo 1 >> a", "echo 2 >> a", {"a": "was changed on the host since the stage began"}),
        ("echo 1 >> a", "cp -p a t; mv t a", {"a": "was changed on the host since the stage began"}),
        ("echo 1 >> a; rm b", "chmod 600 a; touch b", {"a": "was changed", "b": "was changed"}),
        ("echo 1 >> a", "rm a", {"a": "was removed or moved on the host"}),
        ("rm a", "echo 2 >> a", {"a": "was changed"}),
        ("echo 1 > new", "echo 2 > new", {"new": "was changed"}),
        (
            "mkdir new; echo 1 > new/x",
            "mkdir -p new/y; echo 2 > new/x",
            {"new/x": "was changed"},
        ),
        ("rm -r d", "echo others > d/sub/theirs", {"d/sub": "was changed", "d/sub/theirs": "was changed"}),
        ("rm -r d", "echo others >> d/sub/y", {"d/sub/y": "was changed"}),
        ("rm -r d; mkdir d; echo n > d/n", "echo others > d/theirs", {"d/theirs": "was changed"}),
        ("rm -r d; echo n > d", "echo others >> d/x", {"d/x": "was changed"}),
        ("echo 1 > d/sub/new", "rm -r d", {"d": "was removed", "d/sub": "was removed"}),
        ("echo 1 >> d/x", "mv d e", {"d/x": "was removed"}),
        ("mv a moved", "echo 2 >> a", {"moved": "was changed"}),
        ("mv a moved", "echo 2 > moved", {"a": "", "moved": "was changed"}),
        ("echo 1 > d/sub/new", "mv d e; ln -s /etc d", {"d": "was changed"}),
        ("mknod device c 1 3; mknod disk b 7 0", "true", {"device": "is a device node", "disk": "is a device node"}),
    ],
)
def test_conflicts(tmp_path: Path, work: str, others: str, found: dict[str, str]) -> None:
    made = staged(tmp_path, BASE)
    made.edit(work)
    subprocess.run(["sh", "-ec", others], cwd=made.workspace, check=True)
    said = conflicts(made)
    for path, reason in found.items():
        assert not reason or reason in said.get(path, "-"), said


def test_what_is_no_conflict(tmp_path: Path) -> None:
    made = staged(tmp_path, BASE)
    made.edit("echo same > new; echo more >> a; rm b; mv d e; echo z > e/z")
    (made.workspace / "new").write_text("same\n")
    (made.workspace / "b").unlink()
    (made.workspace / "d/theirs").write_text("theirs\n")
    (made.workspace / "apart").write_text("apart\n")
    assert made.applied() == ["modified a", "renamed e", "added e/z"]
    assert (made.workspace / "e/theirs").read_text() == "theirs\n"
    assert (made.workspace / "a").read_text() == "a\nmore\n"
    assert not (made.workspace / "d").exists()
    with made.mounted() as merged:
        assert sorted(path.name for path in (merged / "e").iterdir()) == ["sub", "theirs", "x", "z"]


@pytest.mark.parametrize(
    ("paths", "done"),
    [
        (["a"], "echo more >> a"),
        (["n/m/n"], "mkdir -p n/m; echo n > n/m/n"),
        (["n/m"], "mkdir -p n/m; echo n > n/m/n"),
        (["d/sub"], "echo z > d/sub/z"),
        (["d/x"], "mv d/x d/moved"),
        (["d/moved", "./b"], "mv d/x d/moved; rm b"),
        (["/workspace/link", "{workspace}/d"], "rm link; echo l > link; mv d/x d/moved; echo z > d/sub/z; chmod 700 d"),
        (["."], WORK),
    ],
)
def test_chosen_paths(tmp_path: Path, paths: list[str], done: str) -> None:
    made = staged(tmp_path, BASE)
    made.edit(WORK)
    subprocess.run(["sh", "-ec", done], cwd=made.direct, check=True)
    made.apply(*[path.format(workspace=made.workspace) for path in paths])
    made.assert_as_direct()
    made.apply(*[path.format(workspace=made.workspace) for path in paths])
    made.assert_as_direct()
    subprocess.run(["rm", "-r", made.direct], check=True)
    made.apply()
    with made.mounted() as merged:
        assert content(merged).keys() == content(made.workspace).keys()
    made.assert_shown()


def test_a_moved_directory_is_applied_with_what_left_it(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir -p a/s; echo x > a/s/x; echo y > a/y; echo z > z")
    made.edit("mv a b; mv b/s t; echo n > b/n; echo more >> z")
    assert made.applied("b/n") == ["renamed b", "added b/n", "renamed t"]
    with made.mounted() as merged:
        assert (merged / "t/x").read_text() == "x\n" and (merged / "b/y").read_text() == "y\n"
    assert made.applied() == ["modified z"]


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    with pytest.raises(NotFoundError, match="nowhere is neither in the workspace nor"):
        made.apply("nowhere")
    for path in ("../x", "/etc/passwd", "a/../../x"):
        with pytest.raises(PvisorError, match="is not in the workspace"):
            made.apply(path)
    made.apply()
    assert made.applied("b", "d/x") == []


def test_preview_moves_nothing(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    before = trees.found(made.workspace)
    shown = preview(made.stages, made.name)
    assert trees.found(made.workspace) == before
    assert [change.path for change in made.apply().changes] == [change.path for change in shown.changes]


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(tmp_path)
    monkeypatch.setenv("PVISOR_HOME", str(tmp_path))
    result = stage.apply("fix", ["a", made.workspace / "d/x"])
    assert result.workspace == made.workspace
    assert [(change.kind.value, change.path, change.old_path) for change in result.changes] == [
        ("modified", b"a", None),
        ("renamed", b"d/moved", b"d/x"),
    ]
    assert stage.apply("fix", [b"a"]).changes == ()


def test_stages_that_can_not_apply(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    with made.stages.use("bare", image="image"):
        pass
    with pytest.raises(StageError, match="no workspace"):
        apply_stage(made.stages, "bare")
    made.workspace.rename(tmp_path / "elsewhere")
    with pytest.raises(StageError, match="No such file"):
        made.apply()
    made.workspace.mkdir()
    with pytest.raises(StageError, match="is not the directory"):
        made.apply()
    made.stages.drop(made.name)
    with pytest.raises(StageNotFoundError):
        made.apply()
    assert list(made.workspace.iterdir()) == []


# --- crashes

KILLER = """
import os, signal, sys
from stage.batch import apply_stage
from stage.kept.stages import Stages
from pathlib import Path
left, wanted = int(sys.argv[3]), sys.argv[4]
def reached(what):
    global left
    left -= wanted in ("any", what)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
apply_stage(Stages(Path(sys.argv[1])), sys.argv[2], reached=reached)
"""


def killed_at(made: Staged, point: int, name: str = "any") -> int:
    """Exit code of an apply that is killed at the n-th point of this name, if it gets there."""
    command = [sys.executable, "-c", KILLER, str(made.stages.root), made.name, str(point), name]
    return subprocess.run(command, cwd=REPOSITORY, timeout=60, capture_output=True).returncode


def next_use(made: Staged) -> None:
    with made.mounted():
        pass


def next_drop(made: Staged) -> None:
    made.stages.drop(made.name)


def next_apply_of_another(made: Staged) -> None:
    other = Staged(made.root, "other")
    other.edit("true")
    assert other.applied() == []


NEXT: list[Callable[[Staged], None]] = [
    next_use,
    next_drop,
    next_apply_of_another,
    lambda made: made.stages.recover(made.name),
]


def test_killed_at_every_point(tmp_path: Path) -> None:
    """kill -9 anywhere: the next one to look finds the old tree or the new one, and another apply gives the new one."""
    work = WORK + "rm -r d/sub; echo file > d/sub; mv n/m m; ln a hard"
    base = BASE + "; mkdir -p old/deep; echo o > old/deep/o"
    work += "; mv old renamed; echo in > renamed/deep/in"
    point, outcomes = 0, []
    while True:
        point += 1
        made = prepared(tmp_path / str(point), base, work)
        old = content(made.workspace)
        code = killed_at(made, point)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        how = NEXT[point % len(NEXT)]
        how(made)
        found = content(made.workspace)
        assert found in (old, content(made.direct)), point
        assert not list(made.workspace.glob(".pvisor*"))
        outcomes.append(found == old)
        if how is not next_drop:
            made.assert_clean()
            made.apply()
            made.assert_as_direct()
            made.assert_shown()
            assert made.applied() == []
    made.assert_as_direct()
    assert outcomes == sorted(outcomes, reverse=True)  # old up to the commit, new from there
    assert outcomes.count(False) >= 1 and outcomes.count(True) > 25


def test_a_workspace_that_is_gone_after_a_crash(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    old = content(made.workspace)
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    made.workspace.rename(tmp_path / "elsewhere")
    with pytest.raises(StageError, match=r"an apply is unfinished: workspace .* No such file") as caught:
        made.stages.drop(made.name)
    assert f"or remove {made.files.applied}" in caught.value.hint
    (tmp_path / "elsewhere").rename(made.workspace)
    made.stages.drop(made.name)
    assert content(made.workspace) == old


def test_killed_while_it_is_undone(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    old = content(made.workspace)
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    assert content(made.workspace) != old
    script = """
import os, signal, sys
from pathlib import Path
from stage.applying import steps
from stage.kept.stages import Stages
plain, count = steps.Steps.undo, int(sys.argv[3])
def undo(self, step):
    global count
    count -= 1
    if count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, step)
steps.Steps.undo = undo
Stages(Path(sys.argv[1])).recover(sys.argv[2])
"""
    for point in range(1, 4):
        command = [sys.executable, "-c", script, str(made.stages.root), made.name, str(point)]
        assert subprocess.run(command, cwd=REPOSITORY, timeout=60).returncode == -signal.SIGKILL
    made.stages.recover(made.name)
    assert content(made.workspace) == old
    made.assert_clean()


def test_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], check=True)
    try:
        made = Staged(tmp_path)
        made.workspace.symlink_to(small)
        subprocess.run(["sh", "-ec", BASE], cwd=small, check=True)
        made.edit("echo more >> a; rm b; head -c 1500000 /dev/urandom > d/r1; head -c 1500000 /dev/urandom > d/r2")
        before = trees.found(small)
        with pytest.raises(StageError, match=r"nothing was applied .* No space left") as caught:
            made.apply()
        assert "make space" in caught.value.hint
        assert trees.found(small) == before or content(small) == content(small)
        assert not list(small.glob(".pvisor*"))
        assert made.applied("a", "b") == ["modified a", "deleted b"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_disk_that_is_full_once_everything_is_applied(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "stages"], check=True)
    try:
        made = prepared(tmp_path)
        rest = tmp_path / "stages/rest"

        def fill() -> None:
            with pytest.raises(OSError), rest.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        with pytest.raises(StageError, match=r"everything was applied .* No space left"):
            made.apply(reached=at("commit", fill))
        made.assert_as_direct()
        rest.unlink()
        assert made.applied() == []
        made.assert_clean()
        made.assert_shown()
    finally:
        subprocess.run(["umount", tmp_path / "stages"], check=True)


def test_a_part_of_a_directory_is_undone(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo a > a")
    made.edit("mkdir -p n/m; echo 1 > n/m/1; echo 2 > n/m/2; echo 3 > n/3; rm a")
    before = content(made.workspace)
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    made.stages.recover(made.name)
    script = KILLER.replace("reached=reached)", "paths=['n/m/1', 'a'], reached=reached)")
    command = [sys.executable, "-c", script, str(made.stages.root), made.name, "1", "synced"]
    assert subprocess.run(command, cwd=REPOSITORY, timeout=60).returncode == -signal.SIGKILL
    assert content(made.workspace) != before
    made.stages.recover(made.name)
    assert content(made.workspace) == before
    made.assert_clean()


def at(point: str, action: Callable[[], object], nth: int = 1) -> Callable[[str], None]:
    """Runs the action when the n-th point of this name is reached."""
    left = nth

    def reached(what: str) -> None:
        nonlocal left
        if what == point:
            left -= 1
            if left == 0:
                action()

    return reached


# --- others at work at the same time


@pytest.mark.parametrize(
    ("point", "script", "path"),
    [
        ("copy", "echo late >> a", "a"),
        ("copy", "rm a; echo late > a", "a"),
        ("copy", "rm b; echo late > b", "b"),
        ("copy", "mkdir n; echo late > n/late", "n"),
        ("copy", "rm d/sub/y; rmdir d/sub; ln -s /tmp d/sub", "d/sub/z"),
        ("copy", "echo late > gone/late", "gone"),
        ("copy", "echo late >> gone/g", "gone"),
    ],
)
def test_others_between_the_look_and_the_step(tmp_path: Path, point: str, script: str, path: str) -> None:
    """They keep what they wrote, and nothing else is applied."""
    made = prepared(tmp_path, BASE + "; mkdir gone; echo g > gone/g", WORK + "rm -r gone")

    def late() -> None:
        subprocess.run(["sh", "-ec", script], cwd=made.workspace, check=True)

    with pytest.raises(ApplyConflictError) as caught:
        made.apply(reached=at(point, late))
    assert [os.fsdecode(path) for path, _ in caught.value.conflicts] == [path]
    made.assert_clean()
    subprocess.run(["rm", "-r", made.direct], check=True)
    made.direct.mkdir()
    subprocess.run(["sh", "-ec", BASE + "; mkdir gone; echo g > gone/g;" + script], cwd=made.direct, check=True)
    made.assert_as_direct()


def test_others_change_what_a_crash_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An undo loses nothing that was written after the crash, and says what it left."""
    made = prepared(tmp_path)
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    (made.workspace / "n/theirs").write_text("theirs")
    (made.workspace / "a").write_text("theirs, too")
    made.stages.recover(made.name)
    assert (made.workspace / "n/theirs").read_text() == "theirs"
    assert (made.workspace / "a").read_text() == "theirs, too"
    assert (made.workspace / "b").read_text() == "b\n"
    (kept,) = made.workspace.glob(".pvisor-apply-*")
    assert [path.read_text() for path in kept.iterdir() if path.is_file() and path.read_text() == "a\n"] == ["a\n"]
    assert "others have written meanwhile" in caplog.text and " n" in caplog.text


def test_an_immutable_file(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    old = content(made.workspace)

    def fix() -> None:
        subprocess.run(["chattr", "+i", made.workspace / "b"], check=True)

    try:
        with pytest.raises(StageError, match="b: Operation not permitted") as caught:
            made.apply(reached=at("copy", fix))
        assert "lsattr" in caught.value.hint
    finally:
        subprocess.run(["chattr", "-i", made.workspace / "b"], check=True)
    assert content(made.workspace) == old
    made.assert_clean()


def test_somebody_removes_what_an_undo_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = prepared(tmp_path)
    assert killed_at(made, 1, "synced") == -signal.SIGKILL
    (place,) = made.workspace.glob(".pvisor-apply-*")
    subprocess.run(["rm", "-r", place], check=True)
    made.stages.recover(made.name)
    assert f"somebody has removed {place.name}" in caplog.text
    made.assert_clean()


def test_a_file_that_changes_while_it_is_copied(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    with made.mounted() as merged:
        before = trees.found(made.workspace)
        with pytest.raises(StageBusyError, match="changed in the stage while it was copied"):
            made.apply(reached=at("place", lambda: (merged / "n/m/n").write_text("later")))
        assert trees.found(made.workspace).keys() == before.keys()
        made.assert_clean()
        assert (merged / "n/m/n").read_text() == "later"
    made.apply()
    assert (made.workspace / "n/m/n").read_text() == "later"


def test_while_the_stage_runs(tmp_path: Path) -> None:
    """A process of the stage sees its own files on, and what it writes after the apply is pending."""
    made = prepared(tmp_path)
    with made.mounted() as merged, open(merged / "a", "a") as file:
        made.apply()
        made.assert_as_direct()
        file.write("later\n")
        file.flush()
        assert (merged / "a").read_text() == "a\nmore\nlater\n" and (merged / "d/moved").read_text() == "x\n"
        assert (made.workspace / "a").read_text() == "a\nmore\n"
        assert made.applied() == ["modified a"]
    made.assert_shown()


@pytest.mark.parametrize("where", ["host", "stage"])
def test_links_swapped_under_an_apply(tmp_path: Path, where: str) -> None:
    """Somebody swaps directories for links to a directory outside as fast as they can: nothing gets there."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("safe")
    before = trees.found(outside)
    made = staged(tmp_path / "s", "mkdir d; echo v > d/victim; for i in 1 2 3 4 5 6 7 8; do echo $i > d/$i; done")
    made.edit("for i in 1 2 3 4 5 6 7 8; do echo more >> d/$i; done; echo new > d/new; rm d/victim")
    top = made.workspace if where == "host" else made.files.workspace_upper
    (tmp_path / "link").symlink_to(outside)
    ended = threading.Event()
    fd = os.open(tmp_path, os.O_RDONLY)

    def swap() -> None:
        while not ended.is_set():
            linux.rename_at(fd, b"link", fd, os.fsencode(top / "d"), linux.RENAME_EXCHANGE)

    thread = threading.Thread(target=swap)
    thread.start()
    tries = 0
    try:
        while tries < 15:
            tries += 1
            try:
                made.apply()
            except (StageError, NotFoundError):
                continue
    finally:
        ended.set()
        thread.join()
        os.close(fd)
    assert trees.found(outside) == before
    made.stages.recover(made.name)


def test_a_link_put_in_place_between_the_look_and_the_step(tmp_path: Path) -> None:
    """The moment at which an attack by timing would succeed: everything is checked, nothing has moved yet."""
    outside = tmp_path / "outside"
    outside.mkdir()
    made = staged(tmp_path / "s", "mkdir d; echo x > d/x; echo y > d/y")
    made.edit("echo new > d/new; rm d/x; echo more >> d/y")
    for name in ("x", "y"):
        os.link(made.workspace / "d" / name, outside / name)
    made.stages.drop(made.name)
    made.edit("echo new > d/new; rm d/x; echo more >> d/y")
    before = trees.found(outside)

    def swap() -> None:
        (made.workspace / "d").rename(tmp_path / "aside")
        (made.workspace / "d").symlink_to(outside)

    with pytest.raises(ApplyConflictError, match="when its turn came"):
        made.apply(reached=at("copy", swap))
    assert trees.found(outside) == before and sorted(outside.iterdir()) == [outside / "x", outside / "y"]
    (made.workspace / "d").unlink()
    (tmp_path / "aside").rename(made.workspace / "d")
    made.assert_clean()
    assert sorted(path.name for path in (made.workspace / "d").iterdir()) == ["x", "y"]


def test_a_link_on_the_way(tmp_path: Path) -> None:
    """Proof that the attack of the test above would work on a path that is walked by name."""
    outside = tmp_path / "outside"
    outside.mkdir()
    made = staged(tmp_path / "s", "mkdir d; echo x > d/x")
    made.edit("echo new > d/new; rm d/x")
    subprocess.run(["rm", "-r", made.workspace / "d"], check=True)
    (made.workspace / "d").symlink_to(outside)
    (made.workspace / "d/probe").write_text("a path that is followed leads out")
    assert (outside / "probe").exists()
    conflicts(made)
    assert [path.name for path in outside.iterdir()] == ["probe"]


def test_a_link_in_the_stage_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    made = staged(tmp_path / "s", "echo a > a")
    made.edit(f"ln -s {outside} d; rm a; ln -s {outside}/secret a")
    made.apply()
    assert (made.workspace / "a").is_symlink() and (made.workspace / "d").is_symlink()
    assert [path.name for path in outside.iterdir()] == ["secret"]
    made.edit("rm d a; mkdir d; echo inside > d/secret")
    made.apply()
    assert (outside / "secret").read_text() == "secret" and (made.workspace / "d/secret").read_text() == "inside\n"


def test_a_host_file_with_a_name_outside_is_not_written(tmp_path: Path) -> None:
    made = staged(tmp_path / "s", "echo a > a; echo b > b")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("a", "b"):
        os.link(made.workspace / name, outside / name)
    made.stages.drop(made.name)
    made.edit("echo more >> a; chmod 666 b")
    before = trees.found(outside)
    made.apply()
    after = trees.found(outside)
    assert [row[:4] + row[6:] for row in after.values()] == [row[:4] + row[6:] for row in before.values()]
    assert (made.workspace / "a").read_text() == "a\nmore\n" and (made.workspace / "b").stat().st_mode & 0o777 == 0o666


def test_a_mount_inside_the_workspace(tmp_path: Path) -> None:
    made = staged(tmp_path, BASE)
    made.edit("echo more >> d/x; echo more >> a")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", made.workspace / "d"], check=True)
    try:
        assert conflicts(made) == {"d/x": "is on a file system that is mounted inside the workspace"}
        assert made.applied("a") == ["modified a"]
    finally:
        subprocess.run(["umount", made.workspace / "d"], check=True)
    assert made.applied() == ["modified d/x"]


def test_applies_wait_for_each_other(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    before, order = content(made.workspace), list[str]()

    def apply() -> None:
        made.apply()
        order.append("applied")

    with held(made.workspace):
        with pytest.raises(StageBusyError, match="another process holds"), held(made.workspace, wait_s=0.05):
            order.append("never")
        thread = threading.Thread(target=apply)
        thread.start()
        eventually(lambda: is_waited_for(made.workspace))
        assert content(made.workspace) == before
        order.append("held")
    thread.join(timeout=30)
    assert order == ["held", "applied"]
    made.assert_as_direct()


def is_waited_for(directory: Path) -> bool:
    """Whether a process waits for a lock of this directory that another has; proc_locks(5)."""
    inode = str(directory.stat().st_ino)
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(line[1] == "->" and line[6].rpartition(":")[2] == inode for line in lines)


def used(function: Callable[[], Applied]) -> tuple[float, Applied]:
    """Processor time, and the result."""
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result


@pytest.mark.slow
def test_ten_thousand_files(tmp_path: Path) -> None:
    work = "for d in $(seq 100); do mkdir -p t$d; for f in $(seq 100); do echo $f > t$d/$f; done; done"
    made = prepared(tmp_path, "mkdir t1; for f in $(seq 50); do echo old > t1/$f; done", work)
    fewer = prepared(tmp_path / "fewer", "", work.replace("seq 100", "seq 10", 1))
    few, _ = used(fewer.apply)
    many, result = used(made.apply)
    assert len(result.changes) == 10_099
    assert many < 30 * few, f"{many} s for ten times what took {few} s"
    made.assert_as_direct()
    assert made.applied() == []
    made.both("rm -r t1 t2; for d in $(seq 3 99); do mv t$d u$d; done; chmod 600 u5/*")
    made.apply()
    made.assert_as_direct()
    made.assert_shown()


@pytest.mark.fuse
def test_the_command(tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    subprocess.run(["sh", "-ec", BASE], cwd=workspace, check=True)
    with host(tmp_path / "host") as local:
        local.run("convert", f"oci:{busybox_layout(tmp_path)}:v1")
        local.run("run", "--stage", "fix", "--workspace", str(workspace), "box:v1", "--", "sh", "-ec", WORK)
        assert local.json("stage", "apply", "fix", "a", "--dry-run") == {
            "stage": "fix",
            "dry_run": True,
            "applied": [{"path": "a", "kind": "modified"}],
            "conflicts": [],
        }
        (workspace / "b").write_text("theirs")
        (workspace / "link").unlink()
        told = local.run("stage", "apply", "fix", code=1).stderr.decode()
        assert "conflict: b was changed on the host since the stage began\n" in told
        assert f"pvisor: error: nothing was applied to {workspace}: 1 conflict\n" in told and "hint: " in told
        assert told.count("was changed on the host") == 1
        said = local.json("stage", "apply", "fix", code=1)
        assert [conflict["path"] for conflict in said["conflicts"]] == ["b"] and said["applied"] == []
        assert (workspace / "a").read_text() == "a\n"
        shown = local.run("stage", "apply", "fix", "a", "/workspace/d", f"{workspace}/n").stdout.decode()
        assert shown.splitlines() == [
            "modified  a",
            "mode  d",
            "renamed  d/x -> d/moved",
            "added  d/sub/z",
            "added  n",
            "added  n/m",
            "added  n/m/n",
        ]
        again = local.run("stage", "apply", "fix", "a")
        assert (again.stdout, again.stderr) == (b"", b"nothing to apply\n")
        assert local.json("stage", "apply", "fix", "a")["applied"] == []
        assert "nowhere is neither in the workspace" in local.error("stage", "apply", "fix", "nowhere")
        local.run("stage", "drop", "fix")
        assert "no stage 'fix'" in local.error("stage", "apply", "fix")
