"""Snapshot records: whatever is packed is parsed again, and nothing else gets through."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.names import VM_NAME
from imaged.snapshot import CPUS_LIMIT, MACHINE_TYPE, SIZE_LIMIT_BYTES, Machine, SnapshotRecord

IDS = st.binary(min_size=32, max_size=32).map(ChunkId)
NUMBERS = st.integers(0, (1 << 63) - 1)
TEXTS = st.text(max_size=20)
WORDS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
SIZES = st.integers(1, SIZE_LIMIT_BYTES // BLOCK_BYTES).map(lambda count: count * BLOCK_BYTES)
MACHINES = st.builds(
    Machine,
    qemu=WORDS,
    machine=st.from_regex(MACHINE_TYPE, fullmatch=True),
    accelerator=st.sampled_from(["kvm", "tcg"]),
    cpu=WORDS,
    cpus=st.integers(1, CPUS_LIMIT),
    memory_bytes=SIZES,
    network=st.sampled_from(["none", "user", "restricted"]),
    firmware=IDS.map(str),
    kernel=WORDS,
    layout=NUMBERS,
)
WITHOUT_DISK = st.builds(
    SnapshotRecord,
    image=IDS,
    memory=IDS,
    disk=st.none(),
    disk_bytes=st.just(0),
    state=IDS,
    machine=MACHINES,
    parent=st.none() | IDS,
    created_ns=NUMBERS,
    vm=st.from_regex(VM_NAME, fullmatch=True),
    dirty_bytes=NUMBERS,
)
RECORDS = WITHOUT_DISK | st.builds(
    lambda record, disk, size_bytes: replace(record, disk=disk, disk_bytes=size_bytes), WITHOUT_DISK, IDS, SIZES
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


@given(RECORDS)
def test_what_is_packed_is_parsed(record: SnapshotRecord) -> None:
    raw = record.pack()
    assert SnapshotRecord.parse(raw) == record
    assert SnapshotRecord.parse(raw).pack() == raw
    assert canonical(json.loads(raw)) == raw


@given(RECORDS, st.data())
def test_a_changed_field_is_another_record_or_none(record: SnapshotRecord, data: st.DataObject) -> None:
    document = record.to_json()
    target: dict[str, Any] = data.draw(st.sampled_from([document, document["machine"]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    with contextlib.suppress(FormatError):
        parsed = SnapshotRecord.parse(canonical(document))
        assert parsed.pack() == canonical(document)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(raw: bytes) -> None:
    with contextlib.suppress(FormatError):
        raise AssertionError(SnapshotRecord.parse(raw))
