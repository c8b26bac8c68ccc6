"""A bucket in a dict, with an S3 server's weaknesses on demand: listings that lag, no conditional PUT, failures."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from imaged.errors import BucketUnavailableError, ObjectMissingError
from imaged.s3.objects import Entry, Made


class MemoryObjects:
    """Shared by all "servers" of a test. Threads may share it.

    With `lag` n a write or removal shows in listings only after n more operations. `before` is called with (operation,
    key) before each, and may raise or do something else first. The clock goes up by a second when told to.
    """

    def __init__(self, *, conditional: bool = True, lag: int = 0) -> None:
        self.conditional, self.lag = conditional, lag
        self.now_s = 1_000_000.0
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.calls: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] | None = None
        self._listed: dict[str, Entry] = {}
        self._late: list[tuple[int, str]] = []
        self._lock = threading.RLock()

    def _begin(self, operation: str, key: str) -> None:
        if self.before is not None:
            self.before(operation, key)
        with self._lock:
            self.calls.append((operation, key))
            due = [key for at, key in self._late if at <= len(self.calls)]
            self._late = [one for one in self._late if one[0] > len(self.calls)]
            for one in due:
                self._show(one)

    def _show(self, key: str) -> None:
        if key in self.objects:
            body, at_s = self.objects[key]
            self._listed[key] = Entry(key, len(body), hashlib.md5(body).hexdigest(), at_s)
        else:
            self._listed.pop(key, None)

    def _changed(self, key: str) -> None:
        if self.lag:
            self._late.append((len(self.calls) + self.lag, key))
        else:
            self._show(key)

    def get(self, key: str) -> bytes:
        self._begin("get", key)
        with self._lock:
            if key not in self.objects:
                raise ObjectMissingError(f"{key}: there is no such object")
            return self.objects[key][0]

    def read(self, key: str, start: int, length: int) -> bytes:
        self._begin("read", key)
        with self._lock:
            if key not in self.objects:
                raise ObjectMissingError(f"{key}: there is no such object")
            return self.objects[key][0][start : start + length]

    def put(self, key: str, body: bytes) -> float:
        self._begin("put", key)
        with self._lock:
            self.objects[key] = (body, self.now_s)
            self._changed(key)
            return self.now_s

    def put_new(self, key: str, body: bytes) -> Made:
        self._begin("put_new", key)
        with self._lock:
            if not self.conditional:
                return Made.UNSUPPORTED
            if key in self.objects:
                return Made.TAKEN
            self.objects[key] = (body, self.now_s)
            self._changed(key)
            return Made.YES

    def upload(self, key: str, path: Path, length: int) -> None:
        with path.open("rb") as file:
            self.put(key, file.read(length))

    def list(self, prefix: str, *, after: str = "") -> list[Entry]:
        self._begin("list", prefix)
        with self._lock:
            return sorted(
                entry for key, entry in self._listed.items() if key.startswith(prefix) and key > (after or "")
            )

    def delete(self, key: str) -> None:
        self._begin("delete", key)
        with self._lock:
            self.objects.pop(key, None)
            self._changed(key)

    def abort_uploads(self, older_than_s: float) -> int:
        self._begin("abort", "")
        return 0

    def list_anew(self) -> None:
        """Listings say what there is."""
        self._listed, self._late = {}, []
        for key in self.objects:
            self._show(key)

    def hurry(self) -> None:
        pass

    def close(self) -> None:
        pass

    def fail(self) -> None:
        """Every operation from now on."""

        def refuse(operation: str, key: str) -> None:
            raise BucketUnavailableError(f"{key}: can not {operation} it")

        self.before = refuse
