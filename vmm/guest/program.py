"""The agent's program: Perl files of one subject each, joined into the one that a guest has.

One file, because a guest that is restored reads no other: what Perl has loaded is in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

_DIRECTORY = Path(__file__).with_name("agent")
_ORDER = (
    *("head", "waiting", "ports", "jobs", "become", "streams", "ends", "processes", "machine", "files"),
    "start",
)
PARTS = tuple(_DIRECTORY / f"{name}.pl" for name in _ORDER)
"""What all others use is first, and what runs last."""


def joined(parts: Sequence[Path] = PARTS, read: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
    """OSError."""
    return b"\n".join(read(path) for path in parts)
