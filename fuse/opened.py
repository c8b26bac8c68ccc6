"""What the node daemon answers when it opened something. On the hot path of commands, so: the standard library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from imaged.snapshot import SnapshotRecord


class OpenImage(NamedTuple):
    """An image whose metadata is in a local file and whose data the daemon serves.

    `id` is the image's id, `data_id` its data block image (both 64 hex digits; the types that check them would cost
    the hot path an import). `config` is the `config` object of the OCI image configuration.
    """

    id: str
    name: str
    config: dict[str, Any]
    platform: str
    metadata_path: Path
    data_id: str
    data_path: Path

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "config": self.config,
            "platform": self.platform,
            "metadata_path": str(self.metadata_path),
            "data_id": self.data_id,
            "data_path": str(self.data_path),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls(
            id=document["id"],
            name=document["name"],
            config=document["config"],
            platform=document["platform"],
            metadata_path=Path(document["metadata_path"]),
            data_id=document["data_id"],
            data_path=Path(document["data_path"]),
        )


class OpenSnapshot(NamedTuple):
    """A snapshot whose memory, disk and device state the daemon serves as files, and its image opened as any is.

    `id` is the snapshot's id in hex, `name` its name, or "" for one that was asked for by id and has none. The memory
    file may be opened for reading and writing, as QEMU does, and mapped privately; nothing can be written to it.

    `working_set` are the ranges (offset, length in bytes) of the memory that a machine which goes on from this snapshot
    touches first, in that order, for `fuse.warm`; none before a first run was recorded. `pulled`: it, or what it
    descends from, came from a server.
    """

    id: str
    name: str
    record: SnapshotRecord
    image: OpenImage
    memory_path: Path
    disk_path: Path | None
    state_path: Path
    working_set: tuple[tuple[int, int], ...]
    pulled: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "record": self.record.pack().decode("ascii"),
            "image": self.image.to_json(),
            "memory_path": str(self.memory_path),
            "disk_path": None if self.disk_path is None else str(self.disk_path),
            "state_path": str(self.state_path),
            "working_set": self.working_set,
            "pulled": self.pulled,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        from imaged.snapshot import SnapshotRecord  # not needed by who opens an image

        disk_path = document["disk_path"]
        return cls(
            id=document["id"],
            name=document["name"],
            record=SnapshotRecord.parse(document["record"].encode("ascii")),
            image=OpenImage.from_json(document["image"]),
            memory_path=Path(document["memory_path"]),
            disk_path=None if disk_path is None else Path(disk_path),
            state_path=Path(document["state_path"]),
            working_set=tuple((offset, length) for offset, length in document["working_set"]),
            pulled=document["pulled"],
        )
