"""Conversion: from an OCI image, or a directory, to a block image in a chunk store, in one pass.

Layers stream through download, decompression, tar reading and cutting while the store compresses on its own threads;
only the tree stays in memory. What a layer came to is kept as a memo under its diff_id, so that the next image with
that layer neither downloads nor reads it. The name is set last: until then nothing refers to what was stored.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.blockformat import leaf_blocks_for
from imaged.blockimage import read_blob
from imaged.chunkstore.refs import MemoTable
from imaged.chunkstore.store import ChunkStore, Ref
from imaged.conversion.apply import Tree
from imaged.conversion.cutter import CHUNK_MAX, Cutter
from imaged.conversion.hostdir import read_directory
from imaged.conversion.ingest import read_layer
from imaged.conversion.layer import Layer, NodeEntry
from imaged.conversion.layerstream import LayerStream
from imaged.erofs.layout import place
from imaged.erofs.tree import Inode, walk
from imaged.erofs.writer import metadata_image
from imaged.errors import ChunkError, FormatError
from imaged.frame import ZSTD_DENSE_LEVEL
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.names import ImageName, SourceName
from imaged.oci.descriptor import Platform
from imaged.oci.image import LayerSource, SourceImage
from imaged.oci.source import open_image
from imaged.progress import NoProgress, Progress
from imaged.reach import reachable
from imaged.record import ImageRecord

_SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """An image that is in the store under its name. `layers_reused` layers were neither downloaded nor read."""

    name: str
    id: ChunkId
    record: ImageRecord
    ref: Ref
    warnings: tuple[str, ...]
    layers_reused: int


@dataclass(slots=True, kw_only=True)
class _Draft:
    """What was read of a source: the tree, its files in the order they came, and what the record says of it."""

    root: Inode
    files: list[Inode]
    platform: str
    digest: str = ""
    layers: tuple[str, ...] = ()
    config: dict[str, Any]
    layers_reused: int = 0
    warnings: tuple[str, ...] = ()
    """Of its layers, those from memos too; each once."""


def convert(
    store: ChunkStore,
    source: SourceName,
    *,
    name: ImageName | None = None,
    platform: str | None = None,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_MAX,
) -> Converted:
    """Convert an image into the store and name it: as asked, else as its archive calls it, else as its source.

    SourceError and its kinds, LayerError, StoreError and its kinds: then the name is as it was before.
    `chunk_bytes` is for measurements; layers that are in the store already keep the one they were made with.
    """
    progress = progress or NoProgress()
    with _tuned_interpreter(), store.lease(f"converting {source}"):
        if source.transport == "dir":
            name = name or source.default_name
            draft = _read_directory(store, source, platform, progress, chunk_bytes)
        else:
            with open_image(source, platform=platform) as image:
                name = name or (ImageName.parse(image.name) if image.name else source.default_name)
                draft = _Layers(store, image, progress, chunk_bytes).read()
        progress.start("writing the file system", None)
        warnings = list(draft.warnings)
        record, ref = _store_image(store, draft, str(source), warnings)
        store.refs.set(str(name), ref)
    return Converted(
        name=str(name),
        id=ref.record,
        record=record,
        ref=ref,
        warnings=tuple(warnings),
        layers_reused=draft.layers_reused,
    )


@contextmanager
def _tuned_interpreter() -> Iterator[None]:
    """For one conversion: the interpreter lock goes round faster, and the cycle collector rests.

    The threads that download, decompress and compress need the lock only for moments, and would wait 5 ms for each of
    them while this thread reads headers. The tree has no cycles; collecting would walk it again and again.
    """
    interval_s, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_SWITCH_S)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        if collects:
            gc.enable()


def _read_directory(
    store: ChunkStore,
    source: SourceName,
    platform: str | None,
    progress: Progress,
    chunk_bytes: int,
) -> _Draft:
    """A directory of this host as if it were one layer; nothing is kept of it for another time."""
    wanted = Platform.parse(platform) if platform else Platform.host()
    progress.start(f"reading {source.location}", None)
    cutter = Cutter(store, chunk_bytes=chunk_bytes)
    layer = read_directory(Path(source.location), cutter, advance=progress.advance)
    tree = Tree()
    tree.apply(layer, name=str(source))
    return _Draft(root=tree.root, files=_files(layer), platform=str(wanted), config={}, warnings=layer.warnings)


class _Layers:
    """The reading of one image's layers, lowest first, each from its memo or from its source."""

    def __init__(self, store: ChunkStore, image: SourceImage, progress: Progress, chunk_bytes: int) -> None:
        self._store, self._image, self._progress, self._chunk_bytes = store, image, progress, chunk_bytes
        self._reused = 0

    def read(self) -> _Draft:
        image = self._image
        config = image.config.get("config") or {}
        if not isinstance(config, dict):
            raise FormatError("image configuration, field config", expected="an object", found=repr(config)[:80])
        tree = Tree()
        files: list[Inode] = []
        warnings: dict[str, None] = {}
        for label, layer in self._layers():
            tree.apply(layer, name=label)
            files += _files(layer)
            warnings.update(dict.fromkeys(layer.warnings))
        return _Draft(
            root=tree.root,
            files=files,
            platform=image.platform,
            digest=image.digest,
            layers=tuple(layer.diff_id for layer in image.layers),
            config=config,
            layers_reused=self._reused,
            warnings=tuple(warnings),
        )

    def _layers(self) -> Iterator[tuple[str, Layer]]:
        """Each layer in turn. While one is read, the download of the next one that is needed has begun."""
        sources = self._image.layers
        with _Downloads(sources, self._store.memos) as downloads:
            for number, source in enumerate(sources, 1):
                step = f"layer {number} of {len(sources)}"
                layer = self._recall(source)
                if layer is not None:
                    self._reused += 1
                    self._progress.start(f"{step}, already here", 0)
                else:
                    self._progress.start(step, source.size_bytes)
                    with downloads.take(source) as stream:
                        layer = self._receive(stream)
                yield _label(source), layer

    def _recall(self, source: LayerSource) -> Layer | None:
        """The layer from its memo, when that and all its chunks are here."""
        memo = self._store.memos.get(source.diff_id)
        if memo is None:
            return None
        try:
            layer = Layer.parse(read_blob(self._store, memo))
        except (ChunkError, FormatError):
            return None
        return None if self._store.missing(layer.chunk_ids()) else layer

    def _receive(self, stream: LayerStream) -> Layer:
        """Read a layer from its stream and leave a memo of it."""
        counted = _Counted(stream, self._progress)
        cutter = Cutter(self._store, chunk_bytes=self._chunk_bytes)
        layer = read_layer(counted, cutter, name=_label(stream.source))
        self._store.memos.set(stream.source.diff_id, write_blob(self._store, layer.to_bytes()))
        return layer


