import contextlib
import stat
from typing import Any

import msgpack
import pytest

from imaged.conversion.layer import HardLink, Layer, NodeEntry, Opaque, Whiteout, chunk_ids, clean_path, marker
from imaged.erofs.tree import Inode
from imaged.errors import FormatError, LayerError
from imaged.extent import Extent
from imaged.ids import ChunkId
from tests.support import tars
from tests.support.images import ingest
from tests.support.memory_store import MemoryStore

A, B = ChunkId(bytes(32)), ChunkId(b"\1" * 32)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (b"a/b", b"a/b"),
        (b"./a/b/", b"a/b"),
        (b"/a//b/.", b"a/b"),
        (b"././a", b"a"),
        (b".", b""),
        (b"./", b""),
        (b"/", b""),
        (b"..", b""),
        (b"../../etc/passwd", b"etc/passwd"),
        (b"a/../../b", b"b"),
        (b"a/..b/.c", b"a/..b/.c"),
        (b".hidden", b".hidden"),
        (b"-dash/new\nline/back\\slash/\xff\xfe", b"-dash/new\nline/back\\slash/\xff\xfe"),
        (b"n" * 255, b"n" * 255),
        (b"d/" * 2047 + b"f", b"d/" * 2047 + b"f"),
        (b"x/.wh." + b"n" * 255, b"x/.wh." + b"n" * 255),
    ],
)
def test_clean_paths(raw: bytes, clean: bytes) -> None:
    assert clean_path(raw) == clean


@pytest.mark.parametrize("raw", [b"", b"a\0b", b"n" * 256, b"d/" * 2048 + b"f", b"n" * 5000, b"x/.wh." + b"n" * 256])
def test_paths_that_no_file_system_takes(raw: bytes) -> None:
    with pytest.raises(ValueError):
        clean_path(raw)


def test_markers() -> None:
    assert marker(b"a/b") is None
    assert marker(b"a/b.wh.c") is None
    gone, opaque, top = marker(b"a/.wh.b"), marker(b"a/.wh..wh..opq"), marker(b".wh..wh..opq")
    assert isinstance(gone, Whiteout) and gone.path == b"a/b"
    assert isinstance(opaque, Opaque) and opaque.path == b"a"
    assert isinstance(top, Opaque) and top.path == b""
    for name in (b".wh.", b"a/.wh..", b"a/.wh..."):
        with pytest.raises(ValueError):
            marker(name)


def sample() -> Layer:
    file = Inode(stat.S_IFREG | 0o4755, 70_000, 4_294_967_294, -1)
    file.size_bytes, file.extents = 3 * 4096 - 1, [Extent(1, A, 3), Extent(1, None), Extent(1, B)]
    file.xattrs = {b"user.a": b"\0", b"user.b": b""}
    link = Inode(stat.S_IFLNK | 0o777, target=b"x/y")
    device = Inode(stat.S_IFCHR, major=4095, minor=1_048_575, mtime_ns=20_000_000_000 * 10**9)
    return Layer(
        [
            NodeEntry(b"", Inode(stat.S_IFDIR | 0o755)),
            NodeEntry(b"f", file),
            NodeEntry(b"l", link),
            NodeEntry(b"d", device),
            NodeEntry(b"p", Inode(stat.S_IFIFO)),
            HardLink(b"h", b"f"),
            Whiteout(b"gone"),
            Opaque(b""),
            Opaque(b"dir"),
        ],
        ("'x' is left out", "so is 'ä\\xff'"),
    )


def test_memo_round_trip() -> None:
    raw = sample().to_bytes()
    layer = Layer.parse(raw)
    assert layer.to_bytes() == raw
    assert layer.warnings == sample().warnings
    assert list(layer.chunk_ids()) == chunk_ids(raw) == [A, B]
    node = layer.entries[1]
    assert isinstance(node, NodeEntry)
    assert node.inode.extents == [Extent(1, A, 3), Extent(1, None), Extent(1, B)]
    assert (node.inode.mtime_ns, node.inode.xattrs) == (-1, {b"user.a": b"\0", b"user.b": b""})


REG, DIR, LNK = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFLNK | 0o777


