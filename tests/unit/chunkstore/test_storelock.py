"""The lock of a store directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imaged.chunkstore.storelock import StoreLock, _named, holders
from imaged.errors import StoreBusyError


def test_many_share_it(tmp_path: Path) -> None:
    with (
        StoreLock.shared(tmp_path) as first,
        StoreLock.shared(tmp_path) as second,
        StoreLock.shared(tmp_path, readonly=True) as third,
    ):
        assert len({first.fd, second.fd, third.fd}) == 3


def test_alone_excludes_and_is_excluded(tmp_path: Path) -> None:
    with StoreLock.shared(tmp_path), pytest.raises(StoreBusyError, match=f"process {os.getpid()} "):
        StoreLock.exclusive(tmp_path)
    with StoreLock.exclusive(tmp_path), pytest.raises(StoreBusyError, match=f"process {os.getpid()} "):
        StoreLock.shared(tmp_path, wait_s=0.1)
    with StoreLock.exclusive(tmp_path):
        pass


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3", "-m", "fuse.daemon", "--home", "/var/lib/pvisor"], "the node daemon"),
        (["/usr/bin/python3", "/usr/bin/pvisor", "--json", "serve", "--listen", "0.0.0.0:1"], "pvisor serve"),
        (["python3", "-c", "from cli.main import main; main()", "image", "verify", "x"], "pvisor image"),
        (["/opt/a long path/to/some-backup", "--all", "x" * 80], "some-backup --all ..."),
        ([], "unnamed"),
    ],
)
def test_a_holder_goes_by_what_it_is(words: list[str], name: str) -> None:
    assert _named(words) == name


def test_holders_of_a_file_nobody_locks(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    assert holders((tmp_path / "lock").stat()) == []


def test_readonly_without_a_lock_file(tmp_path: Path) -> None:
    with StoreLock.shared(tmp_path, readonly=True) as lock:
        assert lock.fd == -1
    assert not (tmp_path / "lock").exists()
