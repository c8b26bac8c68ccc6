"""The on-disk layout of EROFS: structures in field order, no I/O.

Only what pVisor writes: uncompressed files, one extra device, inline xattrs. docs/formats/erofs.md has the tables;
the source is Linux, fs/erofs/erofs_fs.h. All numbers are little endian, the block size is 4 KiB, and an inode's
number (nid) is its byte offset divided by 32.
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass
from typing import Self

from imaged.erofs.crc32c import crc32c
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES

MAGIC = 0xE0F5E1E2
SUPERBLOCK_OFFSET = 1024
BLOCK_BITS = 12
NID_BYTES = 32
ADDRESS_LIMIT = (1 << 32) - 1
"""Block addresses have 32 bits; the last one is HOLE."""
HOLE = 0xFFFFFFFF

COMPAT_CHECKSUM, COMPAT_MTIME = 0x1, 0x2
INCOMPAT_CHUNKED_FILE, INCOMPAT_DEVICE_TABLE = 0x4, 0x8

FLAT_PLAIN, FLAT_INLINE, CHUNK_BASED = 0, 2, 4
"""Data layouts: all in blocks; all but the last block in blocks and that one behind the inode; one index a chunk."""
CHUNK_INDEXES = 0x20
"""Chunk format: indexes of 8 bytes, which name a device, and not bare addresses. Its low 5 bits are the chunk bits."""
CHUNK_BITS_MASK = 0x1F
PRIMARY_DEVICE, DATA_DEVICE = 0, 1

SUPERBLOCK = struct.Struct("<IIIBBHQqIIII16s16sIHHHBBIQ24x")
DEVICE_SLOT = struct.Struct("<64sII56x")
COMPACT_INODE = struct.Struct("<HHHHIIIIHHI")
EXTENDED_INODE = struct.Struct("<HHHHQIIIIqII16x")
DIRENT = struct.Struct("<QHBB")
XATTR_HEADER = struct.Struct("<IB7x")
XATTR_ENTRY = struct.Struct("<BBH")
CHUNK_INDEX = struct.Struct("<HHI")
DEVICE_SLOT_OFFSET = SUPERBLOCK_OFFSET + SUPERBLOCK.size
METADATA_OFFSET = DEVICE_SLOT_OFFSET + DEVICE_SLOT.size
"""Where the first inode may be: behind superblock and device table."""

_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}


def file_type(mode: int) -> int:
    """The type number of a directory entry; KeyError for a mode without a file type."""
    return _TYPES[stat.S_IFMT(mode)]


def align_index(offset: int) -> int:
    """Where the chunk indexes of an inode begin whose xattrs end at `offset`."""
    return offset + -offset % CHUNK_INDEX.size


def encode_device(major: int, minor: int) -> int:
    """A device number as the kernel's new_encode_dev: 12 bits of major around 8 low bits of 20 bits of minor."""
    return (minor & 0xFF) | (major << 8) | ((minor & 0xFFF00) << 12)


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The data device: its blocks appear at `mapped_block` of the file system's address space."""

    blocks: int
    mapped_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """What a superblock of ours says. `blocks` are those of the primary device."""

    root_nid: int
    inodes: int
    build_time_s: int
    build_time_ns: int
    blocks: int
    uuid: bytes
    chunked: bool
    device: DeviceSlot | None

    def pack(self) -> bytes:
        """Superblock and device slot, from SUPERBLOCK_OFFSET to METADATA_OFFSET; `seal` adds the checksum."""
        incompat = INCOMPAT_CHUNKED_FILE if self.chunked else 0
        slot = bytes(DEVICE_SLOT.size)
        devices = slot_offset = 0
        if self.device is not None:
            incompat |= INCOMPAT_DEVICE_TABLE
            slot = DEVICE_SLOT.pack(b"", self.device.blocks, self.device.mapped_block)
            devices, slot_offset = 1, DEVICE_SLOT_OFFSET // DEVICE_SLOT.size
        head = SUPERBLOCK.pack(
            MAGIC,
            0,  # checksum
            COMPAT_CHECKSUM | COMPAT_MTIME,
            BLOCK_BITS,
            0,  # no superblock extension
            self.root_nid,
            self.inodes,
            self.build_time_s,
            self.build_time_ns,
            self.blocks,
            0,  # inode area: nids count from block 0
            0,  # shared xattr area: none
            self.uuid,
            b"",  # volume name
            incompat,
            0,  # compression
            devices,
            slot_offset,
            0,  # directory block size: one block
            0,  # long xattr prefixes
            0,
            0,  # packed inode
        )
        return head + slot

    @classmethod
    def parse(cls, block: bytes | memoryview) -> Self:
        """From the first block of an image this package wrote; FormatError for any other."""
        if len(block) != BLOCK_BYTES:
            raise FormatError("EROFS superblock", expected=f"a block of {BLOCK_BYTES} bytes", found=f"{len(block)}")
        fields = SUPERBLOCK.unpack_from(block, SUPERBLOCK_OFFSET)
        magic, checksum, compat, block_bits = fields[:4]
        if magic != MAGIC or block_bits != BLOCK_BITS:
            found = f"magic {magic:#x}, block bits {block_bits}"
            raise FormatError("EROFS superblock", expected=f"magic {MAGIC:#x}, block bits {BLOCK_BITS}", found=found)
        if not compat & COMPAT_CHECKSUM or checksum != block_checksum(block):
            raise FormatError(
                "EROFS superblock", expected=f"checksum {block_checksum(block):#x}", found=f"{checksum:#x}"
            )
        incompat, devices = fields[14], fields[16]
        device = None
        if incompat & INCOMPAT_DEVICE_TABLE and devices == 1:
            _, blocks, mapped = DEVICE_SLOT.unpack_from(block, fields[17] * DEVICE_SLOT.size)
            device = DeviceSlot(blocks, mapped)
        elif devices or incompat & ~INCOMPAT_CHUNKED_FILE:
            found = f"features {incompat:#x}, {devices} devices"
            raise FormatError("EROFS superblock", expected="at most chunked files and one device", found=found)
        return cls(
            root_nid=fields[5],
            inodes=fields[6],
            build_time_s=fields[7],
            build_time_ns=fields[8],
            blocks=fields[9],
            uuid=fields[12],
            chunked=bool(incompat & INCOMPAT_CHUNKED_FILE),
            device=device,
        )


def block_checksum(block: bytes | bytearray | memoryview) -> int:
    """CRC-32C of the first block from the superblock on, its checksum field read as zero."""
    covered = bytearray(block[SUPERBLOCK_OFFSET:BLOCK_BYTES])
    covered[4:8] = bytes(4)
    return crc32c(covered)


def seal(image: bytearray) -> None:
    """Write the checksum into an image whose first block is otherwise complete."""
    struct.pack_into("<I", image, SUPERBLOCK_OFFSET + 4, block_checksum(memoryview(image)[:BLOCK_BYTES]))
