"""Records of images: anybody with write scope may send one, and everybody lists it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imaged.errors import FormatError
from imaged.ids import ChunkId
from imaged.record import ImageRecord

RECORD = ImageRecord(
    metadata=ChunkId(b"\1" * 32),
    metadata_bytes=4096,
    data=ChunkId(b"\2" * 32),
    data_bytes=8192,
    entries=3,
    platform="linux/amd64",
    config={"Env": ["PATH=/bin"], "Labels": {"a": "\u00e4"}},
)


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(RECORD.to_bytes()), **fields}, sort_keys=True, separators=(",", ":")).encode()


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return {"x": found}


def test_a_record_is_its_bytes() -> None:
    assert ImageRecord.parse(RECORD.to_bytes()) == RECORD
    assert ImageRecord.from_json(json.loads(RECORD.to_bytes())) == RECORD


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"data_bytes": 10**4000}, "data_bytes"),
        ({"data_bytes": 1 << 63}, "data_bytes"),
        ({"metadata_bytes": -1}, "metadata_bytes"),
        ({"entries": True}, "entries"),
        ({"entries": 1.5}, "entries"),
        ({"config": nested(100)}, "levels"),
        ({"config": nested(800)}, "levels"),
        ({"config": {"x": float("nan")}}, "NaN"),
        ({"config": {"x": float("inf")}}, "Infinity"),
        ({"config": []}, "config"),
        ({"layers": [1]}, "layers"),
        ({"version": 2}, "version 1"),
        ({"more": 1}, "canonical"),
    ],
)
def test_what_no_record_says_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(FormatError) as caught:
        ImageRecord.parse(changed(**fields))
    assert named in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"[" * 100_000, b" " + RECORD.to_bytes(), RECORD.to_bytes() + b"\n"])
def test_other_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(FormatError):
        ImageRecord.parse(raw)


def test_what_is_as_deep_as_an_image_can_be_passes() -> None:
    record = ImageRecord.parse(changed(config=nested(60)))
    assert ImageRecord.parse(record.to_bytes()) == record
