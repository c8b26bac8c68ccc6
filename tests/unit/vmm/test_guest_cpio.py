"""Archives as busybox's cpio reads them, and what they refuse."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from imaged.errors import FormatError
from vmm.guest import cpio


@pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox not installed")
def test_another_program_unpacks_it(tmp_path: Path) -> None:
    entries = [
        cpio.directory("empty", mode=0o700),
        cpio.file("bin/deep/tool", b"\0\x01odd", mode=0o755),
        cpio.file("nothing", b""),
        cpio.link("bin/alias", "deep/tool"),
        cpio.file("big", bytes(range(256)) * 5000),
    ]
    subprocess.run(["busybox", "cpio", "-i", "-d"], input=cpio.archive(entries), cwd=tmp_path, check=True, timeout=60)
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    assert (tmp_path / "bin/deep/tool").read_bytes() == b"\0\x01odd"
    assert stat.S_IMODE((tmp_path / "bin/deep/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "nothing").stat().st_mode) == 0o644
    assert (tmp_path / "bin/alias").readlink() == Path("deep/tool")
    assert (tmp_path / "big").read_bytes() == bytes(range(256)) * 5000


def test_equal_entries_make_equal_bytes() -> None:
    entries = [cpio.file("a/b", b"1"), cpio.file("a/c", b"2"), cpio.directory("a")]
    assert cpio.archive(entries) == cpio.archive(iter(entries))
    assert cpio.archive(entries).count(b"\0a\0") == 0
    assert len(cpio.archive(entries)) % 4 == 0


@pytest.mark.parametrize("name", ["/absolute", "", "a\0b"])
def test_a_name_that_would_lead_elsewhere(name: str) -> None:
    with pytest.raises(FormatError):
        cpio.archive([cpio.file(name, b"")])


def test_two_files_of_a_name() -> None:
    with pytest.raises(FormatError, match="initramfs entry a: expected one file of a name, found two"):
        cpio.archive([cpio.file("a", b"1"), cpio.file("a", b"2")])
