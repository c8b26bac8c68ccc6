"""What the sizes in a block image cost and save: chunks, leaves, read-ahead, compression.

    python -m bench.chunk_size [--rounds 3]

Each image's data is served through a FUSE file that notes every read of the kernel, mounted as EROFS with a cold page
cache, and each workload is run in it. Where a byte lies on that disk does not depend on how it is cut, so one trace
says for every cut which chunks and leaves a cold start fetches. Wire bytes are those as stored, without the metadata
image and the record, which do not depend on any of this.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import Samples, show, write
from bench.image import layers
from bench.traced_mount import reads, traced_mount
from bench.workloads import WORKLOADS, Image, Workload
from imaged.blockbuilder import BlockImageBuilder
from imaged.blockformat import LEAF_BLOCKS, block_count
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.conversion.apply import Tree
from imaged.conversion.cutter import CHUNK_MAX, PIECE_MAX, Cutter
from imaged.conversion.ingest import read_layer
from imaged.conversion.layer import NodeEntry
from imaged.erofs.layout import place
from imaged.erofs.writer import metadata_image
from imaged.extent import Extent
from imaged.frame import ZSTD_LEVEL, Frame
from imaged.ids import BLOCK_BYTES, ChunkId
from imaged.serving.denser import LEVEL

CUTS = ((64, 64), (64, 32), (64, 16), (32, 32), (128, 128))
"""KiB of small files that share a chunk, and of the pieces of a large file."""
READ_AHEAD_KIB = (8, 16, 32, 64, 128)
LEAF_BLOCK_COUNTS = (4096, 2048, 1024, 512, 256)
LEVELS = (1, ZSTD_LEVEL, 6, 9, 12, 15, LEVEL)
_MOUNT = "directio,"
_ONE_IN = 8
"""Of all chunks, so many are compressed at every level; the sums are scaled."""
Reads = Sequence[tuple[int, int]]


class Device(NamedTuple):
    """A data image in a store, and the EROFS metadata that goes with it."""

    metadata: bytes
    image: BlockImage


def convert(tar: Path, store: ChunkStore, cut: tuple[int, int]) -> Device:
    """A plain root file system, cut so."""
    cutter = Cutter(store, chunk_bytes=cut[0] << 10, piece_bytes=cut[1] << 10)
    with tar.open("rb") as stream:
        layer = read_layer(stream, cutter)
    order = [entry.inode for entry in layer.entries if isinstance(entry, NodeEntry)]
    tree = Tree()
    tree.apply(layer)
    builder = BlockImageBuilder(store)
    metadata = metadata_image(tree.root, place(tree.root, builder, order))
    data = builder.finish()
    store.flush()
    return Device(metadata, BlockImage.open(store, data))


def stored(store: ChunkStore, chunks: Iterable[ChunkId]) -> int:
    """Bytes of these chunks' frames."""
    return sum(found[1] for chunk in chunks if (found := store.sizes(chunk)) is not None)


def compressed(store: ChunkStore, chunks: Iterable[ChunkId], level: int) -> tuple[int, float]:
    """Bytes of the frames of these chunks at another level, and the CPU seconds to make them."""
    raw = [store.get(chunk) for chunk in chunks]
    started = time.process_time()
    return sum(Frame.of(data, level=level).stored_bytes for data in raw), time.process_time() - started


def data_chunks(image: BlockImage, trace: Reads) -> list[ChunkId]:
    """What a cold start fetches of the file data."""
    pieces = (piece for offset, length in trace for piece in image.pieces(offset, length))
    return list(dict.fromkeys(piece.chunk for piece in pieces if piece.chunk is not None))


