"""Check a store down to its last byte."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from imaged.chunkstore.environment import INDEX_NAME
from imaged.chunkstore.index import Index
from imaged.chunkstore.nametable import NameTable, R
from imaged.chunkstore.pack import PackReader, pack_bytes, pack_numbers
from imaged.chunkstore.rebuild import rebuild_index
from imaged.chunkstore.rows import Location, PackRow
from imaged.chunkstore.salvage import salvage
from imaged.chunkstore.store import MIRROR_NAME, ChunkStore
from imaged.chunkstore.storelock import CollectionLock
from imaged.errors import ChunkCorruptError, FormatError, NotFoundError, StoreError
from imaged.faults import REBUILD_HINT, store_faults
from imaged.frame import HEADER_BYTES, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.reach import Marker

_DAMAGED_HINT = (
    "`pvisor image verify NAME` drops damaged chunks: a lazily pulled image then fetches them again, convert or pull "
    "any other again; `pvisor store fsck --rebuild` accepts the loss of what is still missing"
)
_REBUILT_HINT = "what is damaged was left out: convert or pull images that lack chunks again, or drop their names"


@dataclass(slots=True)
class FsckReport:
    """`errors` are damage; `notes` are leftovers of killed processes, which the next writer or gc clears away.

    `hints` say what to do about the errors.
    """

    chunks: int = 0
    stored_bytes: int = 0
    packs: int = 0
    images: int = 0
    snapshots: int = 0
    rebuilt: bool = False
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)


def check(root: Path, *, rebuild: bool = False) -> FsckReport:
    """Verify every chunk, every image and snapshot down to its chunks, and the index's sums.

    Other processes may use the store; it waits for a collection, and a collection for it (StoreBusyError).

    With `rebuild` the index is first made anew from the packs, alone (StoreBusyError): names come from the old index or
    from their copies, chunks that do not verify are left out, and layer memos, which are only a cache, are dropped.
    """
    root = root.absolute()
    report = FsckReport(rebuilt=rebuild)
    with store_faults("read its directory", root):
        mirrored = (root / MIRROR_NAME).exists()
    if mirrored:
        from imaged.s3.check import check_bucket

        return check_bucket(root, report, rebuild=rebuild)
    with store_faults("read its directory", root):
        found = (root / INDEX_NAME).exists() or bool(pack_numbers(root))
    if not found:
        raise NotFoundError(f"no chunk store at {root}", hint="convert or pull an image first")
    with CollectionLock.shared(root):
        if rebuild:
            errors, notes = rebuild_index(root)
            report.errors += errors
            report.notes += notes
        else:
            try:
                salvage(root / INDEX_NAME)
            except StoreError as error:
                report.errors.append(error.message)
                report.hints.append(error.hint)
                return report
        _check(root, report)
    if report.errors:
        report.hints.append(_REBUILT_HINT if rebuild else _DAMAGED_HINT)
    return report


def _check(root: Path, report: FsckReport) -> None:
    with ChunkStore.open(root, readonly=True) as store:
        if report.rebuilt:
            usage = store.df()
            report.chunks, report.stored_bytes, report.packs = usage.chunks, usage.stored_bytes, usage.packs
        else:
            _check_packs(store, report)
        check_names(store, report)


def _check_packs(store: ChunkStore, report: FsckReport) -> None:
    """Read and verify every frame that the index names, pack by pack in the order of the file."""
    offsets: dict[int, array[int]] = {}
    counted: dict[int, PackRow] = {}
    ends: dict[int, int] = {}
    with store.index.read() as txn:
        for _, raw in store.index.rows("chunks", txn=txn):
            location = Location.unpack(raw)
            offsets.setdefault(location.pack, array("Q")).append(location.offset)
            counted[location.pack] = counted.get(location.pack, PackRow()).changed(location, 1)
            ends[location.pack] = max(ends.get(location.pack, 0), location.offset + location.stored_bytes)
        rows = store.index.packs(txn=txn)
    report.packs = len(rows)
    for number in sorted(offsets.keys() | rows.keys()):
        row, found = rows.get(number), counted.get(number, PackRow())
        if row is None or row[2:] != found[2:]:
            report.errors.append(f"pack {number}: the index counts {row and row[2:]}, its chunks are {found[2:]}")
            if REBUILD_HINT not in report.hints:
                report.hints.append(REBUILD_HINT)
        size = pack_bytes(store.root, number)
        if row is not None and size < row.committed_bytes:
            # What readers dropped is no damage any more.
            found_in = report.errors if size < ends.get(number, 0) else report.notes
            found_in.append(f"pack {number}: {size} bytes, {row.committed_bytes} were committed")
    bad: dict[tuple[int, int], str] = {}
    reader = PackReader(store.root)
    for number, places in offsets.items():
        for offset in sorted(places):
            problem = _check_frame(store.index, reader, number, offset, report)
            if problem:
                bad[number, offset] = problem
    reader.close()
    for chunk, location in store.index.chunks() if bad else ():
        problem = bad.get((location.pack, location.offset), "")
        if problem:
            report.errors.append(f"chunk {chunk}: pack {location.pack} at {location.offset}: {problem}")
    report.notes += [f"pack {n}: not in the index; gc removes it" for n in pack_numbers(store.root) if n not in rows]


def _check_frame(index: Index, reader: PackReader, number: int, offset: int, report: FsckReport) -> str:
    """What is wrong with the frame at this place; "" when it is the chunk that the index has there."""
    try:
        header = FrameHeader.parse(reader.read(number, offset, HEADER_BYTES))
        payload = reader.read(number, offset + HEADER_BYTES, header.payload_bytes)
        if len(payload) != header.payload_bytes:
            return f"payload of {header.payload_bytes} bytes ends after {len(payload)}"
        Frame(header, payload).open()
    except (OSError, FormatError, ChunkCorruptError) as error:
        return str(error)
    expected = Location(number, offset, header.size_bytes, header.payload_bytes, header.codec)
    if index.find(header.id) != expected:
        return f"a frame of chunk {header.id}"
    report.chunks += 1
    report.stored_bytes += expected.stored_bytes
    return ""


def check_names(store: ChunkStore, report: FsckReport, *, copies: bool = True) -> None:
    """Every image, snapshot and layer memo down to its chunks; with `copies` the copies of names as well."""
    marker = Marker(store)
    for name, ref in store.refs.items():
        report.images += 1
        with _noting(f"image {name}", report) as lacks:
            lacks(marker.image(ref.record)[1], ref.origin)
    for name, snapshot in store.snapshots.items():
        report.snapshots += 1
        with _noting(f"snapshot {name}", report) as lacks:
            lacks(marker.snapshot(snapshot.record)[1], snapshot.origin)
    for diff_id, blob in list(store.memos.items()):
        with _noting(f"layer {diff_id}", report) as lacks:
            lacks(marker.layer(blob), "")
    if not copies:
        return
    _check_copy(store.refs, store.root, report)
    _check_copy(store.snapshots, store.root, report)


@contextmanager
def _noting(what: str, report: FsckReport) -> Iterator[Callable[[Collection[ChunkId], str], None]]:
    """Notes FormatError of the block, and the chunks that it says are lacking; what has an origin may lack any."""

    def lacks(chunks: Collection[ChunkId], origin: str) -> None:
        if chunks and not origin:
            report.errors.append(f"{what}: {len(chunks)} chunks are missing, such as {min(chunks)}")

    try:
        yield lacks
    except FormatError as error:
        report.errors.append(f"{what}: {error.message}")


def _check_copy(table: NameTable[R], root: Path, report: FsckReport) -> None:
    try:
        if table.read_copy(root) != dict(table.items()):
            report.notes.append(f"{table.COPY_NAME} differs from the index; the next change of a name writes it")
    except FormatError as error:
        report.notes.append(error.message)
