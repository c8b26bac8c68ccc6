"""File trees for tests: made from a short description, with their data in a MemoryStore, and compared with a mount."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import struct
from pathlib import Path

from imaged.chunks import ChunkReadWriter, ChunkWriter
from imaged.erofs.tree import Inode, walk
from imaged.extent import Extent
from imaged.ids import BLOCK_BYTES

CHUNK_BYTES = 64 * 1024
MTIME_NS = 1_700_000_000_123_456_789


def directory(children: dict[bytes, Inode] | None = None, *, mode: int = 0o755, mtime_ns: int = MTIME_NS) -> Inode:
    return Inode(mode=stat.S_IFDIR | mode, mtime_ns=mtime_ns, children=children or {})


def symlink(target: bytes, *, mtime_ns: int = MTIME_NS) -> Inode:
    return Inode(mode=stat.S_IFLNK | 0o777, mtime_ns=mtime_ns, target=target)


def node(kind: int, major: int = 0, minor: int = 0) -> Inode:
    return Inode(mode=kind | 0o600, mtime_ns=MTIME_NS, major=major, minor=minor)


def file(store: ChunkWriter, data: bytes, *, mode: int = 0o644, mtime_ns: int = MTIME_NS) -> Inode:
    """A file of these bytes in chunks of its own; pieces of zeros become holes."""
    inode = Inode(mode=stat.S_IFREG | mode, mtime_ns=mtime_ns, size_bytes=len(data))
    for at in range(0, len(data), CHUNK_BYTES):
        piece = data[at : at + CHUNK_BYTES]
        count = -(-len(piece) // BLOCK_BYTES)
        inode.extents.append(Extent(count, store.put(piece) if piece.strip(b"\0") else None))
    return inode


def sparse_file(store: ChunkWriter, parts: dict[int, bytes], size_bytes: int) -> Inode:
    """A file that is a hole but for some parts, which begin at multiples of the block size."""
    inode = Inode(mode=stat.S_IFREG | 0o644, mtime_ns=MTIME_NS, size_bytes=size_bytes)
    position = 0
    for at, data in sorted(parts.items()):
        if at > position:
            inode.extents.append(Extent((at - position) // BLOCK_BYTES, None))
        inode.extents.extend(file(store, data).extents)
        position = at + -(-len(data) // BLOCK_BYTES) * BLOCK_BYTES
    left = -(-(size_bytes - position) // BLOCK_BYTES)
    if left:
        inode.extents.append(Extent(left, None))
    return inode


def content(store: ChunkReadWriter, inode: Inode) -> bytes:
    """What a read of the whole file must give."""
    parts = []
    for extent in inode.extents:
        length = extent.block_count * BLOCK_BYTES
        chunk = store.get(extent.chunk) if extent.chunk is not None else b""
        first = extent.first_block * BLOCK_BYTES
        parts.append(chunk[first : first + length].ljust(length, b"\0"))
    return b"".join(parts)[: inode.size_bytes]


def expected(store: ChunkReadWriter, root: Inode, *, read_limit: int = 1 << 26) -> dict[bytes, tuple[object, ...]]:
    """A row a name, as `found` makes them from a mount."""
    names = list(walk(root))
    first: dict[int, bytes] = {}
    links: dict[int, int] = {}
    for path, inode in names:
        first.setdefault(id(inode), path)
        links[id(inode)] = links.get(id(inode), 0) + 1
    rows = {}
    for path, inode in names:
        count = links[id(inode)]
        if inode.is_directory:
            count = 2 + sum(child.is_directory for child in inode.children.values())
        kind: object = None
        if inode.is_symlink:
            kind = inode.target
        elif inode.is_regular:
            small = inode.size_bytes <= read_limit
            kind = inode.size_bytes, hashlib.sha256(content(store, inode)).hexdigest() if small else None
        elif stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode):
            kind = inode.major, inode.minor
        rows[path] = (
            oct(inode.mode),
            inode.uid,
            inode.gid,
            inode.mtime_ns,
            count,
            first[id(inode)],
            kind,
            tuple(sorted(inode.xattrs.items())),
        )
    return rows


def found(top: Path, *, read_limit: int = 1 << 26) -> dict[bytes, tuple[object, ...]]:
    """A row for every name below a directory, itself being b"". Nothing is followed; big files are not read."""
    rows: dict[bytes, tuple[object, ...]] = {}
    first: dict[int, bytes] = {}
    pending = [b""]
    while pending:
        path = pending.pop()
        real = os.path.join(os.fsencode(top), path) if path else os.fsencode(top)
        info = os.lstat(real)
        kind: object = None
        if stat.S_ISLNK(info.st_mode):
            kind = os.readlink(real)  # noqa: PTH115 (bytes)
        elif stat.S_ISREG(info.st_mode):
            kind = info.st_size, _digest(real) if info.st_size <= read_limit else None
        elif stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            kind = os.major(info.st_rdev), os.minor(info.st_rdev)
        elif stat.S_ISDIR(info.st_mode):
            prefix = path + b"/" if path else b""
            with os.scandir(real) as entries:
                names = [entry.name for entry in entries]
            # Read in order, as `walk` does, so that the first name of a link group is the same.
            pending.extend(prefix + name for name in sorted(names, reverse=True))
        xattrs = {
            os.fsencode(name): os.getxattr(real, name, follow_symlinks=False)
            for name in os.listxattr(real, follow_symlinks=False)
        }
        rows[path] = (
            oct(info.st_mode),
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            info.st_nlink,
            first.setdefault(info.st_ino, path),
            kind,
            tuple(sorted(xattrs.items())),
        )
    return rows


def _digest(path: bytes) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sample(store: ChunkWriter, *, many: int = 20_000) -> Inode:
    """One of everything that an EROFS image can hold, at its limits."""
    rng = random.Random(7)
    capability = b"\1\0\0\2\0\4\0\0" + bytes(12)
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry)
        for entry in ((1, 7, 0xFFFFFFFF), (2, 4, 70_000), (4, 5, 0xFFFFFFFF), (16, 5, 0xFFFFFFFF), (32, 5, 0xFFFFFFFF))
    )
    names: dict[bytes, Inode] = {
        b"!": file(store, b"sorts before a dot"),
        b"-": file(store, b"so does this"),
        b"\xff\xfe\n\\": file(store, b"any byte but NUL and slash"),
        b"n" * 255: file(store, b"long name"),
        b"empty": file(store, b""),
        b"zeros": file(store, bytes(10_000)),
        b"exact": file(store, rng.randbytes(BLOCK_BYTES)),
        b"file": file(store, rng.randbytes(5000)),
        b"big": file(store, rng.randbytes(3 << 20)),
        b"suid": file(store, b"suid", mode=0o6755),
        b"sticky": directory({b"in": file(store, b"in")}, mode=0o1777),
        b"bare": directory(mode=0),
        b"null": node(stat.S_IFCHR, 1, 3),
        b"whiteout": node(stat.S_IFCHR, 0, 0),
        b"disk": node(stat.S_IFBLK, 4095, 0xFFFFF),
        b"minor256": node(stat.S_IFCHR, 136, 256),
        b"fifo": node(stat.S_IFIFO),
        b"socket": node(stat.S_IFSOCK),
        b"before1970": file(store, b"t", mtime_ns=-1),
        b"old": file(store, b"t", mtime_ns=-5_000_000_000_000_000_007),
        b"whole_second": file(store, b"t", mtime_ns=MTIME_NS // 10**9 * 10**9),
        b"future": file(store, b"t", mtime_ns=5_000_000_000_000_000_007),
        b"symlink": symlink(b"file"),
        b"dangling": symlink(b"/no/such/\xff"),
        b"many": directory({b"f%05d" % number: file(store, b"") for number in range(many)}),
        b"links": directory({b"%04d" % number: symlink(b"x" * (number or 1)) for number in range(0, 4096, 97)}),
        b"longest": symlink(b"y" * 4095),
        b"4032": symlink(b"y" * 4032),
        b"4064": symlink(b"y" * 4064),
        b"4065": symlink(b"y" * 4065),
        b"sparse": sparse_file(store, {5 * BLOCK_BYTES: b"a" * 5000, 30 << 20: b"b" * 70_000}, (40 << 20) + 5),
        b"lastlog": sparse_file(store, {5 * BLOCK_BYTES: b"a" * 5000, 200 << 30: b"b" * 70_000}, (300 << 30) + 5),
        b"hole": sparse_file(store, {}, 60 << 20),
    }
    owned = names[b"owned"] = file(store, b"owned")
    owned.uid, owned.gid = 70_000, 0xFFFFFFFE
    names[b"hard"] = names[b"sticky"].children[b"link"] = names[b"file"]
    names[b"hard_null"] = names[b"null"]
    names[b"hard_symlink"] = names[b"symlink"]
    names[b"acl"] = file(store, b"acl", mode=0o754)
    names[b"acl"].xattrs = {b"system.posix_acl_access": acl, b"security.capability": capability}
    names[b"sticky"].xattrs = {b"system.posix_acl_default": acl, b"trusted.overlay.opaque": b"y"}
    names[b"symlink"].xattrs = {b"trusted.t": b"t", b"security.x": b""}
    values = {b"user.%d" % size: bytes([size % 251]) * size for size in (0, 1, 3, 4, 5, 4000)}
    names[b"xattrs"] = file(store, b"xattrs")
    names[b"xattrs"].xattrs = values | {b"user." + b"n" * 250: b"long name"}
    for size in (*range(3900, 4100, 7), 30_000, 60_000, 65_535):
        names[b"value%d" % size] = file(store, b"v")
        names[b"value%d" % size].xattrs = {b"user.v": rng.randbytes(size)}
    deep = names[b"deep"] = directory()
    for level in range(200):
        deep.children[b"d%d" % level] = deep = directory()
    deep.children[b"bottom"] = file(store, b"bottom")
    return directory(names)
