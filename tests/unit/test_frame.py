"""Frame headers that promise nothing."""

from __future__ import annotations

import pytest

from imaged.errors import FormatError
from imaged.frame import Codec, Frame, FrameHeader
from imaged.ids import ChunkId

EMPTY = ChunkId.of(b"")


@pytest.mark.parametrize(
    ("codec", "size_bytes", "payload_bytes"),
    [(Codec.RAW, 0, 0), (Codec.ZSTD, 0, 0), (Codec.ZSTD, 0, 9), (Codec.ZSTD, 9, 0)],
)
def test_a_chunk_of_no_bytes_is_refused(codec: Codec, size_bytes: int, payload_bytes: int) -> None:
    with pytest.raises(FormatError, match="at least one byte"):
        FrameHeader.parse(FrameHeader(EMPTY, codec, size_bytes, payload_bytes).pack())


def test_the_shortest_chunk_and_a_missing_one() -> None:
    for frame in (Frame.of(b"x"), Frame.missing(EMPTY)):
        assert Frame.parse(frame.pack()) == frame