class _Downloads:
    """The streams of the layers that have no memo, each begun one layer ahead. A context manager that ends them."""

    def __init__(self, sources: Sequence[LayerSource], memos: MemoTable) -> None:
        distinct = {source.diff_id: source for source in sources}
        self._waiting = [source for diff_id, source in distinct.items() if memos.get(diff_id) is None]
        self._begun: LayerStream | None = None

    def __enter__(self) -> Self:
        self._begin_next()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._begun is not None:
            self._begun.close()

    def take(self, source: LayerSource) -> LayerStream:
        """The stream of this layer, for the caller to close; another one's is begun, or waits for its turn."""
        if self._begun is not None and self._begun.source.diff_id != source.diff_id:
            # Someone else converted that layer meanwhile.
            self._begun.close()
            self._begun = None
        stream = self._begun or LayerStream(source, name=_label(source))
        self._waiting = [one for one in self._waiting if one.diff_id != source.diff_id]
        self._begun = None
        self._begin_next()
        return stream

    def _begin_next(self) -> None:
        if self._waiting:
            source = self._waiting.pop(0)
            self._begun = LayerStream(source, name=_label(source))


class _Counted:
    """A layer's stream that tells the progress how much of the blob has come."""

    def __init__(self, stream: LayerStream, progress: Progress) -> None:
        self._stream, self._progress = stream, progress
        self._told_bytes = 0

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        stored_bytes = self._stream.stored_bytes
        self._progress.advance(stored_bytes - self._told_bytes)
        self._told_bytes = stored_bytes
        return data


def _label(source: LayerSource) -> str:
    """A layer in messages: enough of its diff_id to find it in the image's configuration."""
    return source.diff_id[:19]


def _files(layer: Layer) -> list[Inode]:
    return [entry.inode for entry in layer.entries if isinstance(entry, NodeEntry) and entry.inode.is_regular]


def _store_image(store: ChunkStore, draft: _Draft, source: str, warnings: list[str]) -> tuple[ImageRecord, Ref]:
    """Lay the tree out and store both block images and the record, durably."""
    extents = (extent for inode in draft.files for extent in inode.extents)
    blocks = sum(extent.block_count for extent in extents if extent.chunk is not None)
    builder = BlockImageBuilder(store, leaf_blocks=leaf_blocks_for(blocks * BLOCK_BYTES))
    placement = place(draft.root, builder, draft.files)
    warnings += placement.warnings
    data = builder.finish()
    metadata = metadata_image(draft.root, placement)
    record = ImageRecord(
        metadata=write_blob(store, metadata, level=ZSTD_DENSE_LEVEL),
        metadata_bytes=len(metadata),
        data=data,
        data_bytes=placement.data_blocks * BLOCK_BYTES,
        entries=sum(1 for _ in walk(draft.root)),
        platform=draft.platform,
        source_digest=draft.digest,
        layers=draft.layers,
        config=draft.config,
    )
    record_id = store.put(record.to_bytes())
    store.flush()
    chunks = list(reachable(store, record_id))
    ref = Ref(
        record=record_id,
        created_at=int(time.time()),
        source=source,
        origin="",
        chunks=len(chunks),
        stored_bytes=store.frames_bytes(chunks),
    )
    return record, ref
