"""The files that something was made of: while they are as they were, it need not be made again to be known."""

from __future__ import annotations

import json
from pathlib import Path

from imaged.publish import published

_Look = list[int] | None


class Sources:
    """What was read for one file that is being made. For one thread."""

    def __init__(self) -> None:
        self._seen: dict[str, _Look] = {}

    @classmethod
    def unchanged(cls, noted: Path) -> Path | None:
        """The file that `save` noted, when it is there and nothing that it was made of has changed since."""
        try:
            document = json.loads(noted.read_bytes())
            made = noted.with_name(document["made"])
            if made.exists() and all(_look(Path(name)) == seen for name, seen in document["sources"].items()):
                return made
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or of another version
            return None
        return None

    def note(self, path: Path) -> None:
        """Before it is looked at; it need not be there."""
        self._seen.setdefault(str(path), _look(path))

    def read(self, path: Path) -> bytes:
        """OSError."""
        self.note(path)
        return path.read_bytes()

    def save(self, noted: Path, made: Path) -> None:
        """Note in one file what another beside it was made of. OSError."""
        with published(noted) as stream:
            stream.write(json.dumps({"made": made.name, "sources": self._seen}).encode())


def _look(path: Path) -> _Look:
    """Changes whenever a file does, but for clocks that go back. None for one that is not there."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