def leaves_touched(image: BlockImage, trace: Reads) -> list[ChunkId]:
    """The leaves on the way to it."""
    size = image.root.leaf_bytes
    numbers = {
        number for offset, length in trace for number in range(offset // size, (offset + length - 1) // size + 1)
    }
    found = (image.root.leaves[number] for number in sorted(numbers) if number < len(image.root.leaves))
    return list(dict.fromkeys(leaf for leaf in found if leaf is not None))


def with_leaves(store: ChunkStore, image: BlockImage, leaf_blocks: int) -> BlockImage:
    """The same disk in leaves of another range."""
    builder = BlockImageBuilder(store, leaf_blocks=leaf_blocks)
    step = 1 << 20
    for offset in range(0, image.size_bytes, step):
        for piece in image.pieces(offset, step):
            first_block = piece.chunk_offset // BLOCK_BYTES
            builder.append(Extent(block_count(piece.length), piece.chunk, first_block if piece.chunk else 0))
    return BlockImage.open(store, builder.finish())


def trace(work: Path, store: ChunkStore, device: Device, workload: Workload, read_ahead_kib: int) -> Reads:
    """Run it on a cold mount: (offset, length) of every read of the data image."""
    with traced_mount(work, store.root, device.metadata, device.image.id, _MOUNT, read_ahead_kib) as (root, log):
        done = subprocess.run(["chroot", str(root), *workload.argv], check=True, capture_output=True, timeout=60)
        if workload.marker not in done.stdout:
            raise RuntimeError(f"{workload.name}: no {workload.marker!r} in its output")
        return reads(log)


def study(image: Image, rounds: int, work: Path) -> dict[str, Any]:
    """All tables of one image."""
    tar = work / "root.tar"
    with tar.open("wb") as output:
        subprocess.run(["zcat", *map(str, layers(image.layout()))], stdout=output, check=True)
    workloads = [workload for workload in WORKLOADS if workload.image == image]
    times = {cut: Samples() for cut in CUTS}
    # Cuts alternate within a round, so that noise of the machine meets all of them.
    for number in range(rounds):
        for cut in CUTS:
            with ChunkStore.open(work / f"round-{number}-{cut[0]}-{cut[1]}") as store:
                started = time.perf_counter()
                convert(tar, store, cut)
                times[cut].add(time.perf_counter() - started)
    document: dict[str, Any] = {"cuts": [], "read_ahead": [], "leaves": [], "levels": []}
    with ChunkStore.open(work / "chosen") as store:
        device = convert(tar, store, (CHUNK_MAX >> 10, PIECE_MAX >> 10))
        traces = {
            (workload.name, kib): trace(work, store, device, workload, kib)
            for workload in workloads
            for kib in READ_AHEAD_KIB
        }
        chosen = {workload.name: traces[workload.name, 32] for workload in workloads}
        document["read_ahead"] = read_ahead(store, device.image, traces)
        document["leaves"] = leaf_ranges(store, device.image, chosen)
        document["levels"] = levels(store, device.image, chosen)
    for cut in CUTS:
        with ChunkStore.open(work / f"cut-{cut[0]}-{cut[1]}") as store:
            document["cuts"].append(cut_costs(store, convert(tar, store, cut).image, cut, chosen))
        document["cuts"][-1]["convert_s"] = times[cut].to_json()
    report(image, document)
    return document


def read_ahead(store: ChunkStore, image: BlockImage, traces: dict[tuple[str, int], Reads]) -> list[dict[str, Any]]:
    """By workload and read-ahead: reads of the kernel, chunks, bytes of their frames."""
    found = []
    for (workload, kib), trace in traces.items():
        chunks = data_chunks(image, trace)
        row = {"workload": workload, "read_ahead_kib": kib, "reads": len(trace), "chunks": len(chunks)}
        found.append(row | {"read_bytes": sum(length for _, length in trace), "bytes": stored(store, chunks)})
    return found


def leaf_ranges(store: ChunkStore, image: BlockImage, traces: dict[str, Reads]) -> list[dict[str, Any]]:
    """By range of a leaf: the root, all leaves, and those on the way of each workload."""
    found = []
    for leaf_blocks in LEAF_BLOCK_COUNTS:
        other = with_leaves(store, image, leaf_blocks)
        row = {"leaf_blocks": leaf_blocks, "root_bytes": stored(store, [other.id])}
        row["all_bytes"] = stored(store, other.leaf_ids())
        touched = {name: leaves_touched(other, trace) for name, trace in traces.items()}
        counts = {name: {"leaves": len(leaves), "bytes": stored(store, leaves)} for name, leaves in touched.items()}
        found.append({**row, "workloads": counts})
    return found


def levels(store: ChunkStore, image: BlockImage, traces: dict[str, Reads]) -> list[dict[str, Any]]:
    """By zstd level: the whole image (scaled from a part) and what each workload touches."""
    sample = list(image.chunk_ids())[::_ONE_IN]
    found = []
    for level in LEVELS:
        size, cpu_s = compressed(store, sample, level)
        row: dict[str, Any] = {"level": level, "bytes": size * _ONE_IN, "cpu_s": cpu_s * _ONE_IN, "workloads": {}}
        for name, trace in traces.items():
            size, cpu_s = compressed(store, data_chunks(image, trace), level)
            row["workloads"][name] = {"bytes": size, "cpu_s": cpu_s}
        found.append(row)
    return found


def cut_costs(store: ChunkStore, image: BlockImage, cut: tuple[int, int], traces: dict[str, Reads]) -> dict[str, Any]:
    """Of one cut: all chunks, the map, and what each workload fetches, at both levels."""
    chunks = list(image.chunk_ids())
    row: dict[str, Any] = {"pack_kib": cut[0], "piece_kib": cut[1], "chunks": len(chunks), "workloads": {}}
    row["data_bytes"] = stored(store, chunks)
    row["map_bytes"] = stored(store, [image.id, *image.leaf_ids()])
    for name, trace in traces.items():
        touched = data_chunks(image, trace)
        way = stored(store, [image.id, *leaves_touched(image, trace)])
        dense, _ = compressed(store, touched, LEVEL)
        row["workloads"][name] = {
            "chunks": len(touched),
            "bytes": stored(store, touched),
            "dense_bytes": dense,
            "map_bytes": way,
        }
    return row


def report(image: Image, document: dict[str, Any]) -> None:
    """The tables."""
    show(
        f"{image.name}: chunks of small files / pieces of large ones, leaves of {LEAF_BLOCKS >> 8} MiB, "
        "read-ahead 32 KiB",
        (
            "KiB",
            "chunks",
            "data MB",
            "map KB",
            "convert P50 s",
            "n",
            "cold start",
            "chunks",
            "MB",
            f"MB at {LEVEL}",
            "map KB",
        ),
        [
            (
                f"{row['pack_kib']} / {row['piece_kib']}",
                str(row["chunks"]),
                f"{row['data_bytes'] / 1e6:.2f}",
                f"{row['map_bytes'] / 1e3:.1f}",
                f"{row['convert_s']['p50']:.2f}",
                str(row["convert_s"]["n"]),
                name,
                str(cost["chunks"]),
                f"{cost['bytes'] / 1e6:.3f}",
                f"{cost['dense_bytes'] / 1e6:.3f}",
                f"{cost['map_bytes'] / 1e3:.1f}",
            )
            for row in document["cuts"]
            for name, cost in row["workloads"].items()
        ],
    )
    show(
        f"{image.name}: read-ahead of the kernel",
        ("cold start", "KiB", "FUSE reads", "MB read", "chunks", "MB"),
        [
            (
                row["workload"],
                str(row["read_ahead_kib"]),
                str(row["reads"]),
                f"{row['read_bytes'] / 1e6:.3f}",
                str(row["chunks"]),
                f"{row['bytes'] / 1e6:.3f}",
            )
            for row in document["read_ahead"]
        ],
    )
    show(
        f"{image.name}: range of a leaf",
        ("MiB", "root KB", "all leaves KB", "cold start", "leaves", "root and leaves KB"),
        [
            (
                str(row["leaf_blocks"] >> 8),
                f"{row['root_bytes'] / 1e3:.1f}",
                f"{row['all_bytes'] / 1e3:.1f}",
                name,
                str(cost["leaves"]),
                f"{(row['root_bytes'] + cost['bytes']) / 1e3:.1f}",
            )
            for row in document["leaves"]
            for name, cost in row["workloads"].items()
        ],
    )
    show(
        f"{image.name}: zstd level",
        ("level", "data MB", "CPU s", "cold start", "MB", "CPU s"),
        [
            (
                str(row["level"]),
                f"{row['bytes'] / 1e6:.2f}",
                f"{row['cpu_s']:.2f}",
                name,
                f"{cost['bytes'] / 1e6:.3f}",
                f"{cost['cpu_s']:.2f}",
            )
            for row in document["levels"]
            for name, cost in row["workloads"].items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    documents = {}
    for image in dict.fromkeys(workload.image for workload in WORKLOADS):
        with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory:
            documents[image.name] = study(image, rounds, Path(directory))
    write("chunk_size", {"images": documents})


if __name__ == "__main__":
    main()
