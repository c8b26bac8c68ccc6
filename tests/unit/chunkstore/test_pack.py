"""Pack files: appending, cutting, scanning past damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from imaged.chunkstore.pack import (
    PACK_HEADER,
    PACK_HEADER_BYTES,
    PACK_MAGIC,
    PACKS_DIRECTORY,
    PackReader,
    PackWriter,
    pack_numbers,
    pack_path,
    scan,
)
from imaged.frame import Frame
from tests.support.store_images import block_bytes, noise


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / PACKS_DIRECTORY).mkdir()
    return tmp_path


def fill(root: Path, number: int, count: int) -> list[tuple[int, Frame]]:
    pack = PackWriter.create(root, number)
    assert pack is not None
    frames = [Frame.of(block_bytes(seed)) for seed in range(count)]
    placed = [(pack.append([frame])[0], frame) for frame in frames]
    pack.sync()
    pack.close()
    return placed


def test_header_says_magic_and_number(root: Path) -> None:
    fill(root, 7, 0)
    assert pack_path(root, 7).name == "00000007.pack"
    assert pack_path(root, 7).read_bytes() == PACK_HEADER.pack(PACK_MAGIC, 7, bytes(8))


def test_frames_read_back_from_where_they_were_appended(root: Path) -> None:
    placed = fill(root, 1, 5)
    reader = PackReader(root)
    assert placed[0][0] == PACK_HEADER_BYTES
    for offset, frame in placed:
        assert reader.read(1, offset, frame.stored_bytes) == frame.pack()
    reader.close()


def test_a_number_is_taken_once(root: Path) -> None:
    fill(root, 1, 0)
    assert PackWriter.create(root, 1) is None


def test_one_writer_holds_a_pack(root: Path) -> None:
    fill(root, 1, 2)
    first = PackWriter.lock(root, 1)
    assert first is not None
    assert PackWriter.lock(root, 1) is None
    first.close()
    second = PackWriter.lock(root, 1)
    assert second is not None
    second.close()


def test_locking_a_pack_that_is_gone(root: Path) -> None:
    assert PackWriter.lock(root, 3) is None


def test_cut_drops_only_the_tail(root: Path) -> None:
    placed = fill(root, 1, 3)
    pack = PackWriter.lock(root, 1)
    assert pack is not None
    pack.cut(placed[2][0])
    pack.close()
    assert [found.frame for found in scan(pack_path(root, 1))] == [frame for _, frame in placed[:2]]


def test_numbers_ignore_other_files(root: Path) -> None:
    fill(root, 12, 0)
    fill(root, 3, 0)
    for name in ("x.pack", "1.tmp", "lost+found", "٣.pack"):
        (root / PACKS_DIRECTORY / name).touch()
    assert pack_numbers(root) == [3, 12]


def test_reader_with_more_packs_than_open_files(root: Path) -> None:
    placed = {number: fill(root, number, 1)[0] for number in range(1, 8)}
    reader = PackReader(root, open_files=2)
    for _ in range(2):
        for number, (offset, frame) in placed.items():
            assert reader.read(number, offset, frame.stored_bytes) == frame.pack()
    reader.close()


@pytest.mark.parametrize("where", ["header", "payload", "magic"])
def test_scan_goes_on_after_damage(root: Path, where: str) -> None:
    placed = fill(root, 1, 4)
    offset, frame = placed[1]
    at = {"header": offset + 20, "payload": offset + frame.stored_bytes - 3, "magic": offset}[where]
    raw = bytearray(pack_path(root, 1).read_bytes())
    raw[at] ^= 0x40
    pack_path(root, 1).write_bytes(raw)
    found = list(scan(pack_path(root, 1)))
    assert [item.frame for item in found] == [placed[0][1], None, placed[2][1], placed[3][1]]
    assert (found[1].offset, found[1].length) == (offset, frame.stored_bytes)
    assert found[1].problem


def test_scan_is_not_fooled_by_a_frame_inside_a_payload(root: Path) -> None:
    pack = PackWriter.create(root, 1)
    assert pack is not None
    inner = Frame.of(block_bytes(1))
    # Stored raw, the payload holds a whole valid frame.
    outer = Frame.of(inner.pack() + noise(4000))
    assert outer.payload.find(inner.pack()) >= 0
    pack.append([outer])
    pack.close()
    assert [found.frame for found in scan(pack_path(root, 1))] == [outer]


def test_scan_says_what_was_punched(root: Path) -> None:
    placed = fill(root, 1, 4)
    pack = PackWriter.lock(root, 1)
    assert pack is not None
    before = pack_path(root, 1).stat().st_blocks
    pack.punch(placed[1][0], placed[3][0])
    pack.close()
    assert pack_path(root, 1).stat().st_blocks < before
    found = list(scan(pack_path(root, 1)))
    assert [(item.frame, item.punched) for item in found] == [
        (placed[0][1], False),
        (None, True),
        (placed[3][1], False),
    ]


def test_scan_of_a_torn_tail(root: Path) -> None:
    placed = fill(root, 1, 3)
    path = pack_path(root, 1)
    path.write_bytes(path.read_bytes()[:-5])
    found = list(scan(path))
    assert [item.frame for item in found] == [placed[0][1], placed[1][1], None]
    assert found[2].offset == placed[2][0]


@pytest.mark.parametrize("raw", [b"", b"pvP1", b"junkjunkjunkjunk"])
def test_scan_of_a_file_that_is_no_pack(root: Path, raw: bytes) -> None:
    pack_path(root, 1).write_bytes(raw)
    found = list(scan(pack_path(root, 1)))
    assert [item.frame for item in found] == [None]
