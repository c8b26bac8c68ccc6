"""Stages on Debian's 6.1 kernel, which has cgroups of version 2, modules and kexec: limits and boundary there."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import guest, probes
from tests.support.probes import PROBES
from tests.support.pythonroot import PYTHON, python_root

pytestmark = [pytest.mark.qemu, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]
SCRIPT = f"""
set -e
mount -t tmpfs -o size=400m tmpfs /mnt
tar -xf /dev/vda -C /mnt
mount -t proc proc /mnt/proc
mount -t sysfs sysfs /mnt/sys
mount -t cgroup2 cgroup2 /mnt/sys/fs/cgroup
mount -t devtmpfs dev /mnt/dev
chroot /mnt {PYTHON} -m tests.support.stage_guest
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("guest")
    root = python_root(directory / "root")
    for name in ("proc", "sys", "dev", "stages"):
        (root / name).mkdir()
    for package in ("imaged", "fuse", "stage", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, root / package, ignore=ignored)
    (root / "tests/__init__.py").touch()
    python_root(root / "lower")
    for place in (root, root / "lower"):
        (place / "probes.py").write_bytes(Path(probes.__file__).read_bytes())
    with tarfile.open(directory / "disk", "w") as archive:
        archive.add(root, arcname=".")
    return dict(json.loads(guest.run(SCRIPT, [directory / "disk"])))


def test_memory_and_processes(said: dict[str, Any]) -> None:
    assert said["memory"]["code"] == 137
    assert said["memory"]["stderr"].startswith("pvisor: out of memory within the stage's 32 MiB")
    few, enough = said["pids"]
    assert "can't fork" in few and enough == ""
    assert said["own"] == "0::/\n"
    assert said["left"] == []


def test_limits_go_below_the_callers_cgroup(said: dict[str, Any]) -> None:
    limits = {"memory.max": str(64 << 20), "memory.swap.max": "0", "cpu.max": "50000 100000", "pids.max": "7"}
    assert said["at the root"] == {"/sys/fs/cgroup": limits}


def test_beside_the_callers_cgroup_its_limits_hold_too(said: dict[str, Any]) -> None:
    """A cgroup of version 2 that has processes can not have limited children."""
    below, above = said["below"]["/sys/fs/cgroup/outer"], said["not above"]["/sys/fs/cgroup/outer"]
    assert (below["memory.max"], below["pids.max"]) == (str(64 << 20), "100")
    assert (above["memory.max"], above["cpu.max"]) == (str(200 << 20), "100000 100000")
    assert said["beside"] == {"code": 0, "stdout": "ran\n0::/\n", "stderr": ""}


@pytest.mark.parametrize(
    "name", ["sysrq", "kexec", "kernel_module", "ports_of_the_machine", "io_uring", "bpf", "keyring"]
)
def test_the_boundary_of_a_kernel_that_can_do_more(said: dict[str, Any], name: str) -> None:
    assert said["probes outside"][name] == PROBES[name].outside
    assert said["probes inside"][name] in PROBES[name].inside
