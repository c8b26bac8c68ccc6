import io
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from imaged.conversion.tar import HARD_LINK, TarEntry, TarReader
from imaged.errors import LayerError
from tests.support import tars


class Trickle:
    """A stream that gives a few bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self._stream, self._step = io.BytesIO(data), step

    def read(self, size: int) -> bytes:
        return self._stream.read(min(size, self._step))


def read(data: bytes, step: int = 0) -> list[tuple[TarEntry, bytes]]:
    reader = TarReader(Trickle(data, step) if step else io.BytesIO(data), layer="sha256:test")
    return [(entry, b"".join(reader.data())) for entry in reader]


def one(data: bytes) -> TarEntry:
    [(entry, _)] = read(data)
    return entry


def test_every_type_and_field() -> None:
    data = tars.archive(
        tars.directory(b"./", mode=0o1777, uid=7),
        tars.member(b"file", b"content", mode=0o4755, uid=70_000, gid=4_294_967_294, mtime=1_700_000_000),
        tars.symlink(b"link", b"file"),
        tars.hard_link(b"other", b"file"),
        tars.member(b"c", kind=b"3", major=4095, minor=1_048_575),
        tars.member(b"b", kind=b"4", major=8, minor=1),
        tars.member(b"p", kind=b"6", mode=0),
        tars.member(b"contiguous", b"x", kind=b"7"),
        tars.member(b"old", b"y", kind=b"\0"),
        tars.member(b"olddir/", kind=b"\0"),
    )
    for step in (0, 1, 7, 512, 1000):
        entries = read(data, step)
        types = [entry.file_type for entry, _ in entries]
        assert types == [
            stat.S_IFDIR,
            stat.S_IFREG,
            stat.S_IFLNK,
            HARD_LINK,
            stat.S_IFCHR,
            stat.S_IFBLK,
            stat.S_IFIFO,
            stat.S_IFREG,
            stat.S_IFREG,
            stat.S_IFDIR,
        ]
        entry, content = entries[1]
        assert content == b"content"
        assert (entry.mode, entry.uid, entry.gid) == (0o4755, 70_000, 4_294_967_294)
        assert (entry.mtime_ns, entry.size_bytes, entry.offset) == (1_700_000_000 * 10**9, 7, 512)
        assert entries[2][0].link == entries[3][0].link == b"file"
        assert (entries[4][0].major, entries[4][0].minor) == (4095, 1_048_575)


def test_numbers_in_base_256_and_odd_octal() -> None:
    entry = one(tars.archive(tars.member(b"f", mtime=-5, uid=1 << 31)))
    assert entry.mtime_ns == -5 * 10**9
    assert entry.uid == 1 << 31
    spaced = tars.header(b"f").replace(b"0000644\0", b"   644 \0", 1)
    assert one(tars.seal(spaced) + tars.END).mode == 0o644
    empty = tars.header(b"f").replace(b"0000644\0", b" " * 8, 1)
    assert one(tars.seal(empty) + tars.END).mode == 0


def test_huge_sizes_are_read_not_kept() -> None:
    class Zeros:
        """A header, then 9 GiB of zeros that are the file."""

        def __init__(self) -> None:
            self.head = tars.header(b"big", size=9 << 30)
            self.left = (9 << 30) + 1024
            self.chunk = bytes(1 << 20)

        def read(self, size: int) -> bytes:
            if self.head:
                head, self.head = self.head, b""
                return head
            piece = self.chunk[: min(size, self.left)]
            self.left -= len(piece)
            return piece

    reader = TarReader(Zeros())
    entries = [(entry.size_bytes, sum(len(piece) for piece in reader.data())) for entry in reader]
    assert entries == [(9 << 30, 9 << 30)]


def test_ustar_prefix_and_star_prefix() -> None:
    assert one(tars.archive(tars.header(b"name", prefix=b"some/dir"))).path == b"some/dir/name"
    star = tars.header(b"name", tail=b"dir".ljust(131, b"\0") + b"00000000000\0" * 2 + b"\0" * 8 + b"tar\0")
    assert one(star + tars.END).path == b"dir/name"
    # Old GNU archives keep times where POSIX has the prefix.
    gnu = tars.header(b"name", magic=b"ustar  \0", prefix=b"00000000000\0")
    assert one(gnu + tars.END).path == b"name"


def test_gnu_long_names() -> None:
    name, link = b"n" * 300, b"l" * 400
    data = (
        tars.header(b"././@LongLink", b"L", size=len(name) + 1)
        + tars.pad(name + b"\0")
        + tars.header(b"././@LongLink", b"K", size=len(link) + 1)
        + tars.pad(link + b"\0")
        + tars.symlink(b"short", b"target")
        + tars.member(b"next")
    )
    (first, _), (second, _) = read(data + tars.END)
    assert (first.path, first.link) == (name, link)
    assert second.path == b"next"


def test_pax_values() -> None:
    records = [
        (b"path", b"na\nme=\xff" * 40),
        (b"size", b"3"),
        (b"uid", b"4294967294"),
        (b"gid", b"70000"),
        (b"mtime", b"1700000000.123456789123"),
        (b"SCHILY.xattr.user.a", b"\0\x01\n=binary"),
        (b"SCHILY.xattr.user.empty", b""),
        (b"LIBARCHIVE.xattr.user.%C3%A9", b"aGk"),
        (b"LIBARCHIVE.xattr.user.a", b"bm8"),
    ]
    (entry, content), (plain, _) = read(
        tars.pax(*records) + tars.header(b"x", size=0) + tars.pad(b"abc") + tars.member(b"plain") + tars.END
    )
    assert entry.path == b"na\nme=\xff" * 40
    assert content == b"abc"
    assert (entry.uid, entry.gid, entry.mtime_ns) == (4_294_967_294, 70_000, 1_700_000_000_123_456_789)
    assert entry.xattrs == {
        b"user.a": b"\0\x01\n=binary",
        b"user.empty": b"",
        "user.é".encode(): b"hi",
    }
    assert plain.xattrs == {}
    assert plain.mtime_ns == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"-1.5", -1_500_000_000),
        (b"-0.000000001", -1),
        (b"4294967296.000000001", 4_294_967_296_000_000_001),
        (b"0.1", 100_000_000),
        (b"12", 12_000_000_000),
        (b"12.", 12_000_000_000),
    ],
)
def test_pax_times(text: bytes, expected: int) -> None:
    assert one(tars.pax((b"mtime", text)) + tars.member(b"f") + tars.END).mtime_ns == expected


def test_pax_globals_stay_until_overridden() -> None:
    data = (
        tars.pax((b"mtime", b"7.5"), (b"comment", b"commit"), kind=b"g")
        + tars.member(b"a")
        + tars.pax((b"mtime", b"8"))
        + tars.member(b"b")
        + tars.pax((b"mtime", b""))
        + tars.member(b"c", mtime=3)
        + tars.member(b"d")
    )
    times = [entry.mtime_ns for entry, _ in read(data + tars.END)]
    assert times == [7_500_000_000, 8_000_000_000, 3_000_000_000, 7_500_000_000]


@pytest.mark.parametrize("trailer", [b"", bytes(512), bytes(1024), bytes(1024 + 512 * 20), bytes(1024) + b"garbage"])
def test_ends(trailer: bytes) -> None:
    """Case 16: no end blocks, half of them, padding, and what follows the end does not count."""
    assert [entry.path for entry, _ in read(tars.member(b"a", b"1") + trailer)] == [b"a"]
    assert read(trailer[:1024]) == []


def test_padding_of_the_last_entry_may_be_missing() -> None:
    assert read(tars.header(b"a", size=3) + b"abc")[0][1] == b"abc"


def test_drain_reads_to_the_end() -> None:
    stream = io.BytesIO(tars.archive(tars.member(b"a")) + bytes(5 << 20))
    reader = TarReader(stream)
    assert len(list(reader)) == 1
    reader.drain()
    assert stream.read() == b""
    assert reader.offset == stream.tell()


def corrupt(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


GOOD = tars.member(b"a", b"1") + tars.member(b"b", b"2" * 600)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (corrupt(GOOD + tars.END, 1024 + 3), "byte 1024"),
        (GOOD[:1500], "byte 1500"),
        (GOOD[:1700], "is damaged"),
        (GOOD + b"x", "inside a header"),
        (bytes(512) + GOOD, "lone zero block"),
        (tars.member(b"f", kind=b"Z") + tars.END, "type b'Z'"),
        (tars.member(b"f", kind=b"N") + tars.END, "type b'N'"),
        (tars.member(b"f", size=-1) + tars.END, "negative"),
        (tars.seal(tars.header(b"f").replace(b"0000644", b"000o644", 1)) + tars.END, "octal"),
        (tars.pax((b"mtime", b"yesterday")) + tars.member(b"f"), "time"),
        (tars.pax((b"uid", b"-1")) + tars.member(b"f"), "decimal"),
        (tars.pax((b"path", b"x")), "without its entry"),
        (tars.header(b"p", b"x", size=9) + tars.pad(b"99 path=x") + tars.member(b"f"), "malformed"),
        (tars.header(b"p", b"x", size=6) + tars.pad(b"path=x") + tars.member(b"f"), "no length"),
        (tars.pax((b"LIBARCHIVE.xattr.user.a", b"!!!")) + tars.member(b"f"), "base64"),
        (tars.header(b"p", b"x", size=1 << 30), "not supported"),
        (tars.header(b"f", mtime=1 << 80), "out of range"),
    ],
)
def test_damage_is_told(data: bytes, words: str) -> None:
    with pytest.raises(LayerError, match=r"sha256:test") as caught:
        read(data)
    assert words in str(caught.value) + caught.value.hint


def test_every_cut_of_an_archive_is_told_or_between_entries() -> None:
    data = tars.member(b"a", b"1" * 10) + tars.pax((b"path", b"long")) + tars.member(b"b", b"2" * 600)
    whole = [b"a", b"long"]
    for length in range(len(data)):
        try:
            paths = [entry.path for entry, _ in read(data[:length])]
        except LayerError:
            continue
        # Only a cut between entries, or inside the padding of one, can go unseen: the diff_id is there for those.
        assert paths == whole[: len(paths)]
        assert length == 0 or 512 + 10 <= length <= 1024 or length >= len(data) - 424


SPARSE = [(4096, b"A" * 100), (1 << 20, b"B" * 4096), ((1 << 20) + 8192, b"C")]
SPARSE_SIZE = 3 << 20
SPARSE_DATA = b"".join(piece for _, piece in SPARSE)
SPARSE_MAP = tuple((offset, len(piece)) for offset, piece in SPARSE)


def sparse_numbers() -> list[bytes]:
    return [b"%d" % number for pair in SPARSE_MAP for number in pair]


def old_gnu_sparse(extra: int = 0) -> bytes:
    """The old GNU form, with `extra` empty-length pairs so that extension blocks are needed."""
    pairs = [(0, 0)] * extra + list(SPARSE_MAP)
    fields = [tars.octal(offset, 12) + tars.octal(length, 12) for offset, length in pairs]
    tail = bytes(41) + b"".join(fields[:4]).ljust(96, b"\0")
    tail += (b"\1" if len(fields) > 4 else b"\0") + tars.octal(SPARSE_SIZE, 12)
    blocks = b""
    rest = fields[4:]
    while rest:
        blocks += b"".join(rest[:21]).ljust(504, b"\0") + (b"\1" if len(rest) > 21 else b"\0") + bytes(7)
        rest = rest[21:]
    head = tars.header(b"s", b"S", size=len(SPARSE_DATA), magic=b"ustar  \0", tail=tail)
    return head + blocks + tars.pad(SPARSE_DATA)


def pax_sparse_00() -> bytes:
    numbers = sparse_numbers()
    records = [(b"GNU.sparse.size", b"%d" % SPARSE_SIZE), (b"GNU.sparse.numblocks", b"%d" % len(SPARSE))]
    for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
        records += [(b"GNU.sparse.offset", offset), (b"GNU.sparse.numbytes", length)]
    return tars.pax(*records) + tars.member(b"s", SPARSE_DATA)


def pax_sparse_01() -> bytes:
    records = [
        (b"GNU.sparse.name", b"s"),
        (b"GNU.sparse.size", b"%d" % SPARSE_SIZE),
        (b"GNU.sparse.map", b",".join(sparse_numbers())),
    ]
    return tars.pax(*records) + tars.member(b"GNUSparseFile.1/s", SPARSE_DATA)


def pax_sparse_10() -> bytes:
    records = [
        (b"GNU.sparse.major", b"1"),
        (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.name", b"s"),
        (b"GNU.sparse.realsize", b"%d" % SPARSE_SIZE),
    ]
    table = tars.pad(b"\n".join([b"%d" % len(SPARSE), *sparse_numbers(), b""]))
    return tars.pax(*records) + tars.member(b"GNUSparseFile.1/s", table + SPARSE_DATA)


@pytest.mark.parametrize(
    "data", [old_gnu_sparse(), old_gnu_sparse(30), pax_sparse_00(), pax_sparse_01(), pax_sparse_10()]
)
@pytest.mark.parametrize("step", [0, 100])
def test_sparse_forms(data: bytes, step: int) -> None:
    (entry, stored), (after, _) = read(data + tars.member(b"after") + tars.END, step)
    assert (entry.path, entry.file_type, entry.size_bytes) == (b"s", stat.S_IFREG, SPARSE_SIZE)
    assert entry.sparse == SPARSE_MAP
    assert stored == SPARSE_DATA
    assert after.path == b"after"


@pytest.mark.parametrize(
    "numbers",
    [b"0,1,0,1", b"10,5,12,5", b"0,99", b"3145728,4197", b"0", b"x,1", b"0,-1"],
)
def test_sparse_maps_that_lie(numbers: bytes) -> None:
    records = ((b"GNU.sparse.size", b"%d" % SPARSE_SIZE), (b"GNU.sparse.map", numbers))
    with pytest.raises(LayerError, match=r"sparse|decimal"):
        read(tars.pax(*records) + tars.member(b"s", SPARSE_DATA))


@pytest.mark.parametrize("sparse_format", ["gnu", "0.0", "0.1", "1.0"])
def test_sparse_files_as_gnu_tar_writes_them(tmp_path: Path, sparse_format: str) -> None:
    with open(tmp_path / "s", "wb") as stream:
        for index in range(40):
            stream.seek(index * 65536)
            stream.write(bytes([index + 1]) * 4096)
        stream.truncate(5_000_000)
    form = ["--format=gnu"] if sparse_format == "gnu" else ["--format=pax", f"--sparse-version={sparse_format}"]
    command = ["tar", "-C", str(tmp_path), "--sparse", *form, "-cf", "-", "s"]
    data = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    [(entry, stored)] = read(data)
    content = bytearray(entry.size_bytes)
    assert entry.sparse is not None
    position = 0
    for offset, length in entry.sparse:
        content[offset : offset + length] = stored[position : position + length]
        position += length
    assert entry.path == b"s"
    assert bytes(content) == (tmp_path / "s").read_bytes()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_as_the_standard_library_writes_it(form: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for index, name in enumerate(["a", "d/" + "x" * 90, "d/" * 40 + "deep"]):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = index * 700, index
            archive.addfile(info, io.BytesIO(bytes([index]) * info.size))
    entries = read(buffer.getvalue())
    assert [entry.path for entry, _ in entries] == [b"a", b"d/" + b"x" * 90, b"d/" * 40 + b"deep"]
    assert [content for _, content in entries] == [bytes([index]) * (index * 700) for index in range(3)]
