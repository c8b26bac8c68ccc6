"""The files that limit a cgroup, of both versions, and which of two limits holds."""

from __future__ import annotations

import pytest

from stage.kept import hierarchy


@pytest.mark.parametrize(
    ("controller", "value", "unified", "files"),
    [
        ("memory", 1 << 40, True, {"memory.max": "1099511627776", "memory.swap.max": "0"}),
        ("cpu", 1.5, True, {"cpu.max": "150000 100000"}),
        ("pids", 7, True, {"pids.max": "7"}),
        ("cpu", 0.01, False, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"}),
        ("pids", 7, False, {"pids.max": "7"}),
    ],
)
def test_settings(controller: str, value: float, unified: bool, files: dict[str, str]) -> None:
    assert hierarchy.settings(controller, value, unified=unified) == files


def test_memory_of_version_1_is_limited_before_memory_with_swap() -> None:
    """The kernel refuses the other order, in which the sum would be below a part."""
    files = hierarchy.settings("memory", 5 << 20, unified=False)
    assert list(files) == ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    assert set(files.values()) == {"5242880"}


@pytest.mark.parametrize(
    ("one", "other", "lower"),
    [
        ("max", "5", "5"),
        ("7", "5", "5"),
        ("max", "max", "max"),
        ("max 100000", "50000 100000", "50000 100000"),
        ("50000 100000", "9000 10000", "50000 100000"),
        ("0", "max", "0"),
    ],
)
def test_the_stricter_of_two_limits(one: str, other: str, lower: str) -> None:
    assert hierarchy.stricter(one, other) == hierarchy.stricter(other, one) == lower
