"""Applies one after the other, and to a host that went on: what pVisor did itself is in nobody's way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stage.errors import ApplyConflictError
from stage.review import workspace_review
from tests.support.staged import Staged, staged

pytestmark = pytest.mark.root


def on_host(made: Staged, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=made.workspace, check=True)


# Work in the stage, and what is applied after each.
ROUNDS: dict[str, tuple[str, list[tuple[str, list[str]]]]] = {
    "a link made, removed, and the other name changed": (
        "mkdir q; echo 1 > q/a",
        [("ln q/a q/l", []), ("rm q/l", []), ("echo x >> q/a", [])],
    ),
    "new names of one file, one by one": (
        "",
        [("echo n > n; ln n m", []), ("echo q >> n", ["n"]), ("true", ["m"])],
    ),
    "new names removed one by one": ("", [("echo n > n; ln n m", []), ("rm n", ["n"]), ("rm m", ["m"])]),
    "names of the host's removed, another one changed": (
        "echo x > x; ln x y; ln x z",
        [("rm z", []), ("echo more >> x", []), ("rm y", ["y"])],
    ),
    "names in a directory that goes": (
        "mkdir d; echo x > d/x; ln d/x y; ln d/x d/z",
        [("rm -r d", []), ("echo more >> y", [])],
    ),
    "one more name of what has several": ("echo x > x; ln x y", [("ln x z", []), ("chmod 600 y; echo 2 >> y", ["y"])]),
    "a name renamed": ("echo x > x; ln x y", [("mv x z", []), ("echo more >> y", ["y"]), ("rm z", ["z"])]),
    "links that are symbolic": ("ln -s t x; ln x y; ln x z", [("rm z", []), ("ln -sfn u x", ["x"]), ("rm y", [])]),
    "pipes": ("mkfifo x; ln x y", [("rm x", []), ("chmod 600 y", [])]),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_names_of_one_file_in_several_applies(tmp_path: Path, case: str) -> None:
    base, rounds = ROUNDS[case]
    made = staged(tmp_path, base)
    for work, paths in rounds:
        made.edit(work)
        made.apply(*paths)
    made.apply()
    made.assert_shown()
    assert made.applied() == []
    made.assert_clean()


def test_others_work_on_such_names_is_still_in_the_way(tmp_path: Path) -> None:
    made = staged(tmp_path, "echo x > x; ln x y; ln x z")
    made.edit("rm z")
    made.apply()
    on_host(made, "chmod 600 y")
    made.edit("echo more >> x")
    with pytest.raises(ApplyConflictError, match="was changed on the host"):
        made.apply()


def test_an_apply_that_fails_changes_no_identity(tmp_path: Path) -> None:
    """The place has a further name of the host's file for a moment, and the kernel notes that."""
    made = staged(tmp_path, "echo a > a; echo b > b")
    made.edit("ln a l; echo more >> b")

    def fail(point: str) -> None:
        if point == "copy":
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            made.apply(reached=fail)
    made.edit("echo more >> a")
    made.apply()
    made.assert_shown()
    made.assert_clean()


