"""Layer compression by content: cases 17 and 18 of the layers that broke other tools, truncation and corruption."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
import zlib

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from imaged.errors import DigestMismatchError, LayerError
from imaged.ids import OciDigest
from imaged.oci.blob import ByteStream, VerifiedStream
from imaged.oci.decompress import GzipStream, ZstdStream, decompress
from tests.support.oci import digest, make_tar

DATA = random.Random(7).randbytes(1000) * 700 + b"end"
TAR = make_tar(("a/", b""), ("a/file", DATA[:5000]))


class Trickle:
    """A stream of short reads, as sockets give them."""

    def __init__(self, data: bytes, step: int) -> None:
        self._inner, self._step = io.BytesIO(data), step
        self.ended = False

    def read(self, size: int, /) -> bytes:
        data = self._inner.read(min(size, self._step))
        self.ended = not data
        return data


def drain(stream: ByteStream, step: int = 1 << 18) -> bytes:
    pieces = []
    while piece := stream.read(step):
        assert len(piece) <= step
        pieces.append(piece)
    return b"".join(pieces)


def unpack(data: bytes, step: int = 1 << 18) -> bytes:
    return drain(decompress(io.BytesIO(data)), step)


def gzip_with_all_header_fields(data: bytes) -> bytes:
    header = b"\x1f\x8b\x08" + bytes([2 | 4 | 8 | 16]) + b"\0\0\0\0\0\x03" + b"\x04\0ABCD" + b"name\0" + b"comment\0"
    header += (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little")
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = packer.compress(data) + packer.flush()
    return header + body + zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")


def zstd_frames(data: bytes, step: int, **options: bool) -> bytes:
    packer = zstandard.ZstdCompressor(**options)
    return b"".join(packer.compress(data[at : at + step]) for at in range(0, len(data), step))


SKIPPABLE = b"\x5a\x2a\x4d\x18\x05\0\0\0hello"
GOOD = {
    "plain": DATA,
    "plain tar": TAR,
    "empty": b"",
    "short": b"abc",
    "gzip": gzip.compress(DATA),
    "gzip of several members": gzip.compress(DATA[:7]) + gzip.compress(b"") + gzip.compress(DATA[7:]),
    "gzip of many members": b"".join(gzip.compress(DATA[at : at + 3001], 1) for at in range(0, len(DATA), 3001)),
    "gzip with name, extra, comment and header crc": gzip_with_all_header_fields(DATA),
    "gzip with zero padding": gzip.compress(DATA) + bytes(5000),
    "gzip stored": gzip.compress(DATA, 0),
    "zstd": zstandard.compress(DATA),
    "zstd of several frames": zstd_frames(DATA, 5003),
    "zstd with checksums": zstd_frames(DATA, 300_001, write_checksum=True),
    "zstd without content size": zstd_frames(DATA, 300_001, write_content_size=False),
    "zstd with skippable frames": SKIPPABLE + zstd_frames(DATA, 100_000) + SKIPPABLE * 3,
    "zstd of nothing": zstandard.compress(b""),
    "zstd skippable only": SKIPPABLE,
    "zstd run of one byte": zstandard.compress(bytes([7]) * 3_000_000),
}
EXPECTED = {
    "plain tar": TAR, "empty": b"", "short": b"abc", "zstd of nothing": b"", "zstd skippable only": b"",
    "zstd run of one byte": bytes([7]) * 3_000_000,
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("step", [1 << 20, 1000])
def test_every_structure(name: str, step: int) -> None:
    source = Trickle(GOOD[name], step)
    assert drain(decompress(source), step=100_000) == EXPECTED.get(name, DATA)
    assert source.ended, "the source must be read to its end, or its digest is not checked"


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, zstd_frames], ids=["gzip", "zstd", "frames"])
def test_truncated_anywhere(pack: object) -> None:
    packed = zstd_frames(DATA, 100_000) if pack is zstd_frames else pack(DATA)  # type: ignore[operator]
    boundaries = (
        {len(zstd_frames(DATA[:at], 100_000)) for at in range(0, len(DATA), 100_000)} if pack is zstd_frames else {0}
    )
    for size in [*range(3, 30), *range(30, len(packed), 997), *range(len(packed) - 12, len(packed))]:
        if size in boundaries:
            continue
        if size < 4 and pack is not gzip.compress:
            continue  # too short to be told from a plain layer
        with pytest.raises(LayerError, match="byte"):
            unpack(packed[:size])


@pytest.mark.parametrize("packed", [gzip.compress(DATA), zstandard.compress(DATA)], ids=["gzip", "zstd"])
@pytest.mark.parametrize("garbage", [b"garbage behind it", b"\x1f", b"\x28\xb5\x2f", b"\x50\x2a\x4d\x18\xff\0\0\0x"])
def test_trailing_garbage(packed: bytes, garbage: bytes) -> None:
    with pytest.raises(LayerError, match="compressed byte"):
        unpack(packed + garbage)


def test_zero_padding_after_zstd_is_garbage() -> None:
    with pytest.raises(LayerError, match="where a zstd frame should begin"):
        unpack(zstandard.compress(DATA) + bytes(512))


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["gzip", "zstd"]), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_flipped_bits_are_found_or_harmless(kind: str, where: float, flip: int) -> None:
    """gzip headers hold bytes that mean nothing; everything else must raise, never give wrong bytes."""
    text = DATA[:50_000]
    packed = bytearray(gzip.compress(text) if kind == "gzip" else zstd_frames(text, 20_000, write_checksum=True))
    packed[int(where * len(packed))] ^= flip
    try:
        result = unpack(bytes(packed))
    except LayerError:
        return
    assert result in (text, bytes(packed)), "a damaged first magic makes a plain layer of it: the diff_id finds that"


@pytest.mark.parametrize(
    ("data", "name"), [(b"\xfd7zXZ\x00....", "xz"), (b"BZh91AY&SY...", "bzip2"), (b"\x04\x22\x4d\x18......", "lz4")]
)
def test_other_compressions_are_named(data: bytes, name: str) -> None:
    with pytest.raises(LayerError, match=f"compressed with {name}"):
        decompress(io.BytesIO(data))


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_bomb_costs_no_memory(kind: str) -> None:
    size = 96 << 20
    packed = gzip.compress(bytes(size), 9) if kind == "gzip" else zstandard.compress(bytes(size))
    stream = decompress(io.BytesIO(packed))
    assert isinstance(stream, GzipStream if kind == "gzip" else ZstdStream)
    tracemalloc.start()
    try:
        total = 0
        while piece := stream.read(1 << 18):
            total += len(piece)
        assert total == size
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [gzip.compress(DATA), zstandard.compress(DATA), DATA], ids=["gzip", "zstd", "plain"])
def test_errors_of_the_stream_below_come_through(packed: bytes) -> None:
    verified = VerifiedStream(
        io.BytesIO(packed), digest=OciDigest.parse(digest(b"other")), size_bytes=len(packed), what="blob"
    )
    with pytest.raises(DigestMismatchError):
        drain(decompress(verified))
