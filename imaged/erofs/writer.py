"""Lay out and write the EROFS metadata image of a tree.

Two passes over one list of nodes. `_Plan` gives every inode its offset, which needs only the sizes of names, xattrs
and targets; then `_Writer` packs each node and puts it there, and a node that is not as long as was planned stops
the whole. Inodes of one kind lie together, directories with their names first: a path lookup reads few blocks, and
the image compresses better. Full directory blocks and long symlink targets follow behind the last inode.
"""

from __future__ import annotations

import stat
from collections import Counter
from dataclasses import dataclass, field

from blake3 import blake3

from imaged.erofs import format as erofs
from imaged.erofs import xattrs
from imaged.erofs.layout import Placement
from imaged.erofs.tree import Inode
from imaged.errors import FormatError, UnsupportedImageError
from imaged.ids import BLOCK_BYTES

_SECOND_NS = 1_000_000_000
_SHORT = 1 << 16
_DOTS = (b".", b"..")


@dataclass(slots=True, eq=False)
class _Node:
    """An inode on its way to disk. Offsets are bytes of the image, blocks are of the image too."""

    inode: Inode
    parent: _Node | None
    links: int = 0
    compact: bool = False
    layout: int = erofs.FLAT_PLAIN
    xattrs: bytes = b""
    names: list[bytes] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Directories: where in `names` each of its blocks begins."""
    size_bytes: int = 0
    tail_bytes: int = 0
    offset: int = 0
    first_block: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes before the tail."""
        size_bytes = (erofs.COMPACT_INODE if self.compact else erofs.EXTENDED_INODE).size + len(self.xattrs)
        return erofs.align_index(size_bytes) if self.layout == erofs.CHUNK_BASED else size_bytes


def metadata_image(root: Inode, placement: Placement) -> bytes:
    """The whole metadata image, a whole number of blocks, equal for equal trees.

    Data device addresses begin right behind it. UnsupportedImageError when there are more blocks than 32-bit
    addresses reach.
    """
    plan = _Plan(root, placement)
    return _Writer(plan, placement).image()


