"""What VMs are called: what can be a name, and the numbered names that are free."""

from __future__ import annotations

from collections.abc import Iterator

from imaged.config import Config
from imaged.errors import NotFoundError
from imaged.names import VM_NAME
from vmm.errors import VmArgumentError

NAME = VM_NAME
_LONGEST = 63
_HINT = "use up to 63 letters, digits, '_', '.', '-', not '.' or '-' first"


def checked(name: object) -> str:
    """The name, when a VM can have it. VmArgumentError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        shown = repr(name) if len(repr(name)) <= 200 else f"{repr(name)[:200]}..."
        raise VmArgumentError(f"{shown} is not a VM name", hint=_HINT)
    return name


def numbered(base: str) -> Iterator[str]:
    """NAME-1, NAME-2 and so on, each short enough for a VM."""
    number = 0
    while True:
        number += 1
        tail = f"-{number}"
        yield base[: _LONGEST - len(tail)] + tail


def free_of_snapshots(config: Config, base: str) -> Iterator[str]:
    """As `numbered`, without those that snapshots of this host have: a new VM of such a name would hide the snapshot
    from `vm resume NAME`, and could not be parked as what it is called. StoreError."""
    taken = _snapshot_names(config, base)
    return (name for name in numbered(base) if name not in taken)


def _snapshot_names(config: Config, base: str) -> frozenset[str]:
    if not config.store.is_dir():
        return frozenset()
    from imaged.chunkstore.store import ChunkStore  # imports LMDB

    try:
        with ChunkStore.open(config.store, readonly=True) as store:
            # What precedes the number is cut for long names.
            return frozenset(store.snapshots.names(base[: _LONGEST - len("-999999999")]))
    except NotFoundError:
        return frozenset()
