"""Which pages differ from a parent's, as far as the page cache tells."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from random import Random

import pytest

from vmm.parentfile import ParentFile

PAGE = mmap.PAGESIZE
WHOLE = Random(1).randbytes(32 * PAGE)


def changed(*pages: int, length: int = len(WHOLE)) -> bytes:
    data = bytearray(WHOLE)
    for page in pages:
        data[page * PAGE + 7] ^= 1
    return bytes(data[:length])


def test_runs_of_pages_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE)
    data = changed(0, 1, 5, 31)
    with ParentFile.open(path) as before:
        assert list(before.different(0, WHOLE)) == []
        found = list(before.different(0, data))
        assert found == [
            (first * PAGE, data[first * PAGE : (last + 1) * PAGE]) for first, last in [(0, 1), (5, 5), (31, 31)]
        ]
        assert list(before.different(4 * PAGE, data[4 * PAGE : 6 * PAGE])) == [(5 * PAGE, data[5 * PAGE : 6 * PAGE])]
        assert list(before.different(PAGE, data[:PAGE])) == [(PAGE, data[:PAGE])]


def test_a_short_last_page(tmp_path: Path) -> None:
    path, length = tmp_path / "file", 3 * PAGE - 100
    path.write_bytes(WHOLE[:length])
    with ParentFile.open(path) as before:
        assert list(before.different(0, WHOLE[:length])) == []
        data = changed(2, length=length)
        assert list(before.different(0, data)) == [(2 * PAGE, data[2 * PAGE :])]


def test_what_is_not_cached_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as stream:
        stream.write(WHOLE[:PAGE])
        stream.truncate(len(WHOLE))  # holes are in nobody's cache
    data = WHOLE[:PAGE] + bytes(3 * PAGE)
    with ParentFile.open(path) as before:
        assert list(before.different(0, data)) == [(PAGE, bytes(3 * PAGE))]


def test_what_is_past_the_end_differs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE[:PAGE])
    with ParentFile.open(path) as before:
        assert list(before.different(PAGE, WHOLE[PAGE:])) == [(PAGE, WHOLE[PAGE:])]


@pytest.mark.parametrize("name", [None, "absent", "empty"])
def test_without_a_file_everything_differs(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "empty").touch()
    with ParentFile.open(None if name is None else tmp_path / name) as before:
        assert list(before.different(0, WHOLE)) == [(0, WHOLE)]


def test_a_page_that_can_not_be_read_any_more_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE)

    def fail(fd: int, length: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    with ParentFile.open(path) as before:
        monkeypatch.setattr(os, "pread", fail)
        assert list(before.different(0, WHOLE)) == [(0, WHOLE)]


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE)
    before = sorted(Path("/proc/self/fd").iterdir())
    with ParentFile.open(path) as file:
        list(file.different(0, WHOLE))
    assert sorted(Path("/proc/self/fd").iterdir()) == before
