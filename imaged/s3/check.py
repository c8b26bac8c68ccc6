"""Check a bucket down to its last byte, and make the mirror of one anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.indexfile import LOCK_SUFFIX
from imaged.chunkstore.pack import PACKS_DIRECTORY, scan
from imaged.chunkstore.rows import FOREIGN_PACKS
from imaged.chunkstore.salvage import salvage
from imaged.chunkstore.store import ChunkStore
from imaged.chunkstore.storelock import StoreLock
from imaged.errors import ChunkCorruptError, FormatError, ObjectMissingError, StoreError
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.s3 import packindex
from imaged.s3.objects import Objects
from imaged.s3.packindex import Row
from imaged.s3.packtable import INDEXES_DIRECTORY, PACKS, RemotePack, index_key, pack_key
from imaged.s3.store import MirrorStore

if TYPE_CHECKING:
    from imaged.chunkstore.fsck import FsckReport

_READ_BYTES = 8 << 20
_OLD_DIRECTORY = "packs.old"
_HINT = (
    "convert or push the images that lack chunks again, or drop their names; a pack whose table of contents is damaged "
    "can be told from its frames by hand: docs/formats/packindex.md"
)


def check_bucket(root: Path, report: FsckReport, *, rebuild: bool) -> FsckReport:
    """As `imaged.chunkstore.fsck.check`, of the bucket that `root` is a mirror of. BucketUnavailableError too.

    Reads every pack from the bucket, whatever is here. With `rebuild` the mirror is made anew first, alone.
    """
    if rebuild:
        _rebuild(root, report)
    elif (root / INDEX_NAME).exists():
        try:
            salvage(root / INDEX_NAME)
        except StoreError as error:
            report.errors.append(error.message)
            report.hints.append(error.hint)
            return report
    with ChunkStore.open(root, readonly=True) as store:
        assert isinstance(store, MirrorStore)
        store.bucket.sync.everything()
        _check_packs(store, report)
        _check_names(store, report)
    if report.errors:
        report.hints.append(_HINT)
    return report


def _check_packs(store: MirrorStore, report: FsckReport) -> None:
    bucket = store.bucket
    good: dict[int, set[tuple[ChunkId, int]]] = {}
    packs = {pack.number: pack for pack in bucket.packs.all()}
    for pack in packs.values():
        if bucket.is_safe(pack.number):
            report.packs += 1
            good[pack.number] = _check_pack(bucket.objects, pack, report)
    for chunk, place in store.index.chunks():
        if (chunk, place.offset) in good.get(place.pack, ()):
            report.chunks += 1
            report.stored_bytes += place.stored_bytes
        elif place.pack in good:
            report.errors.append(f"chunk {chunk}: pack {packs[place.pack].id} at {place.offset}: not sound")
        else:
            report.notes.append(f"chunk {chunk}: pack {place.pack} is only here; the next server uploads it")
    listed = {entry.key.removeprefix(PACKS) for entry in bucket.objects.list(PACKS)}
    lonely = sorted(key for key in listed if key.endswith(".pack") and f"{key.removesuffix('.pack')}.idx" not in listed)
    report.notes += [
        f"{PACKS}{key}: has no table of contents (yet); a collection removes it after a day" for key in lonely
    ]


def _check_pack(objects: Objects, pack: RemotePack, report: FsckReport) -> set[tuple[ChunkId, int]]:
    """The frames that verify, by chunk and offset."""
    try:
        contents = packindex.parse(objects.get(index_key(pack.id)))
    except (ObjectMissingError, FormatError) as error:
        report.errors.append(f"{index_key(pack.id)}: {error.message}")
        return set()
    good: set[tuple[ChunkId, int]] = set()
    rows = list(contents.rows)
    while rows:
        count = 1
        while count < len(rows) and rows[count].end - rows[0].offset <= _READ_BYTES:
            count += 1
        good |= _check_rows(objects, pack, rows[:count], report)
        rows = rows[count:]
    return good


def _check_rows(objects: Objects, pack: RemotePack, rows: list[Row], report: FsckReport) -> set[tuple[ChunkId, int]]:
    start = rows[0].offset
    try:
        data = objects.read(pack_key(pack.id), start, rows[-1].end - start)
    except ObjectMissingError as error:
        report.errors.append(error.message)
        return set()
    good = set()
    for row in rows:
        try:
            frame = Frame.parse(data[row.offset - start : row.end - start])
            if frame.id != row.chunk:
                raise FormatError("frame", expected=f"chunk {row.chunk}", found=str(frame.id))
            frame.open()
        except (FormatError, ChunkCorruptError) as error:
            report.errors.append(f"{pack_key(pack.id)} at {row.offset}: {error.message}")
            continue
        good.add((row.chunk, row.offset))
    return good


def _check_names(store: MirrorStore, report: FsckReport) -> None:
    from imaged.chunkstore.fsck import check_names  # it imports this module

    check_names(store, report, copies=False)


def _rebuild(root: Path, report: FsckReport) -> None:
    """A new index, from the bucket; what only the local packs hold is put again."""
    with StoreLock.exclusive(root):
        for name in (INDEX_NAME, INDEX_NAME + LOCK_SUFFIX, "synced"):
            (root / name).unlink(missing_ok=True)
        shutil.rmtree(root / INDEXES_DIRECTORY, ignore_errors=True)
        old = root / _OLD_DIRECTORY
        if not old.exists():  # else another rebuild was killed here, and goes on
            (root / PACKS_DIRECTORY).rename(old)
        (root / PACKS_DIRECTORY).mkdir(exist_ok=True)
        # Of other servers there is only a cache.
        own = [path for path in sorted(old.glob("*.pack")) if int(path.stem) < FOREIGN_PACKS]
    with ChunkStore.open(root) as store:
        count = 0
        for path in own:
            for found in scan(path):
                if found.frame is not None and store.missing([found.frame.id]):
                    store.put_frame(found.frame)
                    count += 1
        store.flush()
    shutil.rmtree(old)
    report.notes.append(f"{count} chunks that only this host had were uploaded")
