"""Leases of virtual machines, without a daemon."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from fuse import rundir, vmlease
from fuse.errors import NodeError
from imaged.config import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = Config(home=tmp_path / "home", run=tmp_path / "run")
    rundir.make(made)
    return made


def test_a_lease_lasts_as_long_as_the_process_that_inherited_it(config: Config) -> None:
    lease = vmlease.take(config, "web-1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lease]) as machine:
        os.close(lease)
        assert vmlease.held(config) == ["web-1"]
        assert machine.stdin is not None
        machine.stdin.close()
        machine.wait(10)
    assert vmlease.held(config) == []


def test_a_lease_is_not_inherited_by_chance(config: Config) -> None:
    """As by the QEMU of another VM that the same command starts."""
    lease = vmlease.take(config, "web-1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as other:
        os.close(lease)
        assert vmlease.held(config) == []
        assert other.stdin is not None
        other.stdin.close()
        other.wait(10)


def test_leases_of_nobody_leave_no_file(config: Config) -> None:
    os.close(vmlease.take(config, "web-1"))
    second = vmlease.take(config, "web-2")
    assert vmlease.held(config) == ["web-2"]
    assert [path.name for path in (config.run / "leases").iterdir()] == ["vm-web-2"]
    os.close(second)


def test_several_may_hold_one(config: Config) -> None:
    first, second = vmlease.take(config, "web"), vmlease.take(config, "web")
    os.close(first)
    assert vmlease.held(config) == ["web"]
    os.close(second)


def test_one_taken_while_others_look_is_never_lost(config: Config) -> None:
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            vmlease.held(config)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for number in range(200):
            lease = vmlease.take(config, f"web-{number % 3}")
            assert vmlease.held(config) == [f"web-{number % 3}"]
            os.close(lease)
    finally:
        stop.set()
        for looker in lookers:
            looker.join(10)


@pytest.mark.parametrize("key", ["", "a/b"])
def test_what_can_not_name_a_file_is_refused(config: Config, key: str) -> None:
    with pytest.raises(NodeError, match="can not name a lease"):
        vmlease.take(config, key)
