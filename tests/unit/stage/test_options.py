"""What a process may be started with."""

from __future__ import annotations

from typing import Any

import pytest

from stage.errors import ArgumentError
from stage.options import RunOptions


@pytest.mark.parametrize(
    "given",
    [
        {"net": "Host"},
        {"net": "HOST "},
        {"net": "bridge"},
        {"net": None},
        {"net": ""},
        {"net": True},
        {"cpus": float("nan")},
        {"cpus": float("inf")},
        {"cpus": 0},
        {"cpus": "1"},
        {"cpus": True},
        {"pids": 1.5},
        {"pids": 0},
        {"pids": True},
        {"pids": (1 << 22) + 1},
        {"memory_bytes": 1.5e9},
        {"memory_bytes": "1G"},
        {"memory_bytes": 1000},
        {"workdir": b"/"},
        {"user": 0},
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        RunOptions(**given)
    assert isinstance(caught.value, ValueError)
    assert next(iter(given)) in caught.value.message and caught.value.exit_code == 2


def test_what_does() -> None:
    RunOptions(net="host", cpus=1, pids=1 << 22, memory_bytes=1 << 20, workdir="/", user="0:0")
    RunOptions(net="none", cpus=0.01)
