"""Verified streams: case 19, digest and size."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from imaged.errors import DigestMismatchError, SourceError
from imaged.ids import OciDigest
from imaged.oci.blob import FileSlice, VerifiedStream, read_document
from imaged.oci.descriptor import DOCUMENT_LIMIT_BYTES, Descriptor
from tests.support.oci import digest

DATA = bytes(range(256)) * 100


def verified(data: bytes, *, of: bytes = DATA, size_bytes: int | None = len(DATA)) -> VerifiedStream:
    return VerifiedStream(io.BytesIO(data), digest=OciDigest.parse(digest(of)), size_bytes=size_bytes, what="blob x")


def drain(stream: VerifiedStream) -> bytes:
    return b"".join(iter(lambda: stream.read(1000), b""))


def test_right_bytes_come_through() -> None:
    assert drain(verified(DATA)) == DATA
    assert drain(verified(DATA, size_bytes=None)) == DATA
    assert verified(DATA).read(0) == b""


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        (DATA[:-1], "25599 bytes, not the 25600"),
        (b"", "0 bytes, not the 25600"),
        (DATA + b"x", "more than the 25600"),
        (DATA[:-1] + b"x", "digest sha256:"),
    ],
)
def test_wrong_bytes_are_refused(data: bytes, fact: str) -> None:
    with pytest.raises(DigestMismatchError, match=fact):
        drain(verified(data))


def test_the_last_bytes_are_not_given_out_unchecked() -> None:
    stream = verified(b"x" + DATA[1:])
    with pytest.raises(DigestMismatchError):
        stream.read(len(DATA))


def test_without_a_stated_size_the_end_is_checked() -> None:
    with pytest.raises(DigestMismatchError, match="digest"):
        drain(verified(DATA[:-1], size_bytes=None))


def test_without_a_digest_the_size_is_checked() -> None:
    stream = VerifiedStream(io.BytesIO(DATA), digest=None, size_bytes=len(DATA) + 1, what="layer")
    with pytest.raises(DigestMismatchError, match="25600 bytes, not the 25601"):
        drain(stream)


def test_sha512() -> None:
    import hashlib

    name = OciDigest.parse("sha512:" + hashlib.sha512(DATA).hexdigest())
    assert drain(VerifiedStream(io.BytesIO(DATA), digest=name, size_bytes=len(DATA), what="blob")) == DATA


def test_documents_are_capped() -> None:
    blob = Descriptor(media_type="x", digest=OciDigest.parse(digest(b"")), size_bytes=DOCUMENT_LIMIT_BYTES + 1)
    with pytest.raises(SourceError, match="more than the 4194304 allowed"):
        read_document(io.BytesIO(b""), blob, "manifest")


def test_file_slices_are_independent(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    try:
        first, second = FileSlice(fd, 0, 1000, "a"), FileSlice(fd, 500, 100, "b")
        assert first.read(600) == DATA[:600]
        assert second.read(1000) == DATA[500:600]
        assert first.read(1000) == DATA[600:1000]
        assert first.read(1) == second.read(1) == b""
        with pytest.raises(SourceError, match="ends 10 bytes early"):
            drain_slice(FileSlice(fd, len(DATA) - 5, 15, "cut"))
    finally:
        os.close(fd)


def drain_slice(stream: FileSlice) -> None:
    while stream.read(100):
        pass
