"""vm.json: what a VM is made from, what it stands on, and what a command was doing to it. See `docs/formats/vm.md`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from imaged.errors import FormatError
from imaged.publish import sync_directory

RECORD_VERSION = 1
RECORD_NAME = "vm.json"
_PARTIAL_NAME, _PREPARED_NAME = ".vm.json.part", ".vm.json.next"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


class State(StrEnum):
    """What vm.json says; whether that is still so, `vmm.survey` finds out."""

    BOOTING = "booting"
    """A new VM starts, from an image or a snapshot. When that is cut off there is no VM."""
    RUNNING = "running"
    PARKING = "parking"
    """Its memory is being written down: `park` says as what. When that is cut off it runs on, or is parked."""
    FORKING = "forking"
    """As parking, for children: it runs on in any case."""
    PARKED = "parked"
    RESUMING = "resuming"
    """A parked VM starts again. When that is cut off it is parked still."""
    REMOVING = "removing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """A park that began: the name its snapshot gets, and what tells its record from all others'. `own`: the name is the
    VM's own to replace at its next park."""

    name: str
    created_ns: int
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VmRecord:
    """A VM. Ids are 64 hex digits: the types that check them would cost a resume an import.

    `image` is the image's id and `image_name` its name, or "" when it has none; `image_config` is the part of its
    configuration that processes take. `snapshot` is what the VM stands on: what it was restored from, or what it is
    parked as; "" after a boot. `own_park` is the snapshot that it was last parked as under a name of its own, and
    `own_park_name` that name. `temporary` is a VM whose command removes it. `device` is the node daemon's mount that
    its memory and disks come from, and `boot` the host's boot it runs in.
    """

    name: str
    state: State
    image: str
    image_name: str
    image_config: Mapping[str, Any]
    memory_bytes: int
    cpus: int
    disk_bytes: int
    network: str
    created_ns: int
    snapshot: str = ""
    snapshot_name: str = ""
    own_park: str = ""
    own_park_name: str = ""
    park: Park | None = None
    temporary: bool = False
    device: int = 0
    boot: str = field(default_factory=lambda: VmRecord.current_boot())

    @classmethod
    def unknown(cls, name: str) -> Self:
        """For a VM of which nothing is known but that it is there, or that is just being made."""
        return cls(
            name=name,
            state=State.BOOTING,
            image="",
            image_name="",
            image_config={},
            memory_bytes=0,
            cpus=0,
            disk_bytes=0,
            network="none",
            created_ns=0,
        )

    @staticmethod
    def current_boot() -> str:
        """What tells this boot of the host from all others."""
        return _BOOT_ID.read_text().strip()

    @property
    def booted(self) -> bool:
        """Whether this is still the boot of the host in which it was started."""
        return self.boot == self.current_boot()

    def to_bytes(self) -> bytes:
        """JSON, for people as well."""
        return json.dumps({"version": RECORD_VERSION, **asdict(self)}, indent=1).encode("ascii") + b"\n"

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """FormatError that names the field."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise FormatError("vm.json", expected="JSON", found=str(error)[:200]) from error
        if not isinstance(document, dict) or document.get("version") != RECORD_VERSION:
            found = repr(document.get("version")) if isinstance(document, dict) else type(document).__name__
            raise FormatError("vm.json", expected=f"version {RECORD_VERSION}", found=found)

        def take(key: str, kind: type[T], fields: Mapping[str, Any] = document) -> T:
            value = fields.get(key)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise FormatError(f"vm.json, field {key}", expected=kind.__name__, found=repr(value)[:80])
            return value

        state, park = take("state", str), document.get("park")
        if state not in set(State):
            raise FormatError("vm.json, field state", expected=" or ".join(State), found=repr(state)[:80])
        if park is not None:
            fields = take("park", dict)
            park = Park(
                name=take("name", str, fields),
                created_ns=take("created_ns", int, fields),
                own=take("own", bool, fields),
            )
        return cls(
            name=take("name", str),
            state=State(state),
            image=take("image", str),
            image_name=take("image_name", str),
            image_config=take("image_config", dict),
            memory_bytes=take("memory_bytes", int),
            cpus=take("cpus", int),
            disk_bytes=take("disk_bytes", int),
            network=take("network", str),
            created_ns=take("created_ns", int),
            snapshot=take("snapshot", str),
            snapshot_name=take("snapshot_name", str),
            own_park=take("own_park", str),
            own_park_name=take("own_park_name", str),
            park=park,
            temporary=take("temporary", bool),
            device=take("device", int),
            boot=take("boot", str),
        )


def load(directory: Path) -> VmRecord:
    """FileNotFoundError when there is none; FormatError."""
    return VmRecord.parse((directory / RECORD_NAME).read_bytes())


def save(directory: Path, record: VmRecord) -> None:
    """In place of the record there was; whole after any crash, and durable when this returns. OSError."""
    _write(directory / _PARTIAL_NAME, record)
    _sync(directory / _PARTIAL_NAME)
    (directory / _PARTIAL_NAME).replace(directory / RECORD_NAME)
    sync_directory(directory)


def replace_prepared(directory: Path, before: VmRecord, record: VmRecord) -> None:
    """As `save`, seen by all when this returns, and durable after `sync`; `before` is kept for `take_prepared`, which
    then needs no room on the disk. OSError."""
    _write(directory / _PREPARED_NAME, before)
    _write(directory / _PARTIAL_NAME, record)
    (directory / _PARTIAL_NAME).replace(directory / RECORD_NAME)


def sync(directory: Path) -> None:
    """What `replace_prepared` wrote is durable when this returns. OSError."""
    for name in (_PREPARED_NAME, RECORD_NAME):
        _sync(directory / name)
    sync_directory(directory)


def take_prepared(directory: Path) -> None:
    """Make the record that was prepared the VM's. FileNotFoundError when there is none, FormatError when it is not
    whole; OSError."""
    VmRecord.parse((directory / _PREPARED_NAME).read_bytes())
    (directory / _PREPARED_NAME).replace(directory / RECORD_NAME)
    sync_directory(directory)


def _write(path: Path, record: VmRecord) -> None:
    with open(path, "wb") as stream:  # one writer: it has the VM's lock
        os.fchmod(stream.fileno(), 0o600)
        stream.write(record.to_bytes())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
