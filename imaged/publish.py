"""Files that appear whole or not at all. Standard library only: commands that must start quickly use it too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sync_directory(path: Path) -> None:
    """fsync of a directory: names made or removed in it are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path`, durably, at the end of the block; nothing stays after an error."""
    partial = path.with_name(f".pvisor-{os.urandom(8).hex()}.part")
    try:
        with open(partial, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    finally:
        partial.unlink(missing_ok=True)
