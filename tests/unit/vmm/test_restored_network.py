"""Which network a VM gets that goes on from a snapshot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vmm.errors import VmArgumentError
from vmm.restore import _network


def opened(made_with: str, *, pulled: bool = False) -> Any:
    machine = SimpleNamespace(network=made_with)
    return SimpleNamespace(name="web", id="0" * 64, record=SimpleNamespace(machine=machine), pulled=pulled)


@pytest.mark.parametrize(
    ("made_with", "pulled", "asked", "given"),
    [
        ("none", False, None, "none"),
        ("none", True, "none", "none"),
        ("user", False, None, "user"),
        ("user", False, "none", "restricted"),
        ("user", False, "restricted", "restricted"),
        ("user", True, None, "restricted"),
        ("user", True, "none", "restricted"),
        ("user", True, "user", "user"),
        ("restricted", False, None, "restricted"),
        ("restricted", False, "user", "user"),
    ],
)
def test_a_pulled_snapshot_does_not_decide(made_with: str, *, pulled: bool, asked: str | None, given: str) -> None:
    assert _network(opened(made_with, pulled=pulled), asked) == given


def test_what_was_made_without_one_can_get_none() -> None:
    with pytest.raises(VmArgumentError):
        _network(opened("none"), "user")
