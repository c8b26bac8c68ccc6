"""What a server says of an image, before anything of it is believed."""

from __future__ import annotations

import json

import pytest

from imaged.errors import FormatError
from imaged.fetching.remote import RemoteImage
from imaged.ids import ChunkId
from imaged.record import ImageRecord

RECORD = ImageRecord(
    metadata=ChunkId.of(b"metadata"),
    metadata_bytes=8,
    data=ChunkId.of(b"data"),
    data_bytes=4096,
    entries=1,
    platform="linux/amd64",
    config={},
)


@pytest.mark.parametrize("field", ["created_at", "chunks", "stored_bytes"])
@pytest.mark.parametrize("value", ["1e30", "-1", "1e400", "NaN", '"soon"', "[]", "9007199254740992", "1" + "0" * 400])
def test_numbers_that_count_nothing_are_refused(field: str, value: str) -> None:
    sound = {"id": str(RECORD.id), "name": "app:1", "created_at": 1, "chunks": 2, "stored_bytes": 3}
    assert RemoteImage.parse(sound, RECORD).created_at == 1
    with pytest.raises(FormatError, match="image from the server"):
        RemoteImage.parse({**sound, field: json.loads(value)}, RECORD)
