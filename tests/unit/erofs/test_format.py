from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from imaged.erofs import format as erofs
from imaged.erofs import xattrs
from imaged.erofs.crc32c import crc32c
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES

SUPERBLOCK = erofs.Superblock(
    root_nid=40,
    inodes=7,
    build_time_s=-3,
    build_time_ns=999_999_999,
    blocks=5,
    uuid=bytes(range(16)),
    chunked=True,
    device=erofs.DeviceSlot(blocks=1000, mapped_block=5),
)


def first_block(superblock: erofs.Superblock) -> bytearray:
    image = bytearray(BLOCK_BYTES)
    image[erofs.SUPERBLOCK_OFFSET : erofs.METADATA_OFFSET] = superblock.pack()
    erofs.seal(image)
    return image


def test_crc32c_check_value() -> None:
    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283


def test_crc32c_continues() -> None:
    assert crc32c(b"6789", crc32c(b"12345")) == crc32c(b"123456789")


def test_structures_have_the_sizes_of_the_kernel() -> None:
    assert erofs.SUPERBLOCK.size == 128
    assert erofs.DEVICE_SLOT.size == 128
    assert erofs.COMPACT_INODE.size == 32
    assert erofs.EXTENDED_INODE.size == 64
    assert erofs.DIRENT.size == 12
    assert erofs.XATTR_HEADER.size == 12
    assert erofs.XATTR_ENTRY.size == 4
    assert erofs.DEVICE_SLOT_OFFSET % erofs.DEVICE_SLOT.size == 0
    assert erofs.METADATA_OFFSET % erofs.NID_BYTES == 0


@pytest.mark.parametrize("device", [SUPERBLOCK.device, None])
def test_superblock_round_trip(device: erofs.DeviceSlot | None) -> None:
    superblock = erofs.Superblock(
        root_nid=40,
        inodes=7,
        build_time_s=1 << 40,
        build_time_ns=0,
        blocks=5,
        uuid=bytes(16),
        chunked=False,
        device=device,
    )
    assert erofs.Superblock.parse(first_block(superblock)) == superblock
    assert erofs.Superblock.parse(first_block(SUPERBLOCK)) == SUPERBLOCK


@pytest.mark.parametrize("offset", [1024, 1028, 1036, 1038, 1100, 1104, 1112, 1200, 4095])
def test_a_changed_byte_is_refused(offset: int) -> None:
    block = first_block(SUPERBLOCK)
    block[offset] ^= 0x40
    with pytest.raises(FormatError):
        erofs.Superblock.parse(block)


def test_short_block_is_refused() -> None:
    with pytest.raises(FormatError, match="4096"):
        erofs.Superblock.parse(bytes(100))


def test_other_features_are_refused() -> None:
    block = first_block(SUPERBLOCK)
    block[erofs.SUPERBLOCK_OFFSET + 86] = 2
    erofs.seal(block)
    with pytest.raises(FormatError, match="2 devices"):
        erofs.Superblock.parse(block)
    block = first_block(replace(SUPERBLOCK, device=None))
    block[erofs.SUPERBLOCK_OFFSET + 80] |= 0x20
    erofs.seal(block)
    with pytest.raises(FormatError, match="features 0x24"):
        erofs.Superblock.parse(block)


@pytest.mark.parametrize(("major", "minor"), [(0, 0), (1, 3), (8, 255), (136, 256), (4095, 0xFFFFF)])
def test_device_numbers(major: int, minor: int) -> None:
    encoded = erofs.encode_device(major, minor)
    assert encoded < 1 << 32
    assert ((encoded >> 8) & 0xFFF, (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00)) == (major, minor)


def test_file_types() -> None:
    kinds = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFLNK)
    assert [erofs.file_type(kind | 0o644) for kind in kinds] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"user.a", (1, b"a")),
        (b"user.a.b", (1, b"a.b")),
        (b"trusted.overlay.opaque", (4, b"overlay.opaque")),
        (b"security.capability", (6, b"capability")),
        (b"system.posix_acl_access", (2, b"")),
        (b"system.posix_acl_default", (3, b"")),
        (b"user.", None),
        (b"user", None),
        (b"", None),
        (b"system.nfs4_acl", None),
        (b"com.apple.quarantine", None),
        (b"user.a\0b", None),
        (b"user." + b"n" * 255, (1, b"n" * 255)),
        (b"user." + b"n" * 256, None),
    ],
)
def test_xattr_names(name: bytes, expected: tuple[int, bytes] | None) -> None:
    assert xattrs.split_name(name) == expected


def test_xattr_area() -> None:
    area, dropped = xattrs.encode({b"user.b": b"12345", b"security.a": b""})
    assert not dropped
    assert area == bytes(12) + b"\1\6\0\0a\0\0\0" + b"\1\1\5\0b12345\0\0"
    assert xattrs.unit_count(area) == 1 + (len(area) - 12) // 4
    assert xattrs.encode({}) == (b"", [])
    assert xattrs.unit_count(b"") == 0


def test_xattrs_that_do_not_fit_are_named() -> None:
    values = {b"user.%d" % number: bytes(65_000) for number in range(5)}
    area, dropped = xattrs.encode(values | {b"odd": b"", b"user.big": bytes(65_536)})
    assert len(area) <= xattrs.AREA_LIMIT_BYTES
    assert xattrs.unit_count(area) < 1 << 16
    assert [name for name, _ in dropped] == [b"odd", b"user.4", b"user.big"]


def test_only_unknown_xattrs_leave_no_area() -> None:
    assert xattrs.encode({b"odd": b"1"})[0] == b""
