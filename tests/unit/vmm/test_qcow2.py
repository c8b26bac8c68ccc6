"""What is read from qcow2 tables, and what is refused; real files are in tests/integration/test_vm_disk.py."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from imaged.errors import FormatError
from vmm.qcow2 import CLUSTER_BYTES, Part, Qcow2, create_overlay

SUBCLUSTER_BYTES = 4096
L1_AT, L2_AT, DATA_AT = 3 * CLUSTER_BYTES, 4 * CLUSTER_BYTES, 5 * CLUSTER_BYTES
SIZE_BYTES = 8 << 20
COPIED = 1 << 63


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    path = tmp_path / "disk.qcow2"
    create_overlay(path, Path("/backing"), SIZE_BYTES)
    return path


def put(path: Path, at: int, raw: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(at)
        stream.write(raw)


def entries(path: Path, *described: tuple[int, int]) -> None:
    """An L2 table that begins with these."""
    put(path, L1_AT, struct.pack(">Q", L2_AT | COPIED))
    put(path, L2_AT, b"".join(struct.pack(">QQ", *one) for one in described).ljust(CLUSTER_BYTES, b"\0"))


def parts(path: Path) -> list[Part]:
    with open(path, "rb") as stream:
        return list(Qcow2.read(stream).parts(stream))


def test_a_new_overlay_has_nothing_itself(overlay: Path) -> None:
    with open(overlay, "rb") as stream:
        disk = Qcow2.read(stream)
        assert (disk.size_bytes, disk.backing, disk.extended_l2) == (SIZE_BYTES, b"/backing", True)
        assert list(disk.parts(stream)) == []


def test_subclusters_are_data_zeros_or_the_backing_files(overlay: Path) -> None:
    data, zeros = 0b0000_0110, 0b0011_0000
    entries(overlay, (DATA_AT | COPIED, data | zeros << 32))
    assert parts(overlay) == [
        Part(offset=SUBCLUSTER_BYTES, length_bytes=2 * SUBCLUSTER_BYTES, file_offset=DATA_AT + SUBCLUSTER_BYTES),
        Part(offset=4 * SUBCLUSTER_BYTES, length_bytes=2 * SUBCLUSTER_BYTES, file_offset=None),
    ]


def test_neighbours_in_disk_and_file_are_joined(overlay: Path) -> None:
    whole = 0xFFFF_FFFF
    entries(overlay, (DATA_AT | COPIED, whole), (DATA_AT + CLUSTER_BYTES, whole), (DATA_AT + 3 * CLUSTER_BYTES, whole))
    assert parts(overlay) == [
        Part(offset=0, length_bytes=2 * CLUSTER_BYTES, file_offset=DATA_AT),
        Part(offset=2 * CLUSTER_BYTES, length_bytes=CLUSTER_BYTES, file_offset=DATA_AT + 3 * CLUSTER_BYTES),
    ]


def test_zeros_need_no_place_in_the_file(overlay: Path) -> None:
    entries(overlay, (0, 0xFFFF_FFFF << 32))
    assert parts(overlay) == [Part(offset=0, length_bytes=CLUSTER_BYTES, file_offset=None)]


def test_what_lies_behind_the_end_of_the_disk_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    create_overlay(path, Path("/backing"), CLUSTER_BYTES + 512)
    entries(path, (DATA_AT, 0xFFFF_FFFF), (DATA_AT + CLUSTER_BYTES, 0xFFFF_FFFF))
    assert parts(path) == [Part(offset=0, length_bytes=CLUSTER_BYTES + 512, file_offset=DATA_AT)]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ((1 << 62 | DATA_AT, 0), "no compression"),
        ((DATA_AT, 1 | 1 << 32), "both"),
        ((0, 1), "a place in the file"),
    ],
)
def test_entries_that_we_do_not_make_are_refused(overlay: Path, entry: tuple[int, int], said: str) -> None:
    entries(overlay, entry)
    with pytest.raises(FormatError, match=said):
        parts(overlay)


@pytest.mark.parametrize(
    ("at", "raw", "said"),
    [
        (0, b"raw!", "magic"),
        (4, struct.pack(">I", 2), "version 2"),
        (20, struct.pack(">I", 30), r"2\^30"),
        (32, struct.pack(">I", 1), "encryption 1"),
        (60, struct.pack(">I", 2), "2 snapshots"),
        (72, struct.pack(">Q", 1 << 1), "features 0x2"),
        (72, struct.pack(">Q", 1 << 3), "features 0x8"),
    ],
)
def test_files_that_we_do_not_make_are_refused(overlay: Path, at: int, raw: bytes, said: str) -> None:
    put(overlay, at, raw)
    with open(overlay, "rb") as stream, pytest.raises(FormatError, match=said):
        Qcow2.read(stream)


def test_a_table_that_is_cut_off_is_refused(overlay: Path) -> None:
    put(overlay, L1_AT, struct.pack(">Q", 64 * CLUSTER_BYTES))
    with pytest.raises(FormatError, match="qcow2 table"):
        parts(overlay)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with open(path, "rb") as stream, pytest.raises(FormatError, match="0 bytes"):
        Qcow2.read(stream)