@pytest.mark.parametrize(
    "row",
    [
        (),
        (1,),
        (9, b"x"),
        (3, b""),
        (3, "text"),
        (3, b"/x"),
        (3, b"a/../x"),
        (2, b"a", b"/"),
        (2, b"a", b"../x"),
        (1, b"a", REG, 0, 0, 0, 0, (1,), {}),
        (1, b"a", REG, 0, 0, 0, 0, (4096, 1, 1, 0), {}),
        (1, b"a", REG, 0, 0, 0, 0, (4096, 1, -2, 0), {}),
        (1, b"a", REG, 0, 0, 0, 0, (4096, 1, -1, 1), {}),
        (1, b"a", REG, 0, 0, 0, 0, (4096, 0, 0, 0), {}),
        (1, b"a", REG, 0, 0, 0, 0, (4096, 1, 0, 256), {}),
        (1, b"a", REG, 0, 0, 0, 0, (-1,), {}),
        (1, b"a", REG, 0, 0, 0, 0, None, {}),
        (1, b"a", REG, -1, 0, 0, 0, (0,), {}),
        (1, b"a", REG, 0, 2**32 - 1, 0, 0, (0,), {}),
        (1, b"a", REG, 0, 0, 0, 10**9, (0,), {}),
        (1, b"a", REG, 0, 0, 0.5, 0, (0,), {}),
        (1, b"a", REG, 0, 0, 0, 0, (0,), {b"user.a": 1}),
        (1, b"a", REG, 0, 0, 0, 0, (0,), {b"": b""}),
        (1, b"a", 0o644, 0, 0, 0, 0, (0,), {}),
        (1, b"a", DIR, 0, 0, 0, 0, (0,), {}),
        (1, b"a", LNK, 0, 0, 0, 0, b"", {}),
        (1, b"a", LNK, 0, 0, 0, 0, None, {}),
        (1, b"a", stat.S_IFCHR, 0, 0, 0, 0, (4096, 0), {}),
        (1, b"a", stat.S_IFCHR, 0, 0, 0, 0, (1,), {}),
        "text",
        7,
    ],
)
def test_memo_that_lies(row: Any) -> None:
    for document in ({"version": 1}, {"version": 2, "warnings": []}):
        raw = msgpack.packb({**document, "chunks": bytes(32), "entries": [row]})
        with pytest.raises(FormatError, match="entry"):
            Layer.parse(raw)


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"version": 0, "chunks": b"", "entries": []},
        {"version": 3, "chunks": b"", "entries": [], "warnings": []},
        {"version": 2, "chunks": b"", "entries": []},
        {"version": 2, "chunks": b"", "entries": [], "warnings": "text"},
        {"version": 2, "chunks": b"", "entries": [], "warnings": [b"bytes"]},
        {"version": 1, "chunks": bytes(31), "entries": []},
        {"version": 1, "chunks": b"", "entries": 0},
    ],
)
def test_documents_that_are_no_memo(document: Any) -> None:
    with pytest.raises(FormatError):
        Layer.parse(msgpack.packb(document))


def test_memos_of_version_1_are_layers_without_warnings() -> None:
    document = msgpack.unpackb(sample().to_bytes())
    del document["warnings"]
    layer = Layer.parse(msgpack.packb({**document, "version": 1}))
    assert layer.warnings == ()
    assert len(layer.entries) == len(sample().entries)
    assert chunk_ids(msgpack.packb({**document, "version": 1})) == [A, B]


def test_damaged_memo_bytes() -> None:
    raw = sample().to_bytes()
    for length in range(len(raw)):
        with pytest.raises(FormatError):
            Layer.parse(raw[:length])
    with pytest.raises(FormatError):
        Layer.parse(raw + b"\0")
    for position in range(len(raw)):
        for flip in (0xFF, 0x01, 0x80):
            damaged = raw[:position] + bytes([raw[position] ^ flip]) + raw[position + 1 :]
            with contextlib.suppress(FormatError):
                Layer.parse(damaged)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (tars.member(b""), "empty"),
        (tars.pax((b"path", b"a\0b")) + tars.member(b"x"), "zero byte"),
        (tars.member(b"n" * 5000), "more than"),
        (tars.member(b"n" * 256), "more than 255"),
        (tars.member(b"f", uid=4_294_967_295), "owner"),
        (tars.member(b"f", gid=-2), "owner"),
        (tars.symlink(b"l", b""), "symlink target"),
        (tars.symlink(b"l", b"t" * 4096), "symlink target"),
        (tars.member(b"c", kind=b"3", major=4096), "device number"),
        (tars.member(b".wh."), "whiteout"),
        (tars.hard_link(b"h", b""), "empty"),
        (tars.pax((b"SCHILY.xattr.user.a", b"v" * 65537)) + tars.member(b"f"), "xattr"),
    ],
)
def test_entries_that_can_not_be(member: bytes, words: str) -> None:
    with pytest.raises(LayerError, match=words):
        ingest(tars.archive(member), MemoryStore())
