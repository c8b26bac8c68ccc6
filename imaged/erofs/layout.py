"""Where each file's bytes go on the data device.

A file is one run of blocks, so that its inode needs a single address and the kernel reads it in large requests. Only
a file that is mostly a large hole is several runs, so that the hole takes no room. Files with equal extents share
their blocks.

The order decides how small the map of the device is. Small files are packed into chunks in stream order; where they
follow one another in that order, their entries merge into one for the whole chunk. And where the layers follow one
another, images that share their lower layers have equal leaves: a file that a higher layer removed or replaced leaves
a hole of its size, so that what comes after keeps its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from imaged.blockbuilder import BlockImageBuilder
from imaged.erofs.format import HOLE
from imaged.erofs.tree import Inode, walk
from imaged.erofs.xattrs import encode as encode_xattrs
from imaged.errors import FormatError, LayerError
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES

SPARSE_BLOCKS = 4096
"""A file with at least this many hole blocks (16 MiB), and no fewer of them than others, is kept sparse."""
CHUNK_COUNT_TARGET = 8192
"""A sparse file has at most this many chunks, 8 bytes each in the metadata, which every client fetches whole."""
CHUNK_BITS_LIMIT = 31
SIZE_LIMIT_BYTES = (1 << 63) - 1
_ID_LIMIT = 1 << 32
_SECOND_NS = 1_000_000_000
_Key = tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A file in chunks of 2**chunk_bits blocks: the first block of each on the data device, or HOLE.

    One chunk, the smallest that covers it, unless the file is sparse.
    """

    chunk_bits: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything is. Each regular inode that is not empty has a run.

    `digest` stands for the order and content of the whole device. `warnings` are sentences for the user about what
    the image can not keep.
    """

    runs: dict[Inode, Run]
    data_blocks: int
    digest: bytes
    warnings: tuple[str, ...]


def place(root: Inode, builder: BlockImageBuilder, order: Iterable[Inode] = ()) -> Placement:
    """Append the data of every regular file of the tree to the data device, and check that EROFS can hold the tree.

    `order` is the order in which the files came: the lowest layer first, in each as in its stream, also those that
    are not in the tree any more. Files it leaves out follow in tree order, with the files of a packed chunk
    together. LayerError, with the path, for a number that no Linux file system can hold.
    """
    files, warnings = _survey(root)
    alive = {id(inode) for inode in files}
    placer = _Placer(builder, {tuple(inode.extents) for inode in files})
    for inode in order:
        if inode.is_regular and inode.extents:
            placer.add(inode, id(inode) in alive)
    for inode in _by_chunk(files):
        placer.add(inode, True)
    if builder.position_blocks == 0:
        # A device of no blocks is one that the kernel and QEMU may refuse.
        builder.append(Extent(1, None))
    return Placement(placer.runs, builder.position_blocks, placer.content.digest(), tuple(warnings))


class _Placer:
    """The state of one placement. Equal input in equal order gives equal addresses, whatever layers follow."""

    def __init__(self, builder: BlockImageBuilder, wanted: set[_Key]) -> None:
        self._builder = builder
        self._wanted = wanted
        self._by_extents: dict[_Key, Run] = {}
        self.runs: dict[Inode, Run] = {}
        self.content = blake3()

    def add(self, inode: Inode, alive: bool) -> None:
        """Give the inode's bytes a place, or find the one that equal bytes have; only the living get an address."""
        key = tuple(inode.extents)
        run = self._by_extents.get(key)
        if run is None:
            run = self._by_extents[key] = self._place(key)
        if alive:
            self.runs[inode] = run

    def _place(self, key: _Key) -> Run:
        wanted = key in self._wanted
        blocks = sum(extent.block_count for extent in key)
        if not _is_sparse(key):
            return Run(_chunk_bits(blocks, 1), (self._append(key, wanted),))
        chunk_bits = _chunk_bits(blocks, CHUNK_COUNT_TARGET)
        starts = []
        for part in _cut(key, 1 << chunk_bits):
            empty = all(extent.chunk is None for extent in part)
            starts.append(HOLE if empty else self._append(part, wanted))
        return Run(chunk_bits, tuple(starts))

    def _append(self, extents: Iterable[Extent], wanted: bool) -> int:
        start = self._builder.position_blocks
        for extent in extents:
            chunk = extent.chunk if wanted else None
            if chunk is None:
                self._builder.append(Extent(extent.block_count, None))
            else:
                self._builder.append(extent)
                self.content.update(chunk + extent.first_block.to_bytes(4, "little"))
            self.content.update(extent.block_count.to_bytes(8, "little"))
        return start


