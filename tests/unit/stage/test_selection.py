"""Paths that a user gives, as the host or the stage names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from imaged.errors import PvisorError
from stage.edits.selection import listed, relative, within
from stage.errors import ArgumentError

TOPS = [b"/home/me/project", b"/workspace"]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (b"src/main.py", b"src/main.py"),
        (b"./src//main.py/", b"src/main.py"),
        (b"src/../lib", b"lib"),
        (b"/workspace/src", b"src"),
        (b"/home/me/project/src/", b"src"),
        (b"/workspace", b"."),
        (b".", b"."),
        (b"..data", b"..data"),
    ],
)
def test_relative(given: bytes, path: bytes) -> None:
    assert relative(given, TOPS, "the workspace") == path


@pytest.mark.parametrize("given", [b"..", b"../x", b"a/../../x", b"/etc", b"/workspaces", b"/workspace/../etc"])
def test_paths_that_lead_out(given: bytes) -> None:
    with pytest.raises(PvisorError, match="is not in the workspace"):
        relative(given, TOPS, "the workspace")


@pytest.mark.parametrize("given", [b"", b"a\0b"])
def test_what_is_no_path(given: bytes) -> None:
    with pytest.raises(ArgumentError):
        relative(given, TOPS, "the workspace")


def test_one_path_alone_is_one_path() -> None:
    assert listed("src") == listed(b"src") == listed(Path("src")) == listed(["src"]) == [b"src"]
    assert listed(()) == []
    for given in ([3], 3, None):
        with pytest.raises(ArgumentError):
            listed(given)  # type: ignore[arg-type]


def test_everything_absolute_is_in_the_image() -> None:
    assert relative(b"/etc/hosts", [b"/"], "the image") == b"etc/hosts"
    assert relative(b"/", [b"/"], "the image") == b"."


def test_within() -> None:
    assert within(b"a/b", b"a") and within(b"a", b"a") and within(b"a", b".") and not within(b"ab", b"a")
