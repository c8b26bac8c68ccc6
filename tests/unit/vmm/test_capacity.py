"""How many VMs are too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmm import capacity
from vmm.capacity import LEAST_BYTES, check_count
from vmm.errors import VmArgumentError


@pytest.fixture(autouse=True)
def small_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for 100 VMs, half of it swap, and process ids for 200."""
    half_kib = 50 * LEAST_BYTES >> 10
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {half_kib} kB\nSwapFree: {half_kib} kB\n")
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 2/400 12345\n")
    (tmp_path / "pid_max").write_text("2000\n")
    for name in ("meminfo", "loadavg", "pid_max"):
        monkeypatch.setattr(capacity, f"_{name.upper()}", tmp_path / name)


def test_what_a_host_has_room_for_is_let_through() -> None:
    assert [check_count(count) for count in (1, 100)] == [1, 100]


@pytest.mark.parametrize("count", [101, 10**9, 10**40])
def test_more_than_memory_is_there_for_is_refused(count: int) -> None:
    with pytest.raises(VmArgumentError, match="enough for 100") as caught:
        check_count(count)
    assert len(caught.value.message) < 200


def test_so_is_more_than_process_ids_are_there_for(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 2/1984 12345\n")
    assert check_count(2) == 2
    with pytest.raises(VmArgumentError, match="process ids are left for 2"):
        check_count(3)


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2", None, float("nan")])
def test_what_is_no_number_is_refused(count: object) -> None:
    with pytest.raises(VmArgumentError, match="no number of VMs"):
        check_count(count)
