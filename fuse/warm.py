"""Getting ranges of a file into the page cache, before those who map the file touch them.

All forks of a machine map the same memory file, so what is in the page cache is there for all of them, once. The node
daemon is then asked in large pieces, many at a time, instead of by page faults one after another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PIECE_BYTES = 128 << 10
"""What the kernel takes of one advice; the rest of a longer one it ignores (`force_page_cache_ra`)."""


def warm(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Ask for these ranges (offset, length in bytes) of a file, in this order; they may still come when this returns.

    To be called in a thread. It promises nothing: a range that can not be read is an error for who reads it. OSError
    when the file can not be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset, length in ranges:
            for at in range(offset, offset + length, PIECE_BYTES):
                os.posix_fadvise(fd, at, min(PIECE_BYTES, offset + length - at), os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)
