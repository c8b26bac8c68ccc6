"""vm.json: what is not a record is refused with the field named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from imaged.errors import FormatError
from tests.unit.vmm.test_vms import wanted
from vmm.record import Park, VmRecord


def test_a_record_survives_its_bytes() -> None:
    record = wanted("one", park=Park(name="a", created_ns=3), temporary=True)
    assert VmRecord.parse(record.to_bytes()) == record


def change(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.__setitem__(key, value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change("version", 99), "version 1"),
        (change("state", "asleep"), "field state"),
        (change("memory_bytes", "1"), "field memory_bytes"),
        (change("cpus", True), "field cpus"),
        (change("park", {"name": "a"}), "field created_ns"),
        (change("park", {"name": "a", "created_ns": 1}), "field own"),
        (change("park", 7), "field park"),
        (lambda document: document.pop("snapshot"), "field snapshot"),
    ],
)
def test_anything_else_is_refused(spoil: Callable[[dict[str, Any]], object], said: str) -> None:
    document = json.loads(wanted("one").to_bytes())
    spoil(document)
    with pytest.raises(FormatError, match=said):
        VmRecord.parse(json.dumps(document).encode())
    with pytest.raises(FormatError):
        VmRecord.parse(b"[]")
    with pytest.raises(FormatError):
        VmRecord.parse(b"{")
