import contextlib
import threading
from collections.abc import Iterator

import pytest

from imaged.conversion.layerstream import LayerStream, Pipe
from imaged.errors import DigestMismatchError, LayerError, RegistryError
from imaged.oci.image import LayerSource
from tests.support.oci import digest


class Repeating:
    """A stream of `count` equal pieces that notes how many were taken, then fails if told to."""

    def __init__(self, piece: bytes, count: int, error: Exception | None = None) -> None:
        self.piece, self.count, self.error, self.taken = piece, count, error, 0

    def read(self, size: int, /) -> bytes:
        assert size >= len(self.piece)
        if self.taken == self.count:
            if self.error is not None:
                raise self.error
            return b""
        self.taken += 1
        return self.piece


def source(stream: Repeating, diff_id: str) -> LayerSource:
    @contextlib.contextmanager
    def opened() -> Iterator[Repeating]:
        yield stream

    return LayerSource(diff_id=diff_id, digest="", media_type="", size_bytes=None, open=opened)


def read_all(stream: LayerStream) -> bytes:
    return b"".join(iter(lambda: stream.read(1 << 20), b""))


def test_bytes_come_through() -> None:
    data = b"plain tar bytes" * 5000
    with LayerStream(source(Repeating(data, 3), digest(data * 3)), name="x") as stream:
        assert read_all(stream) == data * 3
        assert stream.stored_bytes == len(data) * 3


def test_small_reads() -> None:
    with LayerStream(source(Repeating(b"0123456789ab", 2), digest(b"0123456789ab" * 2)), name="x") as stream:
        assert [stream.read(5), stream.read(5), stream.read(5)] == [b"01234", b"56789", b"ab"]
        assert read_all(stream) == b"0123456789ab"


def test_a_wrong_diff_id_is_told_at_the_end() -> None:
    with LayerStream(source(Repeating(b"x" * 100, 1), digest(b"y")), name="sha256:1") as stream:
        assert stream.read(1000) == b"x" * 100
        with pytest.raises(DigestMismatchError, match="sha256:1 has diff_id"):
            stream.read(1000)


def test_errors_of_the_download_arrive_after_its_bytes() -> None:
    broken = Repeating(b"x" * 100, 2, RegistryError("gone"))
    with LayerStream(source(broken, digest(b"")), name="x") as stream, pytest.raises(RegistryError, match="gone"):
        read_all(stream)


def test_errors_of_decompression_name_the_layer() -> None:
    broken = Repeating(b"\x1f\x8b\x08" + b"\xff" * 2000, 1)
    with LayerStream(source(broken, digest(b"")), name="sha256:2") as stream, pytest.raises(LayerError) as caught:
        read_all(stream)
    assert caught.value.layer == "sha256:2"


def test_a_stream_that_nobody_reads_stays_bounded_and_ends_at_once() -> None:
    endless = Repeating(bytes(1 << 20), 1 << 30)
    before = set(threading.enumerate())  # of which some may end meanwhile
    with LayerStream(source(endless, digest(b"")), name="x") as stream:
        stream.read(1)
        for _ in range(100):
            if endless.taken >= 17:
                break
            threading.Event().wait(0.02)
    assert 16 <= endless.taken <= 24
    assert set(threading.enumerate()) <= before


def test_a_pipe_whose_reader_left_lets_its_writer_go() -> None:
    pipe = Pipe(limit_bytes=10)
    pipe.write(b"x" * 10)
    writer = threading.Thread(target=pipe_write, args=(pipe,))
    writer.start()
    pipe.cancel()
    writer.join(5)
    assert not writer.is_alive()


def pipe_write(pipe: Pipe) -> None:
    with contextlib.suppress(Exception):
        pipe.write(b"y")
