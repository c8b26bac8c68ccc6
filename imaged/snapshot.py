"""The snapshot record: the small document that names everything a parked virtual machine consists of.

docs/formats/snapshot.md describes the same bytes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from imaged.document import canonical, parse_json, taker
from imaged.errors import FormatError
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.names import VM_NAME

SNAPSHOT_VERSION = 1
SNAPSHOT_KIND = "snapshot"
CPUS_LIMIT = 64
SIZE_LIMIT_BYTES = (512 << 30) - (16 << 20)
"""As IMAGE_LIMIT_BYTES of `imaged.blockformat`, which is much to import for the start of a machine."""
STATE_LIMIT_BYTES = 64 << 20
"""Of device state, which is read whole: what QEMU writes is 12 to 250 KB."""
MACHINE_TYPE = re.compile(r"(?:pc-)?(?:q35|i440fx)(?:-[0-9]{1,3}(?:\.[0-9]{1,3}){0,3})?")
"""It becomes a part of QEMU's arguments, where a comma would begin another option."""
_TEXT = re.compile(r"[\x20-\x7e]{0,512}")
_MACHINE_TEXTS = {
    "qemu": _TEXT,
    "machine": MACHINE_TYPE,
    "accelerator": re.compile("kvm|tcg"),
    "cpu": _TEXT,
    "network": re.compile("none|user|restricted"),
    "firmware": re.compile("[0-9a-f]{64}"),
    "kernel": _TEXT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a restore must match, and how the machine is built again.

    `qemu` is the build's package text or version, `machine` the resolved type and never an alias ("pc-q35-7.2"),
    `accelerator` "tcg" or "kvm", `network` "none", "user" or "restricted" (an interface that leads nowhere), `firmware`
    the BLAKE3 over the firmware files in hex.
    `kernel` is the guest's release; it is shown only, as the kernel itself is in the guest's memory. `layout` is the
    version of the set of devices that pVisor builds a machine from: QEMU loads device state into that same set only.
    """

    qemu: str
    machine: str
    accelerator: str
    cpu: str
    cpus: int
    memory_bytes: int
    network: str
    firmware: str
    kernel: str
    layout: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """FormatError when a field is missing or of another type."""
        take = taker(document, "snapshot record, machine")
        return cls(**{field.name: take(field.name, int if field.type == "int" else str) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """A virtual machine at rest. Its id is the BLAKE3 of `pack()`, so it verifies memory, disk and image alike.

    `image` is the id of the image record the root file system comes from. `memory`, `disk` (None: the machine has none)
    and `state`, what QEMU wrote of its devices, are block image ids; `disk_bytes` is 0 without a disk. `parent` is the
    snapshot that the machine was restored from, which may be gone since: nothing here needs it. `created_ns` is in Unix
    nanoseconds, `vm` the machine's name then. `dirty_bytes` were captured from the guest for this snapshot, of memory
    and disk together.
    """

    image: ChunkId
    memory: ChunkId
    disk: ChunkId | None
    disk_bytes: int
    state: ChunkId
    machine: Machine
    parent: ChunkId | None
    created_ns: int
    vm: str
    dirty_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": SNAPSHOT_KIND,
            "version": SNAPSHOT_VERSION,
            "image": str(self.image),
            "memory": str(self.memory),
            "disk": None if self.disk is None else str(self.disk),
            "disk_bytes": self.disk_bytes,
            "state": str(self.state),
            "machine": self.machine.to_json(),
            "parent": None if self.parent is None else str(self.parent),
            "created_ns": self.created_ns,
            "vm": self.vm,
            "dirty_bytes": self.dirty_bytes,
        }

    def pack(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII. Equal records have equal bytes."""
        return canonical(self.to_json())

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """From canonical JSON and nothing else, so that the record's id is that of these bytes.

        FormatError that names the field, also for what is no possible machine.
        """
        document = parse_json(raw, "snapshot record")
        take = taker(document, "snapshot record")
        found = take("kind", str), take("version", int)
        if found != (SNAPSHOT_KIND, SNAPSHOT_VERSION):
            expected = f"kind {SNAPSHOT_KIND!r}, version {SNAPSHOT_VERSION}"
            raise FormatError("snapshot record", expected=expected, found=f"{found[0]!r}, {found[1]!r}"[:80])

        def take_id(key: str) -> ChunkId | None:
            return None if document.get(key) is None else ChunkId.parse(take(key, str))

        record = cls(
            image=ChunkId.parse(take("image", str)),
            memory=ChunkId.parse(take("memory", str)),
            disk=take_id("disk"),
            disk_bytes=take("disk_bytes", int),
            state=ChunkId.parse(take("state", str)),
            machine=Machine.from_json(document.get("machine")),
            parent=take_id("parent"),
            created_ns=take("created_ns", int),
            vm=take("vm", str),
            dirty_bytes=take("dirty_bytes", int),
        )
        record._require_possible()
        if record.pack() != raw:
            raise FormatError("snapshot record", expected="canonical JSON of its fields", found="other bytes")
        return record

    def _require_possible(self) -> None:
        """FormatError for what no machine of ours has: fields become arguments of QEMU, and lines on terminals."""
        machine = self.machine
        for field, pattern in _MACHINE_TEXTS.items():
            text = getattr(machine, field)
            if pattern.fullmatch(text) is None:
                what = f"snapshot record, machine, field {field}"
                raise FormatError(what, expected=f"text like {pattern.pattern}", found=repr(text)[:80])
        if VM_NAME.fullmatch(self.vm) is None:
            raise FormatError("snapshot record, field vm", expected="the name of a VM", found=repr(self.vm)[:80])
        if not 1 <= machine.cpus <= CPUS_LIMIT:
            what = "snapshot record, machine, field cpus"
            raise FormatError(what, expected=f"1 to {CPUS_LIMIT}", found=str(machine.cpus))
        if (self.disk is None) != (self.disk_bytes == 0):
            raise FormatError(
                "snapshot record, field disk_bytes",
                expected="0 without a disk, and only then",
                found=str(self.disk_bytes),
            )
        for what, size_bytes, least in (
            ("machine, field memory_bytes", machine.memory_bytes, 1),
            ("field disk_bytes", self.disk_bytes, 0),
        ):
            if size_bytes % BLOCK_BYTES or not least <= size_bytes <= SIZE_LIMIT_BYTES:
                expected = f"a multiple of {BLOCK_BYTES} up to {SIZE_LIMIT_BYTES}"
                raise FormatError(f"snapshot record, {what}", expected=expected, found=str(size_bytes))

    def require_sizes(self, *, memory_bytes: int, disk_bytes: int) -> None:
        """FormatError when its block images are of other sizes than it says: another one of its memory would be mapped
        in part, and QEMU would not notice."""
        for what, said, found in (
            ("memory", self.machine.memory_bytes, memory_bytes),
            ("disk", self.disk_bytes, disk_bytes),
        ):
            if said != found:
                raise FormatError(f"snapshot record, {what}", expected=f"{said} bytes", found=f"an image of {found}")

    @property
    def id(self) -> ChunkId:
        return ChunkId.of(self.pack())

    @property
    def block_images(self) -> tuple[ChunkId, ...]:
        """The block images that are the machine's own: device state, memory, and the disk if there is one."""
        own = (self.state, self.memory)
        return own if self.disk is None else (*own, self.disk)