class _Plan:
    """The first pass: what there is, how long it is and where it goes."""

    def __init__(self, root: Inode, placement: Placement) -> None:
        self._placement = placement
        self.nodes = _collect(root)
        self.build_time_ns = self._common_time()
        self._next = erofs.METADATA_OFFSET
        loose: list[_Node] = []
        for node in self.nodes.values():
            self._measure(node)
            self._settle(node)
            if node.size_bytes > node.tail_bytes and not node.inode.is_regular:
                loose.append(node)
        # fsck.erofs 1.5 reads an xattr header behind every inode, also one that has none and ends with the image.
        block = -(-(self._next + erofs.XATTR_HEADER.size) // BLOCK_BYTES)
        for node in loose:
            node.first_block = block
            block += -(-(node.size_bytes - node.tail_bytes) // BLOCK_BYTES)
        self.blocks = block
        if block + placement.data_blocks > erofs.ADDRESS_LIMIT:
            raise UnsupportedImageError(
                f"{block} metadata and {placement.data_blocks} data blocks of {BLOCK_BYTES} bytes: "
                f"EROFS addresses at most {erofs.ADDRESS_LIMIT}"
            )

    def _common_time(self) -> int:
        """The time most inodes have that could be compact: a compact inode has no time but the superblock's."""
        times = Counter(node.inode.mtime_ns for node in self.nodes.values() if _fits_compact(node))
        if not times:
            return 0
        return max(times.items(), key=lambda item: (item[1], -item[0]))[0]

    def _measure(self, node: _Node) -> None:
        inode = node.inode
        if inode.xattrs:
            node.xattrs = xattrs.encode(inode.xattrs)[0]
        if inode.is_directory:
            node.names = sorted([*inode.children, *_DOTS])
            node.cuts, node.tail_bytes = _cut_names(node.names)
            node.size_bytes = (len(node.cuts) - 1) * BLOCK_BYTES + node.tail_bytes
        elif inode.is_symlink:
            node.size_bytes = node.tail_bytes = len(inode.target)
        elif inode.is_regular:
            node.size_bytes = inode.size_bytes
        node.compact = inode.mtime_ns == self.build_time_ns and _fits_compact(node)
        if inode.is_regular:
            run = self._placement.runs.get(inode)
            if run is not None:
                node.layout = erofs.CHUNK_BASED
                node.tail_bytes = erofs.CHUNK_INDEX.size * len(run.starts)
        elif node.tail_bytes and node.head_bytes + node.tail_bytes <= BLOCK_BYTES:
            node.layout = erofs.FLAT_INLINE
        else:
            node.tail_bytes = 0

    def _settle(self, node: _Node) -> None:
        """The next offset where the inode and what is behind it lie in one block, if they fit into one at all.

        The kernel wants this of inline data; of inodes and xattrs it only saves reading a second block.
        """
        size_bytes = node.head_bytes + node.tail_bytes
        offset = self._next
        into = offset % BLOCK_BYTES
        if into and into + size_bytes > BLOCK_BYTES:
            offset += BLOCK_BYTES - into
        node.offset = offset
        self._next = offset + size_bytes + -size_bytes % erofs.NID_BYTES


class _Writer:
    """The second pass: bytes, at the offsets of the plan."""

    def __init__(self, plan: _Plan, placement: Placement) -> None:
        self._plan = plan
        self._placement = placement
        self._image = bytearray(plan.blocks * BLOCK_BYTES)
        self._entries = {id(node.inode): self._target(node) for node in plan.nodes.values()}

    @staticmethod
    def _target(node: _Node) -> tuple[int, int]:
        return node.offset // erofs.NID_BYTES, erofs.file_type(node.inode.mode)

    def image(self) -> bytes:
        for node in self._plan.nodes.values():
            self._write(node)
        root = next(iter(self._plan.nodes.values()))
        build_time_s, build_time_ns = divmod(self._plan.build_time_ns, _SECOND_NS)
        uuid = bytearray(blake3(self._image).update(self._placement.digest).digest(length=16))
        uuid[6], uuid[8] = uuid[6] & 0x0F | 0x80, uuid[8] & 0x3F | 0x80  # version 8, "custom", of RFC 9562
        superblock = erofs.Superblock(
            root_nid=root.offset // erofs.NID_BYTES,
            inodes=len(self._plan.nodes),
            build_time_s=build_time_s,
            build_time_ns=build_time_ns,
            blocks=self._plan.blocks,
            uuid=bytes(uuid),
            chunked=bool(self._placement.runs),
            device=erofs.DeviceSlot(self._placement.data_blocks, self._plan.blocks),
        )
        self._put(erofs.SUPERBLOCK_OFFSET, superblock.pack())
        erofs.seal(self._image)
        return bytes(self._image)

    def _write(self, node: _Node) -> None:
        inode = node.inode
        body = b""
        if inode.is_directory:
            parts = self._directory(node)
            body = parts[-1] if node.tail_bytes else b""
            for index, part in enumerate(parts[:-1] if node.tail_bytes else parts):
                self._put((node.first_block + index) * BLOCK_BYTES, part)
        elif inode.is_symlink:
            body = inode.target if node.tail_bytes else b""
            if not node.tail_bytes:
                self._put(node.first_block * BLOCK_BYTES, inode.target)
        elif node.layout == erofs.CHUNK_BASED:
            starts = self._placement.runs[inode].starts
            body = b"".join(erofs.CHUNK_INDEX.pack(0, erofs.DATA_DEVICE, start) for start in starts)
        if len(body) != node.tail_bytes:
            raise FormatError("EROFS inode", expected=f"{node.tail_bytes} bytes behind it", found=f"{len(body)}")
        self._put(node.offset, (self._inode(node) + node.xattrs).ljust(node.head_bytes, b"\0") + body)

    def _inode(self, node: _Node) -> bytes:
        inode = node.inode
        kind = node.layout << 1
        mode, links, size_bytes, union = inode.mode, node.links, node.size_bytes, self._union(node)
        xattr_units = xattrs.unit_count(node.xattrs)
        if node.compact:
            return erofs.COMPACT_INODE.pack(
                kind, xattr_units, mode, links, size_bytes, 0, union, 0, inode.uid, inode.gid, 0
            )
        seconds, nanoseconds = divmod(inode.mtime_ns, _SECOND_NS)
        return erofs.EXTENDED_INODE.pack(
            kind | 1, xattr_units, mode, 0, size_bytes, union, 0, inode.uid, inode.gid, seconds, nanoseconds, links
        )

    def _union(self, node: _Node) -> int:
        """The field whose meaning depends on the file: block address, chunk format or device number."""
        inode = node.inode
        if inode.is_regular:
            run = self._placement.runs.get(inode)
            return run.chunk_bits | erofs.CHUNK_INDEXES if run is not None else 0
        if stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode):
            return erofs.encode_device(inode.major, inode.minor)
        return node.first_block

    def _directory(self, node: _Node) -> list[bytes]:
        """The blocks of a directory; each has its entries, in byte order of their names, and then the names."""
        names, children, entries = node.names, node.inode.children, self._entries
        parent = node.parent or node
        dots = {b".": entries[id(node.inode)], b"..": entries[id(parent.inode)]}
        pack = erofs.DIRENT.pack
        blocks = []
        for begin, end in zip(node.cuts, [*node.cuts[1:], len(names)], strict=True):
            parts = []
            name_offset = erofs.DIRENT.size * (end - begin)
            for name in names[begin:end]:
                nid, kind = dots[name] if name in dots else entries[id(children[name])]
                parts.append(pack(nid, name_offset, kind, 0))
                name_offset += len(name)
            parts.extend(names[begin:end])
            blocks.append(b"".join(parts))
        return blocks

    def _put(self, offset: int, data: bytes) -> None:
        self._image[offset : offset + len(data)] = data


def _collect(root: Inode) -> dict[int, _Node]:
    """Every inode once, by identity, with its link count: the root, all other directories, then kind by kind.

    Among those of one kind the children of a directory follow one another.
    """
    top = _Node(root, None, links=2)
    nodes = {id(root): top}
    pending = [top]
    while pending:
        directory = pending.pop()
        below = []
        for name in sorted(directory.inode.children):
            child = directory.inode.children[name]
            node = nodes.get(id(child))
            if node is None:
                node = nodes[id(child)] = _Node(child, directory)
                if child.is_directory:
                    node.links = 1
                    directory.links += 1
                    below.append(node)
            node.links += 1
        pending.extend(reversed(below))
    return dict(sorted(nodes.items(), key=lambda item: _rank(item[1].inode)))


def _rank(inode: Inode) -> int:
    return 0 if inode.is_directory else stat.S_IFMT(inode.mode)


def _fits_compact(node: _Node) -> bool:
    """Whether owner and link count fit into 16 bits, and the size into 32."""
    inode = node.inode
    return inode.uid < _SHORT and inode.gid < _SHORT and node.links < _SHORT and inode.size_bytes < 1 << 32


def _cut_names(names: list[bytes]) -> tuple[list[int], int]:
    """Where each directory block begins, and how many bytes the last one has."""
    cuts = [0]
    used = 0
    entry_bytes = erofs.DIRENT.size
    for index, name in enumerate(names):
        need = entry_bytes + len(name)
        if used + need > BLOCK_BYTES:
            cuts.append(index)
            used = 0
        used += need
    return cuts, used
