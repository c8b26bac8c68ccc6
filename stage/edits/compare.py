"""Whether two nodes are the same, and in what they differ."""

from __future__ import annotations

import errno
import os

from stage.edits.tree import Node, vanished

_READ_BYTES = 1 << 20


def same_metadata(one: Node, other: Node) -> bool:
    """Owner, extended attributes and permission bits; a symbolic link has none of those."""
    bits = one.type == "symlink" or one.mode == other.mode
    return bits and (one.uid, one.gid, one.xattrs) == (other.uid, other.gid, other.xattrs)


def same_content(one: Node, other: Node) -> bool:
    """Same type, and the same bytes, link target or device number. A file that vanishes meanwhile is not the same."""
    if (one.type, one.target, one.rdev, one.size_bytes) != (other.type, other.target, other.rdev, other.size_bytes):
        return False
    if one.type != "file" or (one.tree is other.tree and one.location == other.location):
        return True
    try:
        with one.reading() as first, other.reading() as second:
            return _same_bytes(first, second)
    except OSError as error:
        if vanished(error):
            return False
        raise


def _same_bytes(one: int, other: int) -> bool:
    position = 0
    while True:
        data = _next_data(one, other, position)
        if data is None:
            return os.fstat(one).st_size == os.fstat(other).st_size
        position = data
        piece, like = os.pread(one, _READ_BYTES, position), os.pread(other, _READ_BYTES, position)
        if piece != like:
            return False
        if not piece:
            return True
        position += len(piece)


def _next_data(one: int, other: int, position: int) -> int | None:
    """The first place from `position` on where one of the two files has data; None when there is none."""
    places = []
    for fd in (one, other):
        try:
            places.append(os.lseek(fd, position, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO is a hole to the end
                raise
    return min(places, default=None)