def test_a_directory_renamed_over_an_empty_one(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir -p A/b T; echo f > A/b/f; echo g > A/g")

    def work(top: Path) -> None:
        os.rename(top / "A", top / "T")  # noqa: PTH104
        (top / "T/b/new").write_text("w\n")

    made.both_do(work)
    made.apply()
    made.assert_as_direct()
    made.assert_shown()
    assert made.applied() == []


def test_a_directory_renamed_over_a_file_that_was_removed(tmp_path: Path) -> None:
    made = staged(tmp_path, "mkdir -p A/b; echo f > A/b/f; echo t > T")
    made.both("rm T; mv A T; echo new > T/b/new")
    made.apply()
    made.assert_as_direct()
    made.assert_shown()


@pytest.mark.parametrize(
    ("base", "work"),
    [
        ("ln -s t a; ln a b; ln a c", "chown -h 5:6 a"),
        ("ln -s t a; ln a b", "chown -h 5:6 a; rm a"),
        ("mkfifo a; ln a b; mkdir d; ln a d/c", "chmod 600 d/c; chown 7 a"),
        ("python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"a\")'; ln a b", "chmod 711 a; mv b c"),
        ("echo a > a; ln a b", "touch -d @1000000001 a; rm a"),
        ("echo a > a; ln a b; ln a c", "touch -d @1000000001 a; rm a"),
        ("ln -s t a; ln a b", "touch -h -d @1000000001 a; rm a"),
        ("mkfifo a; ln a b", "touch -d @1000000001 b; mv a c"),
    ],
)
def test_a_change_by_one_name_is_one_of_all(tmp_path: Path, base: str, work: str) -> None:
    made = staged(tmp_path, base)
    made.both(work)
    made.apply()
    made.assert_as_direct()
    made.assert_shown()
    mine, theirs = (
        {path.name: path.lstat().st_mtime_ns for path in top.iterdir() if not path.is_dir()}
        for top in (made.workspace, made.direct)
    )
    assert mine == theirs or "touch" not in work
    assert made.applied() == []


def test_a_new_directory_over_what_others_made(tmp_path: Path) -> None:
    """Both made one of the same name: what the stage has comes to what others have, which it never saw."""
    made = staged(tmp_path, "mkdir old; echo o > old/o")
    made.edit("mkdir -p k/sub; echo 1 > k/1; echo s > k/sub/s; rm -r old; mkdir old; echo n > old/n")
    on_host(made, "mkdir -p k/sub k/deep/er; echo 2 > k/2; echo t > k/sub/t; echo d > k/deep/er/d")
    assert made.applied("k/1") == ["added k/1"]
    on_host(made, "echo 3 > k/3")
    assert sorted(made.applied()) == ["added k/sub/s", "added old/n", "deleted old/o"]
    on_host(made, "echo 4 > k/sub/4")
    assert made.applied() == []
    names = sorted(str(path.relative_to(made.workspace)) for path in made.workspace.rglob("*"))
    mine = ["k/1", "k/sub/s", "old", "old/n"]
    assert names == sorted(
        [*mine, "k", "k/2", "k/3", "k/deep", "k/deep/er", "k/deep/er/d", "k/sub", "k/sub/t", "k/sub/4"]
    )
    made.edit("rm k/1; rm -r k/sub; mkdir k/sub")
    assert made.applied() == ["deleted k/1", "deleted k/sub/s"]
    assert (made.workspace / "k/sub/t").read_text() == "t\n"


def test_a_new_directory_that_only_others_made_of_what_was_applied(tmp_path: Path) -> None:
    made = staged(tmp_path, "true")
    made.edit("mkdir k; echo 1 > k/1; echo 2 > k/2")
    assert made.applied("k/1") == ["added k", "added k/1"]
    on_host(made, "echo 3 > k/3")
    assert made.applied() == ["added k/2"]
    assert made.applied() == []


def test_a_file_system_that_knows_no_birth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuse.linux.born_ns", lambda fd: None)
    made = staged(tmp_path, "mkdir d; echo x > d/x")
    made.edit("mkdir k; echo 1 > k/1; rm -r d; mkdir d; echo n > d/n")
    on_host(made, "mkdir k; echo 2 > k/2; echo 2 > d/theirs")
    with pytest.raises(ApplyConflictError, match="d/theirs"):
        made.apply()
    assert made.applied("k") == ["added k/1"]


@pytest.mark.parametrize("name", [".pvisor-apply-0123456789abcdef", ".pvisor-apply-x", ".pvisor-applyx"])
def test_names_like_those_of_an_apply(tmp_path: Path, name: str) -> None:
    """They are shown as all others are, and what could be taken for pVisor's own is not applied."""
    made = staged(tmp_path, "true")
    made.edit(f"mkdir -m 700 {name}; echo hidden > {name}/a; echo b > b")
    with workspace_review(made.stages, made.name) as shown:
        assert os.fsencode(name) + b"/a" in [change.path for change in shown.changes]
    if len(name) < 20:
        assert made.applied() == [f"added {name}", f"added {name}/a", "added b"]
        return
    with pytest.raises(ApplyConflictError) as caught:
        made.apply()
    assert [path for path, _ in caught.value.conflicts] == [os.fsencode(name), os.fsencode(name) + b"/a"]
    assert made.applied("b") == ["added b"]
