"""What the kernel's overlay leaves in an upper directory, told as changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse import linux
from stage.edits.changes import Change, Kind, Overlay, changes
from stage.edits.patch import patch
from stage.edits.tree import ROOT, Node, Tree
from stage.edits.visible import visible
from tests.support.overlay import Layers, layers, over_image, run

pytestmark = pytest.mark.root

BASE = """
mkdir -p d/sub e empty; echo a > a; echo b > b; echo x > d/x; echo y > d/sub/y; echo z > e/z; ln -s a link
echo one > one; ln one two; ln one e/three
"""
D_DELETED = ["deleted d", "deleted d/sub", "deleted d/sub/y", "deleted d/x"]
LINKED = ["modified e/three", "modified one", "modified two"]
# In the overlay; what is told of it.
CASES: dict[str, tuple[str, list[str]]] = {
    "nothing": ("cat a d/x; ls -R", []),
    "added": (
        "echo n > n; mkdir -p m/k; ln -s q l; mkfifo f",
        ["added f", "added l", "added m", "added m/k", "added n"],
    ),
    "deleted": ("rm a link", ["deleted a", "deleted link"]),
    "modified": ("echo more >> a; ln -sfn b link", ["modified a", "modified link"]),
    "same size": ("printf 'c\n' > a", ["modified a"]),
    "written as it was": ("cp a t; cat t > a; mv t a; rm d/x; echo x > d/x", []),
    "touched": ("touch a; touch -h link", []),
    "mode": ("chmod +x a; chmod 700 d; chown 5 b", ["mode a", "mode b", "mode d"]),
    "attribute": ("setfattr -n user.k -v v a", ["mode a"]),
    "type": ("rm a link; mkdir a; echo i > a/i; echo l > link", ["type a", "added a/i", "type link"]),
    "directory to file": ("rm -r d; echo d > d", ["type d", *D_DELETED[1:]]),
    "directory deleted": ("rm -r d", D_DELETED),
    "directory made anew": (
        "rm -r d; mkdir d; echo w > d/w",
        ["deleted d/sub", "deleted d/sub/y", "added d/w", "deleted d/x"],
    ),
    "directory as it was": ("cp -a d t; rm -r d; mv t d", []),
    "file renamed": ("mv a n", ["renamed a -> n"]),
    "file renamed and changed": ("mv a n; echo more >> n", ["renamed a -> n"]),
    "file copied, original deleted": ("cp b n; rm b", ["renamed b -> n"]),
    "file renamed over another": ("mv a b", ["deleted a", "modified b"]),
    "file moved into a new directory": ("mkdir n; mv d/x n", ["added n", "renamed d/x -> n/x"]),
    "link renamed": ("mv link n", ["renamed link -> n"]),
    "directory renamed": ("mv d n", ["renamed d -> n"]),
    "directory renamed twice": ("mv d t; mv t n", ["renamed d -> n"]),
    "directory renamed and back": ("mv d t; mv t d", []),
    "directory moved": ("mv d e/n", ["renamed d -> e/n"]),
    "work in a renamed directory": (
        "mv d n; echo more >> n/x; rm n/sub/y; echo w > n/w",
        ["renamed d -> n", "deleted n/sub/y", "added n/w", "modified n/x"],
    ),
    "moved out of a renamed directory": ("mv d n; mv n/sub s", ["renamed d -> n", "renamed d/sub -> s"]),
    "new one in the place": ("mv d n; mkdir d; echo w > d/w", ["added d", "added d/w", "renamed d -> n"]),
    "renamed to a name that was there": (
        "rm -r e; mv d e",
        [
            *["deleted d", "deleted d/sub", "added e/sub", "renamed d/sub/y -> e/sub/y"],
            *["deleted e/three", "renamed d/x -> e/x", "deleted e/z"],
        ],
    ),
    "hard link changed by one name": ("echo more >> two", LINKED),
    "hard link changed, then deleted": ("echo more >> two; rm two", [*LINKED[:2], "deleted two"]),
    "hard link in a renamed directory": (
        "echo more >> two; mv e n",
        ["renamed e -> n", "modified n/three", *LINKED[1:]],
    ),
    "hard link in a deleted directory": (
        "echo more >> two; rm -r e",
        ["deleted e", "deleted e/three", "deleted e/z", *LINKED[1:]],
    ),
    "hard link deleted": ("rm one", ["deleted one"]),
    "hard link of an unchanged file": ("ln a n", ["added n"]),
    "hard link of a changed file": ("ln a n; echo more >> a", ["modified a", "added n"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_told(tmp_path: Path, case: str) -> None:
    script, expected = CASES[case]
    made = layers(tmp_path, BASE)
    made.edit(script)
    assert made.told() == expected


def test_over_an_image(tmp_path: Path) -> None:
    """There a directory is renamed by copying it, and a file with several names is several files when it changes."""
    made = over_image(tmp_path, BASE)
    made.edit("mv d n; echo more >> two")
    assert made.told() == [
        "deleted d",
        "deleted d/sub",
        "added n",
        "added n/sub",
        "renamed d/sub/y -> n/sub/y",
        "renamed d/x -> n/x",
        "modified two",
    ]


def by_path(made: Layers) -> dict[bytes, Change]:
    return {change.path: change for change in made.changes()}


def test_the_directory_of_an_apply_is_no_change(tmp_path: Path) -> None:
    place = ".pvisor-apply-0123456789abcdef"
    made = layers(tmp_path, f"mkdir -pm 700 {place} d; echo a > {place}/a")
    made.edit(f"rm -r {place}; echo a > d/{place}; echo a > .pvisor-apply-1; mkdir .pvisor-apply-0123456789abcdee")
    assert made.told() == ["added .pvisor-apply-0123456789abcdee", "added .pvisor-apply-1", f"added d/{place}"]
    (made.base / place).rename(made.base / "elsewhere")
    made.edit(f"mkdir {place}; echo hidden > {place}/a")
    assert f"added {place}/a" in made.told()


def test_times_alone_are_kept_for_an_apply(tmp_path: Path) -> None:
    made = layers(tmp_path, BASE)
    made.edit("touch -d @1000000000 a; chmod +x b; touch -d @1000000000 b")
    found = by_path(made)
    assert found[b"a"].kind is Kind.TIMES and found[b"a"].same_content
    assert found[b"a"].new is not None and found[b"a"].new.mtime_ns == 10**18
    assert found[b"b"].kind is Kind.MODE


def test_the_top_directory(tmp_path: Path) -> None:
    """It starts with everything that the base's has, so that only what the stage does to it is a change."""
    made = layers(tmp_path, "setfattr -n user.k -v v .; setfacl -d -m u:7:rwx .; chmod 750 .; touch -d @1000000000 .")
    made.edit("touch n; rm n; touch -d @1000000000 .")
    assert made.changes() == []
    made.edit("getfacl -n --omit-header . | grep -q default:user:7; chmod 700 .")
    assert [(change.path, change.kind) for change in made.changes()] == [(ROOT, Kind.MODE)]


