"""Read a whole index in a process of its own: LMDB trusts its file, and a damaged one may end the reader by a signal.

`python -m imaged.chunkstore.salvage INDEX` walks every row and writes names, origins and packs as one JSON document to
stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imaged import submodule
from imaged.chunkstore.index import Index
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.rows import Location, PackRow
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.errors import PvisorError, StoreError
from imaged.faults import REBUILD_HINT
from imaged.ids import ChunkId

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Salvage:
    """What an index says besides where its chunks are."""

    refs: dict[str, Ref] = field(default_factory=dict)
    snapshots: dict[str, SnapshotRef] = field(default_factory=dict)
    origins: dict[ChunkId, str] = field(default_factory=dict)
    packs: dict[int, PackRow] = field(default_factory=dict)


def salvage(path: Path) -> Salvage:
    """Read the index at `path`. StoreError when it can not be read to its end."""
    try:
        result = subprocess.run(
            [*submodule.command("imaged.chunkstore.salvage"), str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=submodule.environment(),
        )
    except subprocess.TimeoutExpired as error:
        message = f"store {path.parent}: the index was not read within {_TIMEOUT_S:.0f} s"
        raise StoreError(message, hint="try again; a disk that hangs shows in the kernel's log") from error
    if result.returncode != 0:
        why = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"status {result.returncode}"]
        raise StoreError(f"store {path.parent}: the index can not be read: {why[0]}", hint=REBUILD_HINT)
    try:
        document = json.loads(result.stdout)
        return Salvage(
            refs={name: Ref.from_json(value) for name, value in document["refs"].items()},
            snapshots={name: SnapshotRef.from_json(value) for name, value in document["snapshots"].items()},
            origins={ChunkId.parse(image): url for image, url in document["origins"].items()},
            packs={int(number): PackRow(*row) for number, row in document["packs"].items()},
        )
    except (PvisorError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"store {path.parent}: the index holds nonsense: {error}", hint=REBUILD_HINT) from error


def _document(path: Path) -> str:
    index = Index.open(path, readonly=True, trust=True)
    try:
        for _, value in index.rows("chunks"):
            Location.unpack(value)
        refs, snapshots = _names(index, "refs"), _names(index, "snapshots")
        origins = {ChunkId(key).hex(): value.decode() for key, value in index.rows("origins")}
        for _, value in index.rows("memos"):
            ChunkId(value)
        return json.dumps({"refs": refs, "snapshots": snapshots, "origins": origins, "packs": index.packs()})
    finally:
        index.close()


def _names(index: Index, table: str) -> dict[str, Any]:
    return {key.decode(): json.loads(value) for key, value in index.rows(table)}


def main(path: Path) -> int:
    try:
        sys.stdout.write(_document(path))
    except PvisorError as error:
        sys.stderr.write(error.message + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
