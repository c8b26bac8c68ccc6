"""A layer tar becomes a `Layer`: file data goes to the cutter as it arrives, the rest stays as entries."""

from __future__ import annotations

import stat

from imaged.conversion.cutter import Cutter
from imaged.conversion.layer import (
    HardLink,
    Layer,
    LayerEntry,
    NodeEntry,
    check_inode,
    clean_path,
    is_aufs_metadata,
    marker,
)
from imaged.conversion.tar import HARD_LINK, Readable, TarEntry, TarReader
from imaged.erofs.tree import Inode
from imaged.errors import LayerError


def read_layer(stream: Readable, cutter: Cutter, *, name: str = "") -> Layer:
    """Read a whole layer, and its stream to the end; the cutter is finished too. `name` is for errors and warnings.

    LayerError for an archive that is damaged or that names what can not be in a file system.
    """
    reader = TarReader(stream, layer=name)
    entries: list[LayerEntry] = []
    warnings: list[str] = []
    for entry in reader:
        try:
            made = _layer_entry(entry)
        except ValueError as error:
            hint = "the layer is malformed; build the image again"
            raise LayerError(str(error), layer=name, entry=entry.path, hint=hint) from None
        if made is None:
            shown = entry.path.decode(errors="backslashreplace")
            warnings.append(f"layer {name}: {shown!r} is AUFS bookkeeping, left out")
            continue
        entries.append(made)
        if entry.file_type == stat.S_IFREG and isinstance(made, NodeEntry):
            directory = made.path.rpartition(b"/")[0]
            cutter.begin(made.inode, directory)
            if entry.sparse is not None:
                _write_sparse(reader, cutter, entry)
            elif entry.stored_bytes:
                for piece in reader.data():
                    cutter.write(piece)
            cutter.end()
    reader.drain()
    cutter.finish()
    return Layer(entries, tuple(warnings))


def _layer_entry(entry: TarEntry) -> LayerEntry | None:
    """What a tar entry means, or None for what is no part of an image; ValueError for what can not be."""
    path = clean_path(entry.path)
    if b".wh." in path:
        if is_aufs_metadata(path):
            return None
        mark = marker(path)
        if mark is not None:
            return mark
    if entry.file_type == HARD_LINK:
        return HardLink(path, clean_path(entry.link))
    inode = Inode(entry.file_type | entry.mode, entry.uid, entry.gid, entry.mtime_ns)
    if entry.xattrs:
        inode.xattrs = entry.xattrs
    if entry.file_type == stat.S_IFLNK:
        inode.mode = stat.S_IFLNK | 0o777
        inode.target = entry.link
    elif entry.file_type in (stat.S_IFCHR, stat.S_IFBLK):
        inode.major, inode.minor = entry.major, entry.minor
    check_inode(inode)
    return NodeEntry(path, inode)


def _write_sparse(reader: TarReader, cutter: Cutter, entry: TarEntry) -> None:
    """The stored pieces of a sparse file at their places, holes between them."""
    position = 0
    pieces = reader.data()
    piece = memoryview(b"")
    for offset, length in entry.sparse or ():
        if offset > position:
            cutter.hole(offset - position)
        position = offset + length
        while length:
            if not piece:
                piece = next(pieces)
            cutter.write(piece[:length])
            taken = min(length, len(piece))
            piece = piece[taken:]
            length -= taken
    if entry.size_bytes > position:
        cutter.hole(entry.size_bytes - position)
