"""What is damaged on the disk is not told to be in the bucket."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from imaged.chunkstore.appender import Appender
from imaged.chunkstore.index import Index
from imaged.chunkstore.pack import PACKS_DIRECTORY, pack_path
from imaged.frame import Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.s3.packtable import PackTable
from imaged.s3.uploads import Uploads
from tests.support.memory_objects import MemoryObjects

_AT = 2


def _another_id(header: FrameHeader) -> bytes:
    return FrameHeader(ChunkId.of(b"another"), header.codec, header.size_bytes, header.payload_bytes).pack()


def _longer(header: FrameHeader) -> bytes:
    return FrameHeader(header.id, header.codec, header.size_bytes + 99, header.payload_bytes + 99).pack()


@pytest.mark.parametrize(
    ("damaged", "kept"),
    [
        pytest.param(lambda header: b"XXXX", 2, id="no header"),
        pytest.param(_another_id, 5, id="the header of another chunk"),
        pytest.param(_longer, 2, id="a wrong length"),
        pytest.param(lambda header: header.pack() + b"XXXX", 5, id="a payload"),
        pytest.param(lambda header: header.pack(), 6, id="nothing"),
    ],
)
def test_every_chunk_of_the_index_is_in_the_bucket(
    tmp_path: Path, damaged: Callable[[FrameHeader], bytes], kept: int
) -> None:
    (tmp_path / PACKS_DIRECTORY).mkdir()
    index = Index.open(tmp_path / "index.mdb")
    index.is_mirror = True
    appender = Appender(tmp_path, index)
    frames = [Frame.of(os.urandom(5000)) for _ in range(6)]
    places = appender.append(frames)
    appender.seal()
    appender.commit()
    appender.close()
    with pack_path(tmp_path, places[0].pack).open("r+b") as file:
        file.seek(places[_AT].offset)
        file.write(damaged(frames[_AT].header))
    packs = PackTable(tmp_path, index)
    Uploads(tmp_path, index, MemoryObjects(), packs).run()
    assert packs.is_safe(places[0].pack)
    contents = packs.contents(packs.all()[0].id)
    assert contents is not None
    uploaded = {row.chunk for row in contents.rows}
    assert len(uploaded) == kept
    assert {frame.id for frame in frames if index.find(frame.id) is not None} == uploaded
    assert index.usage().chunks == kept
    index.close()
