"""How much a stage wrote, and its way to the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stage.kept.removal import remove_tree
from stage.kept.writes import sync, written_bytes


def test_bytes_on_the_disk(tmp_path: Path) -> None:
    first, second, none = tmp_path / "first", tmp_path / "second", tmp_path / "none"
    for directory in (first, second):
        directory.mkdir()
    assert written_bytes([first, second, none]) == 0
    (first / "dir").mkdir()
    empty = written_bytes([first])
    (first / "dir/file").write_bytes(bytes(range(256)) * 400)
    size = (first / "dir/file").stat().st_blocks * 512
    assert size >= 102_400 and written_bytes([first]) == empty + size
    os.link(first / "dir/file", second / "again")  # counted once
    assert written_bytes([first, second]) == empty + size
    (second / "link").symlink_to("/" + "a" * 50)  # a longer text would take a block
    (first / "dir/loop").symlink_to("..")
    with (second / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert written_bytes([first, second]) == empty + size


def test_a_tree_deeper_than_paths_are_long(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert written_bytes([tmp_path]) > 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    remove_tree(tmp_path / "deep")  # deeper than pytest can remove


def test_sync(tmp_path: Path) -> None:
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")
