"""What a store needs of a bucket: a few operations on objects, whose keys are relative to the store's prefix."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import NamedTuple, Protocol

from imaged.errors import ObjectMissingError


class Entry(NamedTuple):
    """One object of a listing; `modified_s` is in Unix seconds of the server's clock, to a second."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class Made(enum.Enum):
    """What became of an object that was to be new."""

    YES = "yes"
    TAKEN = "taken"
    UNSUPPORTED = "unsupported"
    """The server has no conditional PUT; nothing was written."""


class Objects(Protocol):
    """Threads may share it. BucketUnavailableError when the server does not answer, BucketError when it refuses."""

    def get(self, key: str) -> bytes:
        """ObjectMissingError."""
        ...

    def read(self, key: str, start: int, length: int) -> bytes:
        """Part of an object, shorter at its end. ObjectMissingError."""
        ...

    def put(self, key: str, body: bytes) -> float:
        """Write or replace it; the server's time, in Unix seconds."""
        ...

    def put_new(self, key: str, body: bytes) -> Made:
        """Write it only if there is none of that key. `body` must differ from what anybody else would write."""
        ...

    def upload(self, key: str, path: Path, length: int) -> None:
        """Write the first `length` bytes of a file."""
        ...

    def list(self, prefix: str, *, after: str = "") -> list[Entry]:
        """All whose key begins with `prefix`, in the order of their keys; those behind the key `after`."""
        ...

    def delete(self, key: str) -> None:
        """It is gone, whether or not it was there."""
        ...

    def abort_uploads(self, older_than_s: float) -> int:
        """Forget parts of uploads that were begun so long ago and never ended; how many."""
        ...


def is_there(objects: Objects, key: str) -> bool:
    """By asking for it, not by listing: listings may lag."""
    try:
        objects.get(key)
    except ObjectMissingError:
        return False
    return True
