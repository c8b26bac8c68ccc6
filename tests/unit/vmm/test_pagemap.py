"""Which pages are a process's own: by made-up entries, and by mappings of this process."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest

from vmm.errors import VmStateError
from vmm.pagemap import PAGE_BYTES, Range, mappings, own_runs, private_ranges

IN_MEMORY, IN_SWAP, OF_FILE, EXCLUSIVE, SOFT_DIRTY = 1 << 63, 1 << 62, 1 << 61, 1 << 56, 1 << 55


@pytest.mark.parametrize(
    ("entry", "own"),
    [
        (0, False),
        (SOFT_DIRTY, False),
        (IN_MEMORY | 0x1234, True),
        (IN_MEMORY | EXCLUSIVE | SOFT_DIRTY, True),
        (IN_MEMORY | OF_FILE, False),
        (IN_MEMORY | OF_FILE | EXCLUSIVE, False),
        (IN_SWAP | 0x4321, True),
        (IN_SWAP | OF_FILE, False),
    ],
)
def test_an_entry_is_own_when_present_or_swapped_and_no_files(entry: int, own: bool) -> None:
    assert list(own_runs(struct.pack("<Q", entry))) == ([(0, 1)] if own else [])


def test_runs_are_as_long_as_they_can_be() -> None:
    entries = [IN_MEMORY, IN_SWAP, 0, IN_MEMORY | OF_FILE, IN_MEMORY, 0, IN_MEMORY, IN_MEMORY]
    assert list(own_runs(struct.pack("<8Q", *entries))) == [(0, 2), (4, 1), (6, 2)]
    assert list(own_runs(b"")) == []


def mapped(path: Path, size_bytes: int, *, flags: int = mmap.MAP_PRIVATE, offset: int = 0) -> mmap.mmap:
    with open(path, "r+b") as stream:
        return mmap.mmap(stream.fileno(), size_bytes, flags=flags, offset=offset)


def offsets(ranges: list[Range]) -> list[tuple[int, int]]:
    return [(one.offset, one.length_bytes) for one in ranges]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(os.urandom(64 * PAGE_BYTES))
    return path


def test_written_pages_are_own_and_read_ones_are_not(file: Path) -> None:
    with mapped(file, 64 * PAGE_BYTES) as memory:
        assert private_ranges(os.getpid(), file, 64 * PAGE_BYTES) == []
        assert len(memory[:]) == 64 * PAGE_BYTES
        assert private_ranges(os.getpid(), file, 64 * PAGE_BYTES) == []
        memory[0] = 1
        memory[5 * PAGE_BYTES : 7 * PAGE_BYTES] = bytes(2 * PAGE_BYTES)
        memory[63 * PAGE_BYTES] = 1
        found = private_ranges(os.getpid(), file, 64 * PAGE_BYTES)
        assert offsets(found) == [
            (0, PAGE_BYTES),
            (5 * PAGE_BYTES, 2 * PAGE_BYTES),
            (63 * PAGE_BYTES, PAGE_BYTES),
        ]
        assert {one.address - one.offset for one in found} == {found[0].address}


def test_the_last_page_of_a_file_may_be_short(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(2 * PAGE_BYTES + 100))
    with mapped(path, 2 * PAGE_BYTES + 100) as memory:
        memory[2 * PAGE_BYTES] = 1
        assert offsets(private_ranges(os.getpid(), path, 2 * PAGE_BYTES + 100)) == [(2 * PAGE_BYTES, 100)]


def test_a_file_mapped_in_two_halves_is_one(file: Path) -> None:
    half = 32 * PAGE_BYTES
    with mapped(file, half) as first, mapped(file, half, offset=half) as second:
        first[half - 1] = second[0] = 1
        found = private_ranges(os.getpid(), file, 2 * half)
        assert offsets(found) == [(half - PAGE_BYTES, PAGE_BYTES), (half, PAGE_BYTES)]
        assert [one.offset for one in mappings(os.getpid(), file)] == [0, half]


def test_a_gap_or_an_overlap_is_refused(file: Path) -> None:
    part = 16 * PAGE_BYTES
    cut = "a gap or an overlap at byte 65536"
    with mapped(file, part):
        with pytest.raises(VmStateError, match="maps only 65536 bytes"):
            private_ranges(os.getpid(), file, 2 * part)
        with (
            mapped(file, part, offset=2 * part),
            pytest.raises(VmStateError, match=cut),
        ):
            private_ranges(os.getpid(), file, 3 * part)
        with mapped(file, 2 * part), pytest.raises(VmStateError, match="a gap or an overlap"):
            private_ranges(os.getpid(), file, 2 * part)


def test_a_shared_mapping_is_refused(file: Path) -> None:
    with mapped(file, PAGE_BYTES, flags=mmap.MAP_SHARED), pytest.raises(VmStateError, match="shared"):
        mappings(os.getpid(), file)


def test_a_file_is_known_by_its_path_or_by_its_inode(file: Path, tmp_path: Path) -> None:
    with mapped(file, PAGE_BYTES):
        other = file.rename(tmp_path / "other")
        assert len(mappings(os.getpid(), other)) == 1
        file.write_bytes(bytes(PAGE_BYTES))
        with pytest.raises(VmStateError, match="does not map"):
            mappings(os.getpid(), file)


def test_a_file_that_is_not_mapped_and_a_process_that_is_gone(file: Path) -> None:
    with pytest.raises(VmStateError, match="does not map"):
        mappings(os.getpid(), file)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(VmStateError, match="is gone"):
        mappings(child, file)
