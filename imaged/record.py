"""The image record: the small document that names everything an image consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from imaged.document import canonical, parse_json, require_shallow, taker
from imaged.errors import FormatError
from imaged.ids import ChunkId

RECORD_VERSION = 1
_WHAT = "image record"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecord:
    """A root file system image. Its id is the BLAKE3 of `to_bytes()`, so it verifies config, metadata and data alike.

    `metadata` and `data` are block image ids: the EROFS metadata image, fetched whole, and EROFS device 1, fetched
    lazily. `source_digest` is the digest of the manifest the image was converted from ("" for a plain directory).
    `config` is the `config` object of the OCI image configuration (Env, Cmd, Entrypoint, User, WorkingDir, ...).
    `layers` are the diff_ids, lowest first.
    """

    metadata: ChunkId
    metadata_bytes: int
    data: ChunkId
    data_bytes: int
    entries: int
    platform: str
    source_digest: str = ""
    layers: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII. Equal records have equal bytes."""
        document = {
            "version": RECORD_VERSION,
            "metadata": str(self.metadata),
            "metadata_bytes": self.metadata_bytes,
            "data": str(self.data),
            "data_bytes": self.data_bytes,
            "entries": self.entries,
            "platform": self.platform,
            "source_digest": self.source_digest,
            "layers": list(self.layers),
            "config": self.config,
        }
        return canonical(document)

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """From canonical JSON and nothing else, so that the record's id is that of these bytes.

        FormatError that names the field.
        """
        record = cls.from_json(parse_json(raw, _WHAT))
        if record.to_bytes() != raw:
            raise FormatError(_WHAT, expected="canonical JSON of its fields", found="other bytes")
        return record

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """FormatError that names the field."""
        take = taker(document, _WHAT)
        if document.get("version") != RECORD_VERSION:
            found = repr(document.get("version"))[:80]
            raise FormatError(_WHAT, expected=f"version {RECORD_VERSION}", found=found)
        layers, config = take("layers", list), take("config", dict)
        if not all(isinstance(layer, str) for layer in layers):
            raise FormatError(f"{_WHAT}, field layers", expected="list of str", found=repr(layers)[:80])
        require_shallow(config, f"{_WHAT}, field config")
        return cls(
            metadata=ChunkId.parse(take("metadata", str)),
            metadata_bytes=take("metadata_bytes", int),
            data=ChunkId.parse(take("data", str)),
            data_bytes=take("data_bytes", int),
            entries=take("entries", int),
            platform=take("platform", str),
            source_digest=take("source_digest", str),
            layers=tuple(layers),
            config=config,
        )

    @property
    def id(self) -> ChunkId:
        return ChunkId.of(self.to_bytes())