def _is_sparse(extents: Sequence[Extent]) -> bool:
    holes = total = 0
    for extent in extents:
        total += extent.block_count
        if extent.chunk is None:
            holes += extent.block_count
    return holes >= SPARSE_BLOCKS and 2 * holes >= total


def _chunk_bits(block_count: int, chunk_count: int) -> int:
    """The smallest chunk, as a power of two of blocks, of which this many are enough."""
    return min((-(-block_count // chunk_count) - 1).bit_length(), CHUNK_BITS_LIMIT)


def _cut(extents: Iterable[Extent], chunk_blocks: int) -> Iterator[list[Extent]]:
    """The extents of each chunk in turn; the last chunk ends with the file."""
    part: list[Extent] = []
    room = chunk_blocks
    for extent in extents:
        left, first = extent.block_count, extent.first_block
        while left:
            count = min(left, room)
            part.append(Extent(count, extent.chunk, first if extent.chunk is not None else 0))
            left, first, room = left - count, first + count, room - count
            if room == 0:
                yield part
                part, room = [], chunk_blocks
    if part:
        yield part


def _by_chunk(files: Sequence[Inode]) -> list[Inode]:
    """Tree order, but where a file's only extent is part of a chunk, all such files of that chunk in its order."""
    neighbours: dict[bytes, list[Inode]] = {}
    for inode in files:
        if len(inode.extents) == 1 and (chunk := inode.extents[0].chunk) is not None:
            neighbours.setdefault(chunk, []).append(inode)
    ordered: list[Inode] = []
    for inode in files:
        chunk = inode.extents[0].chunk if len(inode.extents) == 1 else None
        if chunk is None:
            ordered.append(inode)
        elif group := neighbours.pop(chunk, []):
            ordered.extend(sorted(group, key=lambda one: one.extents[0].first_block))
    return ordered


def _survey(root: Inode) -> tuple[list[Inode], list[str]]:
    """The regular files that have bytes, once each, in tree order; and what will be lost."""
    seen: set[int] = set()
    files: list[Inode] = []
    warnings: list[str] = []
    for path, inode in walk(root):
        if id(inode) in seen:
            continue
        seen.add(id(inode))
        _check_numbers(path, inode)
        if inode.xattrs:
            for name, reason in encode_xattrs(inode.xattrs)[1]:
                shown = f"{_show(path)}: extended attribute {_show(name)} is not kept"
                warnings.append(f"{shown}: {reason}")
        if inode.is_regular and (inode.extents or inode.size_bytes):
            _check_extents(path, inode)
            files.append(inode)
    return files, warnings


def _check_numbers(path: bytes, inode: Inode) -> None:
    if not (0 <= inode.major < 1 << 12 and 0 <= inode.minor < 1 << 20):
        found = f"device number {inode.major}:{inode.minor} is out of range"
        raise LayerError(found, entry=path, hint="Linux has 12 bits for the major and 20 for the minor number")
    if not (0 <= inode.uid < _ID_LIMIT and 0 <= inode.gid < _ID_LIMIT):
        raise LayerError(f"owner {inode.uid}:{inode.gid} is out of range", entry=path, hint="ids have 32 bits")
    if not -(1 << 63) <= inode.mtime_ns // _SECOND_NS < 1 << 63:
        raise LayerError(
            f"time {inode.mtime_ns // _SECOND_NS} s is out of range", entry=path, hint="times have 64 bits"
        )
    if not 0 <= inode.size_bytes <= SIZE_LIMIT_BYTES:
        raise LayerError(f"size {inode.size_bytes} is out of range", entry=path, hint="sizes have 63 bits")


def _check_extents(path: bytes, inode: Inode) -> None:
    blocks = sum(extent.block_count for extent in inode.extents)
    expected = -(-inode.size_bytes // BLOCK_BYTES)
    if blocks != expected:
        raise FormatError(f"extents of {_show(path)}", expected=f"{expected} blocks", found=f"{blocks}")


def _show(name: bytes) -> str:
    return repr(name.decode(errors="backslashreplace")[:200]) if name else "'/'"
