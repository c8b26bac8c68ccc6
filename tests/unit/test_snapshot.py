"""The snapshot record: one form, one id, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from imaged.blockformat import IMAGE_LIMIT_BYTES
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.errors import FormatError, InvalidNameError
from imaged.ids import ChunkId
from imaged.names import snapshot_name
from imaged.record import ImageRecord
from imaged.snapshot import SIZE_LIMIT_BYTES, SnapshotRecord
from tests.support.snapshots import MACHINE

ONE, TWO, THREE = (ChunkId.of(text) for text in (b"one", b"two", b"three"))
RECORD = SnapshotRecord(
    image=ONE,
    memory=TWO,
    disk=THREE,
    disk_bytes=1 << 30,
    state=THREE,
    machine=replace(MACHINE, memory_bytes=512 << 20),
    parent=ONE,
    created_ns=1_700_000_000_123_456_789,
    vm="box",
    dirty_bytes=4096,
)


def test_a_record_comes_back_as_it_was() -> None:
    for record in (RECORD, replace(RECORD, disk=None, disk_bytes=0, parent=None)):
        assert SnapshotRecord.parse(record.pack()) == record
        assert record.id == ChunkId.of(record.pack())


def test_sizes_end_where_block_images_do() -> None:
    assert SIZE_LIMIT_BYTES == IMAGE_LIMIT_BYTES


@pytest.mark.parametrize(
    "other",
    [
        lambda document: json.dumps(document),
        lambda document: json.dumps(document, sort_keys=True, separators=(",", ":")) + " ",
        lambda document: json.dumps({**document, "more": 1}, sort_keys=True, separators=(",", ":")),
        lambda document: json.dumps(document, sort_keys=True, separators=(",", ":")).replace('"vm"', '"vm":"a","vm"'),
    ],
)
def test_other_bytes_of_the_same_fields_are_refused(other: Callable[[dict[str, Any]], str]) -> None:
    """They would have another id than the record, and a listing that tells ids from records would break."""
    with pytest.raises(FormatError, match="canonical"):
        SnapshotRecord.parse(other(RECORD.to_json()).encode())


def test_block_images_of_other_sizes_are_refused() -> None:
    RECORD.require_sizes(memory_bytes=512 << 20, disk_bytes=1 << 30)
    for memory_bytes, disk_bytes in ((256 << 20, 1 << 30), (512 << 20, 0)):
        with pytest.raises(FormatError, match="an image of"):
            RECORD.require_sizes(memory_bytes=memory_bytes, disk_bytes=disk_bytes)


def test_the_bytes_are_canonical() -> None:
    raw = RECORD.pack()
    assert raw.isascii()
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()
    assert raw.startswith(b'{"created_ns":1700000000123456789,"dirty_bytes":4096,"disk":"')
    # A version that writes other bytes for the same record gives it another id: stores in use would lose it.
    assert str(RECORD.id) == "dd2ac99781083bdc695c3ea0cc8800406e4783a045626d445dd47fbbd4de61df"


def test_own_block_images() -> None:
    assert RECORD.block_images == (THREE, TWO, THREE)
    assert replace(RECORD, disk=None).block_images == (THREE, TWO)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kind", "image"),
        ("version", 2),
        ("version", True),
        ("image", "zz"),
        ("image", None),
        ("memory", 5),
        ("disk", "ab"),
        ("state", None),
        ("parent", "x" * 64),
        ("created_ns", -1),
        ("created_ns", 1.5),
        ("created_ns", 1 << 63),
        ("disk_bytes", None),
        ("vm", 3),
        ("dirty_bytes", True),
        ("machine", []),
        ("machine.cpus", "1"),
        ("machine.memory_bytes", -5),
        ("machine.qemu", None),
        ("machine.firmware", 7),
        ("machine.layout", "1"),
        ("vm", "\x1b]0;title\x07\x1b[2J"),
        ("vm", "../x"),
        ("disk", None),
        ("disk_bytes", 0),
        ("disk_bytes", 4097),
        ("machine.memory_bytes", 0),
        ("machine.memory_bytes", (512 << 20) + 1),
        ("machine.memory_bytes", 1 << 40),
        ("machine.cpus", 0),
        ("machine.cpus", 65),
        ("machine.machine", "q35,kernel=/etc/shadow"),
        ("machine.machine", "microvm"),
        ("machine.accelerator", "tcg,thread=multi"),
        ("machine.network", "bridge"),
        ("machine.firmware", "ab"),
        ("machine.cpu", "max\x9b2J"),
        ("machine.qemu", "x" * 513),
        ("machine.kernel", "6.1\n"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any) -> None:
    document = RECORD.to_json()
    *way, last = path.split(".")
    target = document[way[0]] if way else document
    target[last] = value
    with pytest.raises(FormatError) as caught:
        SnapshotRecord.parse(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
    assert "canonical" not in caught.value.message
    assert "snapshot record" in caught.value.message or "chunk id" in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_record(raw: bytes) -> None:
    with pytest.raises(FormatError):
        SnapshotRecord.parse(raw)


def test_images_and_snapshots_are_told_apart() -> None:
    image = ImageRecord(metadata=ONE, metadata_bytes=1, data=TWO, data_bytes=1, entries=1, platform="linux/amd64")
    with pytest.raises(FormatError, match="kind"):
        SnapshotRecord.parse(image.to_bytes())
    with pytest.raises(FormatError, match="image record"):
        ImageRecord.parse(RECORD.pack())


@pytest.mark.parametrize("text", ["a", "ready", "Build-2.1_x", "0" * 63, "x" * 128, "deadbeef"])
def test_names(text: str) -> None:
    assert snapshot_name(text) == text


@pytest.mark.parametrize("text", ["", "-a", ".a", "a/b", "a:b", "a b", "a\n", "ä", "x" * 129, "0" * 64, "../x", "a\0"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(InvalidNameError):
        snapshot_name(text)


def test_a_ref_comes_back_as_it_was() -> None:
    for ref in (
        SnapshotRef(record=ONE, created_at=5),
        SnapshotRef(record=ONE, created_at=5, origin="http://x", chunks=7, stored_bytes=9, server="http://y"),
    ):
        assert SnapshotRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref


@pytest.mark.parametrize(
    "document", [None, {}, {"record": 1}, {"record": str(ONE), "created_at": "x", "origin": ""}, {"record": "zz"}]
)
def test_what_is_no_ref(document: Any) -> None:
    with pytest.raises(FormatError):
        SnapshotRef.from_json(document)
