"""Which pages differ from a parent's, as far as the page cache tells."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from vmm import parentfile
from vmm.gather import gather
from vmm.parentfile import ParentFile

PAGE = mmap.PAGESIZE
WHOLE = Random(1).randbytes(32 * PAGE)


def different(before: ParentFile, pieces: Sequence[tuple[int, int]], data: bytes) -> list[tuple[int, bytes]]:
    return [(offset, bytes(one)) for offset, one in before.different(pieces, data)]


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
        assert different(before, [(0, len(WHOLE))], WHOLE) == []
        found = different(before, [(0, len(data))], data)
        assert found == [
            (first * PAGE, data[first * PAGE : (last + 1) * PAGE]) for first, last in [(0, 1), (5, 5), (31, 31)]
        ]
        assert different(before, [(4 * PAGE, 2 * PAGE)], data[4 * PAGE : 6 * PAGE]) == [
            (5 * PAGE, data[5 * PAGE : 6 * PAGE])
        ]
        assert different(before, [(PAGE, PAGE)], data[:PAGE]) == [(PAGE, data[:PAGE])]


def test_a_short_last_page(tmp_path: Path) -> None:
    path, length = tmp_path / "file", 3 * PAGE - 100
    path.write_bytes(WHOLE[:length])
    with ParentFile.open(path) as before:
        assert different(before, [(0, length)], WHOLE[:length]) == []
        data = changed(2, length=length)
        assert different(before, [(0, len(data))], data) == [(2 * PAGE, data[2 * PAGE :])]


def test_what_is_not_cached_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as stream:
        stream.write(WHOLE[:PAGE])
        stream.truncate(len(WHOLE))  # holes are in nobody's cache
    data = WHOLE[:PAGE] + bytes(3 * PAGE)
    with ParentFile.open(path) as before:
        assert different(before, [(0, len(data))], data) == [(PAGE, bytes(3 * PAGE))]


def test_what_is_past_the_end_differs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE[:PAGE])
    with ParentFile.open(path) as before:
        assert different(before, [(PAGE, len(WHOLE) - PAGE)], WHOLE[PAGE:]) == [(PAGE, WHOLE[PAGE:])]


@pytest.mark.parametrize("name", [None, "absent", "empty"])
def test_without_a_file_everything_differs(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "empty").touch()
    with ParentFile.open(None if name is None else tmp_path / name) as before:
        assert different(before, [(0, len(WHOLE))], WHOLE) == [(0, WHOLE)]


@pytest.mark.parametrize("had_pages", [0, 3])
def test_a_page_that_can_not_be_read_any_more_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_pages: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE)

    def fail(pid: int, pieces: Sequence[tuple[int, int]]) -> bytearray:
        if not had_pages:
            raise PermissionError(1, "Operation not permitted")
        return gather(pid, pieces)[: had_pages * PAGE]

    with ParentFile.open(path) as before:
        monkeypatch.setattr(parentfile, "gather", fail)
        found = different(before, [(0, len(WHOLE))], WHOLE)
        assert found == [(had_pages * PAGE, WHOLE[had_pages * PAGE :])]


def test_pieces_near_and_far_are_told_apart(tmp_path: Path) -> None:
    path, gap = tmp_path / "file", 2 << 20
    path.write_bytes(WHOLE + bytes(gap) + WHOLE)
    far = len(WHOLE) + gap
    pieces = [(PAGE, 2 * PAGE), (5 * PAGE, PAGE), (far, 3 * PAGE)]
    data = bytearray(b"".join(path.read_bytes()[offset : offset + length] for offset, length in pieces))
    data[2 * PAGE] ^= 1
    data[5 * PAGE] ^= 1
    with ParentFile.open(path) as before:
        found = different(before, pieces, bytes(data))
    assert found == [
        (5 * PAGE, bytes(data[2 * PAGE : 3 * PAGE])),
        (far + 2 * PAGE, bytes(data[5 * PAGE :])),
    ]


def test_nothing_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(WHOLE)
    before = sorted(Path("/proc/self/fd").iterdir())
    with ParentFile.open(path) as file:
        different(file, [(0, len(WHOLE))], WHOLE)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
