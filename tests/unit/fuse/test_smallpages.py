"""A program that asks for huge pages is refused them, and nothing else."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys

import pytest

from fuse.smallpages import without_huge_pages

ASK = """
import mmap
memory = mmap.mmap(-1, 4 << 20)
memory.madvise(mmap.MADV_WILLNEED)
try:
    memory.madvise(mmap.MADV_HUGEPAGE)
except OSError as error:
    print(error.errno)
else:
    print(0)
"""


def ask() -> int:
    return int(subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True).stdout)


def test_what_is_started_can_not_ask_for_huge_pages_and_we_still_can() -> None:
    assert without_huge_pages(ask) == errno.EINVAL
    mmap.mmap(-1, 4 << 20).madvise(mmap.MADV_HUGEPAGE)
    assert ask() == 0


def test_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        without_huge_pages(fail)
