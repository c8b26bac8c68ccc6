"""What is mounted, as the kernel tells it; names with blanks and backslashes come escaped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuse import mountinfo
from fuse.mountinfo import device_on, mount_points

LINES = rb"""21 1 0:30 / / rw shared:1 - overlay overlay rw
22 21 0:31 / /run/a\040b rw - tmpfs none rw
23 21 0:32 / /run/a rw - tmpfs none rw
24 21 8:33 / /run/a rw - ext4 /dev/sda rw
25 21 0:34 / /run/a\134040b rw - tmpfs none rw
"""


def test_the_device_on_a_path_is_that_of_the_topmost_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_bytes(LINES)
    monkeypatch.setattr(mountinfo, "_OURS", tmp_path / "mountinfo")
    found = {str(point.path): point.device for point in mount_points()}
    assert found == {
        "/": os.makedev(0, 30),
        "/run/a b": os.makedev(0, 31),
        "/run/a": os.makedev(8, 33),
        "/run/a\\040b": os.makedev(0, 34),
    }
    assert {path: device_on(Path(path)) for path in found} == found
    assert device_on(Path("/run/a/b")) == device_on(Path("/run")) == 0


def test_here() -> None:
    """As the kernel shows it to this process."""
    paths = {point.path for point in mount_points()}
    assert Path("/proc") in paths
    assert device_on(Path("/proc")) == Path("/proc").stat().st_dev
