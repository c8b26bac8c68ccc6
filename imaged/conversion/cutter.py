"""Cut file data into chunks while it streams by; small files share a chunk."""

from __future__ import annotations

from zlib import crc32

from imaged.blockbuilder import is_zero
from imaged.chunks import ChunkWriter
from imaged.erofs.tree import Inode
from imaged.errors import FormatError
from imaged.extent import Extent
from imaged.frame import CHUNK_LIMIT_BYTES
from imaged.ids import BLOCK_BYTES

CHUNK_MAX = 64 << 10
"""Longest chunk of file data, of small files that share it; images of other chunk sizes read the same."""
PIECE_MAX = 32 << 10
"""Longest piece of a large file. Programs and libraries are read here and there, small files whole.

Chosen with bench/chunk_size.py on two Debian roots: a cold shell fetches 825 KB of data against 898 with pieces of 64
KiB and 753 with 16, in 53 chunks against 32 and 95, and chunks cost a client time. Small files in chunks of 32 KiB as
well would be a fifth more index for 1 % less data.
"""
_ANCHOR_BYTES = 512
_PADDING = [bytes(-used % BLOCK_BYTES) for used in range(BLOCK_BYTES)]


class Cutter:
    """Turns the bytes of one file after another into chunks and fills in `inode.size_bytes` and `inode.extents`.

    A file of chunk_bytes or more is cut at its own start into pieces of piece_bytes, the last one a chunk of its own,
    too. Smaller files are packed in stream order, each at a block boundary. A pack is cut before a file that does not
    fit, and once it holds cut_bytes of data, before a file of another directory or an anchor (one file in four, by its
    content). So equal directories make equal chunks, a changed file changes few chunks of a large directory, and
    thousands of directories of one small file do not make thousands of chunks.

    A small file's extents are there only once its pack is cut, at the latest after `finish`. Pieces of zeros become
    holes. Holds at most one pack and chunk_bytes of a large file. For one thread; errors of `store.put` pass through.
    """

    def __init__(
        self,
        store: ChunkWriter,
        *,
        chunk_bytes: int = CHUNK_MAX,
        piece_bytes: int | None = None,
        cut_bytes: int | None = None,
    ) -> None:
        piece_bytes = min(chunk_bytes, PIECE_MAX) if piece_bytes is None else piece_bytes
        for what, size, limit in (
            ("chunk size", chunk_bytes, CHUNK_LIMIT_BYTES),
            ("size of a piece", piece_bytes, chunk_bytes),
        ):
            if size % BLOCK_BYTES or not 0 < size <= limit:
                expected = f"a multiple of {BLOCK_BYTES} up to {limit}"
                raise FormatError(what, expected=expected, found=f"{size} bytes")
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._piece_bytes = piece_bytes
        self._chunk_blocks = chunk_bytes // BLOCK_BYTES
        self._cut_bytes = chunk_bytes // 4 if cut_bytes is None else cut_bytes
        self._inode: Inode | None = None
        self._directory = b""
        self._done_bytes = 0
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._pack: list[bytes] = []
        self._pack_inodes: list[tuple[Inode, int, int]] = []
        self._pack_blocks = 0
        self._pack_bytes = 0
        self._pack_directory = b""

    def begin(self, inode: Inode, directory: bytes) -> None:
        """Start a file that lies in `directory` (any text that is equal for files of one directory)."""
        if self._inode is not None:
            raise RuntimeError("begin of a file before the end of the last one")
        self._inode = inode
        self._directory = directory

    def write(self, data: bytes | memoryview) -> None:
        """The file's next bytes, as many as are at hand."""
        size = len(data)
        if self._part_bytes + size < self._chunk_bytes:
            if size:
                self._parts.append(bytes(data))
                self._part_bytes += size
            return
        view = memoryview(data)
        taken = self._chunk_bytes - self._part_bytes
        self._parts.append(bytes(view[:taken]))
        self._put_pieces()
        while size - taken >= self._chunk_bytes:
            self._parts.append(bytes(view[taken : taken + self._chunk_bytes]))
            self._put_pieces()
            taken += self._chunk_bytes
        if taken < size:
            self._parts.append(bytes(view[taken:]))
        self._part_bytes = size - taken

    def hole(self, length: int) -> None:
        """As `write` of that many zeros, in no time: the chunks come out the same."""
        head = min(length, -self._part_bytes % self._chunk_bytes)
        if head:
            self.write(bytes(head))
        whole, tail = divmod(length - head, self._chunk_bytes)
        if whole:
            self._add_hole(whole * self._chunk_blocks)
            self._done_bytes += whole * self._chunk_bytes
        if tail:
            self.write(bytes(tail))

    def end(self) -> None:
        """The file is complete; its size is known, its extents perhaps not yet."""
        inode = self._opened()
        size = self._part_bytes
        inode.size_bytes = self._done_bytes + size
        if size:
            if self._done_bytes:
                self._put_pieces()
            else:
                self._put_small(inode, size)
        self._inode = None
        self._done_bytes = 0

    def finish(self) -> None:
        """No file follows: cut the last pack. All extents are there after this. The store is not flushed."""
        if self._inode is not None:
            raise RuntimeError("finish before the end of the last file")
        self._cut()

    def _opened(self) -> Inode:
        if self._inode is None:
            raise RuntimeError("data of a file before its begin")
        return self._inode

    def _put_pieces(self) -> None:
        """Store what is collected as the next pieces of a large file."""
        parts, step = self._parts, self._piece_bytes
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        for at in range(0, len(data), step):
            piece = data[at : at + step]
            blocks = -(-len(piece) // BLOCK_BYTES)
            if is_zero(piece):
                self._add_hole(blocks)
            else:
                self._opened().extents.append(Extent(blocks, self._store.put(piece)))
        self._done_bytes += len(data)
        parts.clear()
        self._part_bytes = 0

    def _add_hole(self, blocks: int) -> None:
        extents = self._opened().extents
        if extents and extents[-1].chunk is None:
            blocks += extents.pop().block_count
        extents.append(Extent(blocks, None))

    def _put_small(self, inode: Inode, size: int) -> None:
        """Pack a whole file of fewer than chunk_bytes bytes."""
        parts, pack = self._parts, self._pack
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._part_bytes = 0
        blocks = -(-size // BLOCK_BYTES)
        if data[0] == 0 and is_zero(data):
            inode.extents.append(Extent(blocks, None))
            return
        used = self._pack_blocks
        if used + blocks > self._chunk_blocks or (
            self._pack_bytes >= self._cut_bytes and (self._directory != self._pack_directory or _is_anchor(data, size))
        ):
            self._cut()
            used = 0
        pack.append(data)
        pack.append(_PADDING[size % BLOCK_BYTES])
        self._pack_inodes.append((inode, used, blocks))
        self._pack_blocks = used + blocks
        self._pack_bytes += size
        self._pack_directory = self._directory

    def _cut(self) -> None:
        """Store the pack and give every file in it its extent. The padding after the last one is left off."""
        if not self._pack_inodes:
            return
        pack = self._pack
        pack.pop()
        chunk = self._store.put(pack[0] if len(pack) == 1 else b"".join(pack))
        for inode, first, blocks in self._pack_inodes:
            inode.extents.append(Extent(blocks, chunk, first))
        pack.clear()
        self._pack_inodes.clear()
        self._pack_blocks = self._pack_bytes = 0


def _is_anchor(data: bytes, size: int) -> bool:
    """Whether a pack likes to end before this file; in one file of four, whatever the files around it are."""
    return crc32(data[:_ANCHOR_BYTES], size) % 4 == 0
