"""What the snapshot of a park is called: as was asked for, or by the VM's own choice. No other one is replaced."""

from __future__ import annotations

from imaged.chunkstore.store import ChunkStore
from imaged.errors import FormatError
from imaged.ids import ChunkId
from vmm.errors import VmExistsError
from vmm.held import Held
from vmm.names import numbered
from vmm.vms import Vms


class Naming:
    """For one park. `given` is what was asked for, None for the VM's own choice: its own name, or where another
    snapshot has that, the next free of NAME-1, NAME-2. A VM that chose before takes the same again."""

    def __init__(self, vms: Vms, store: ChunkStore, held: Held, given: str | None) -> None:
        self._vms, self._store, self._held, self._given = vms, store, held, given
        self.is_own = given in (None, held.name)
        """Whether the VM may replace the snapshot the next time."""

    def choose(self) -> str:
        """A name that no other snapshot has now. VmExistsError."""
        held = self._held
        if self._given is not None:
            if not self._is_free(self._given):
                raise VmExistsError(
                    f"there is a snapshot {self._given!r} already, which VM {held.name!r} may not replace",
                    hint="give another name with --as, or `pvisor snapshot rm` that one",
                )
            return self._given
        before = held.record.own_park_name
        if before and self._is_mine(before):
            return before
        if self._is_free(held.name):
            return held.name
        # That of another VM would be that VM's to choose.
        return next(name for name in numbered(held.name) if self._is_free(name) and not self._vms.exists(name))

    def replaceable(self, name: str) -> ChunkId | None:
        """The snapshot that may lose this name to the new one: the VM's own last park."""
        record = self._held.record
        return ChunkId.parse(record.own_park) if record.own_park and name == record.own_park_name else None

    def _is_free(self, name: str) -> bool:
        try:
            return self._store.snapshots.get(name) is None or self._is_mine(name)
        except FormatError:  # a damaged row, nobody knows of what
            return False

    def _is_mine(self, name: str) -> bool:
        try:
            ref, own = self._store.snapshots.get(name), self.replaceable(name)
        except FormatError:
            return False
        return ref is not None and ref.record == own