def test_names_of_one_file_go_together(tmp_path: Path) -> None:
    made = layers(tmp_path, BASE)
    made.edit("echo more >> two; ln a n")
    found = by_path(made)
    assert found[b"one"].links == (b"e/three", b"two") and found[b"two"].links == (b"e/three", b"one")
    assert found[b"n"].links == (b"a",) and found.get(b"a") is None
    assert found[b"one"].new is not None
    with made.overlay() as overlay:
        nodes = {change.path: change.new for change in changes(overlay)}
        assert [read(nodes[name]) for name in (b"one", b"e/three")] == [b"one\nmore\n"] * 2


def read(node: Node | None) -> bytes:
    assert node is not None
    with open(node.open(), "rb") as file:
        return file.read()


def test_any_bytes_in_names_and_long_paths(tmp_path: Path) -> None:
    made = layers(tmp_path, "")
    names = [b"new\nline", b"\xff\xfe", b" ", b"-n", b"n" * 255]

    def work(merged: Path) -> None:
        for name in names:
            (merged / os.fsdecode(name)).write_bytes(b"x")
        here = os.open(merged, os.O_RDONLY)
        for _ in range(30):  # a path of more than 4096 bytes
            os.mkdir(b"d" * 200, dir_fd=here)
            below = os.open(b"d" * 200, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open(b"bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here))
        os.close(here)

    made.edit_with(work)
    with made.overlay() as overlay:
        found = [change.path for change in changes(overlay) if change.kind is not Kind.TIMES]
        texts = [patch(change).text for change in visible(changes(overlay), overlay.lower)]
    deep = [b"/".join([b"d" * 200] * depth) for depth in range(1, 31)]
    assert found == sorted([*names, *deep, deep[-1] + b"/bottom"])
    assert sum(b"new file mode" in text for text in texts) == len(names) + 1


def test_what_the_workspace_has_of_overlayfs_means_nothing(tmp_path: Path) -> None:
    """Attributes and whiteouts of the host's own, such as a workspace that was once an upper directory has."""
    made = layers(tmp_path, "mkdir -p d e secret; echo x > d/x; echo s > secret/s; mknod gone c 0 0")
    os.setxattr(made.base / "d", "trusted.overlay.redirect", b"/secret")
    os.setxattr(made.base / "e", "trusted.overlay.opaque", b"y")
    with made.mounted() as merged:
        run("ls d | grep -qx x; test ! -e gone; touch d/n gone", merged)
    assert made.told() == ["added d/n", "added gone"]


def test_a_mount_inside_the_workspace_is_not_in_the_overlay(tmp_path: Path) -> None:
    made = layers(tmp_path, "mkdir -p d; echo x > d/x")
    linux.mount("tmpfs", made.base / "d", "tmpfs")
    try:
        (made.base / "d/other").write_text("other")
        made.edit("test ! -e d/other; echo n > d/n; rm d/x")
        assert made.told() == ["added d/n", "deleted d/x"]
    finally:
        linux.umount(made.base / "d")


def test_a_file_system_without_file_handles(tmp_path: Path) -> None:
    """An overlay is one. There is no index then, so one name of several changes alone; the review says so."""
    inner = layers(tmp_path / "inner", BASE)
    with inner.mounted() as base:
        outer = Layers(tmp_path / "outer")
        outer.root.mkdir()
        outer.base.symlink_to(base)
        outer.edit("echo more >> two; mv d n; mv a m")
        assert outer.told() == ["renamed a -> m", "renamed d -> n", "modified two"]
        with outer.overlay() as overlay:
            notes = [note for change in visible(changes(overlay), overlay.lower) for note in patch(change).notes]
        assert notes == [b"directory renamed: d -> n", b"hard link broken: two was one of 3 names of a file"]


def test_directories_swapped_for_links_are_not_followed(tmp_path: Path) -> None:
    """A process of the stage may do that at any moment, also between the look at the tree and that at a file."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x").write_text("secret")
    made = layers(tmp_path / "layers", "mkdir d; echo x > d/x")
    made.edit("echo more >> d/x; mkdir n; echo x > n/x; touch b")
    with made.overlay() as overlay:
        found = visible(changes(overlay), overlay.lower)
        for directory in (made.upper / "d", made.upper / "n", made.base / "d"):
            directory.rename(directory.with_name(directory.name + ".away"))
            directory.symlink_to(secret)
        (made.upper / "b").unlink()
        (made.upper / "b").symlink_to(secret / "x")
        assert not any(b"secret" in patch(change).rendered for change in found)
        assert [change.path for change in found] == [b"b", b"d/x", b"n/x"]
        assert overlay.upper.node(b"d/x") is None and overlay.upper.names(b"d") == []
        with pytest.raises(OSError, match="symbolic links"):
            overlay.upper.open_file(b"b")


def test_devices_and_pipes_are_never_opened(tmp_path: Path) -> None:
    """A file that is swapped for one after the look at the tree is no file any more, and is not waited for."""
    made = layers(tmp_path, "echo a > a; echo b > b")
    made.edit("echo more >> a; echo more >> b")
    with made.overlay() as overlay:
        found = visible(changes(overlay), overlay.lower)
        run("rm a b; mknod a c 240 1; mkfifo b", made.upper)
        for name in (b"a", b"b"):
            with pytest.raises(OSError, match="not a regular file"):
                overlay.upper.open_file(name)
        assert [patch(change).removed_lines for change in found] == [1, 1]


def test_what_is_settled_is_left_out(tmp_path: Path) -> None:
    made = layers(tmp_path, BASE)
    made.edit("echo more >> a; rm b; rm -r d; mkdir d; echo n > d/n; echo m > m")
    asked: dict[bytes, bool] = {}

    def settled(path: bytes, upper: Node | None) -> bool:
        asked[path] = upper is not None
        return path in (b"a", b"b", b"d/sub")

    told = [change.path for change in made.changes(settled) if change.kind is not Kind.TIMES]
    assert told == [b"d/n", b"d/x", b"m"]
    assert asked == {
        ROOT: True,
        b"a": True,
        b"b": True,
        b"d": True,
        b"d/n": True,
        b"d/sub": False,
        b"d/x": False,
        b"m": True,
    }


class Counts:
    """Directory entries read, and names looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries = self.lookups = 0
        real_scandir, real_stat = os.scandir, os.stat

        class Counted:
            def __init__(self, fd: Any) -> None:
                self._real = real_scandir(fd)

            def __enter__(self) -> Counted:
                return self

            def __exit__(self, *_: object) -> None:
                self._real.close()

            def __iter__(inner) -> Iterator[Any]:  # noqa: N805
                for entry in inner._real:
                    self.entries += 1
                    yield entry

        def counted_stat(*arguments: Any, **options: Any) -> os.stat_result:
            self.lookups += 1
            return real_stat(*arguments, **options)

        monkeypatch.setattr(os, "scandir", Counted)
        monkeypatch.setattr(os, "stat", counted_stat)


@pytest.mark.slow
def test_the_cost_follows_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    costs = []
    linux.mount("tmpfs", tmp_path, "tmpfs")  # where so many files are made soon
    request.addfinalizer(lambda: linux.umount(tmp_path))
    for count in (2_000, 100_000):
        made = layers(tmp_path / str(count), "")
        for number in range(count):
            if number % 200 == 0:
                directory = made.base / f"{number // 200 % 10}" / f"{number // 200}"
                directory.mkdir(parents=True)
            os.close(os.open(directory / f"{number}", os.O_WRONLY | os.O_CREAT))
        made.edit(
            "for n in 1 2 3 4 5; do echo more >> $n/$n/$((n * 200)); rm $n/$n/$((n * 200 + 1)); done;"
            "mv 1/1/299 1/1/n; mv 6/6 7/n"
        )
        with monkeypatch.context() as patched, made.overlay() as overlay:
            counted = Counts(patched)
            told = [change for change in changes(overlay) if change.kind is not Kind.TIMES]
            costs.append((len(told), counted.entries, counted.lookups))
    assert costs[0] == costs[1]
    assert costs[0][0] > 5 and costs[0][1] < 50


def test_an_upper_that_vanishes_while_it_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers(tmp_path, "mkdir d")
    made.edit("echo n > d/n; echo m > m; mkdir k; echo q > k/q")
    names = Tree.names

    def and_remove(tree: Tree, path: bytes) -> list[bytes]:
        found = names(tree, path)
        if tree.path == made.upper and path == ROOT:
            run("rm -r d/n m k", made.upper)
        return found

    monkeypatch.setattr(Tree, "names", and_remove)
    assert made.told() == []


def test_overlay_of_nothing_written(tmp_path: Path) -> None:
    made = layers(tmp_path, BASE)
    with made.mounted():
        pass
    with Overlay.opened(upper=made.upper, lower=made.base, work=made.work) as overlay:
        assert list(changes(overlay)) == []
