"""What CHUNK_MAX costs and saves: stored bytes, index size, conversion time, and wire bytes of a cold shell.

    python -m bench.chunk_size [ROOTFS.tar] [--rounds 3]

For each chunk size: convert the tar (a plain root file system) into a fresh ChunkStore, serve its data image through a
FUSE file, mount it as EROFS with a cold page cache, run each command in it, and count the different chunks that the
kernel's reads touched. Wire bytes are those chunks, the leaves on the way to them, the root, and the whole metadata
image, all as stored. Needs root, /dev/fuse and a kernel that mounts EROFS from files (6.12).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.common import Samples, show, write
from bench.image import layers
from fuse import linux
from imaged.apply import Tree
from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.blockformat import LEAF_BYTES
from imaged.blockimage import BlockImage
from imaged.cutter import Cutter
from imaged.erofs.writer import metadata_image
from imaged.ids import ChunkId
from imaged.ingest import read_layer
from imaged.layer import NodeEntry
from imaged.layout import place
from imaged.store import ChunkStore
from scripts.debian import debian_layout

SIZES = (16 << 10, 32 << 10, 64 << 10, 128 << 10)
COMMANDS = ("sh -c 'echo ready'", "bash -lc 'ls -l /usr/bin | tail -1'", "perl -MPOSIX -e 'print 1'")
MOUNTS = (("", 128), ("directio,", 128), ("directio,", 32), ("directio,", 16))
"""EROFS options and read-ahead in KiB. Without directio the page cache of the FUSE file reads ahead once more."""


@dataclass
class Result:
    """One chunk size. The last three are by mount options, read-ahead and command."""

    chunk_bytes: int
    convert_s: Samples = field(default_factory=Samples)
    chunks: int = 0
    data_stored_bytes: int = 0
    index_stored_bytes: int = 0
    metadata_stored_bytes: int = 0
    wire_bytes: dict[str, int] = field(default_factory=dict)
    wire_chunks: dict[str, int] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)


def convert(tar: Path, store: ChunkStore, chunk_bytes: int) -> tuple[bytes, ChunkId, ChunkId]:
    """The metadata image, its blob and the data image of one tar."""
    with tar.open("rb") as stream:
        layer = read_layer(stream, Cutter(store, chunk_bytes=chunk_bytes), warn=lambda text: None)
    order = [entry.inode for entry in layer.entries if isinstance(entry, NodeEntry)]
    tree = Tree()
    tree.apply(layer)
    builder = BlockImageBuilder(store)
    metadata = metadata_image(tree.root, place(tree.root, builder, order))
    blob = write_blob(store, metadata)
    data = builder.finish()
    store.flush()
    return metadata, blob, data


def stored(store: ChunkStore, chunks: Iterable[ChunkId]) -> int:
    """Bytes of these chunks' frames."""
    return sum(found[1] for chunk in chunks if (found := store.sizes(chunk)) is not None)


def serve_trace(store_root: Path, data: ChunkId, top: Path, log: Path) -> None:
    """Serve the data image as the file `data` in `top` until it is unmounted; logs "offset length" of each read."""
    os.environ["FUSE_LIBRARY_NAME"] = "fuse3"
    import mfusepy

    class Traced(mfusepy.Operations):
        use_ns = True

        def __init__(self, image: BlockImage, sink: int) -> None:
            self.image, self.sink = image, sink

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if path == "/data":
                return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": self.image.size_bytes}
            raise mfusepy.FuseOSError(errno.ENOENT)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            os.write(self.sink, b"%d %d\n" % (offset, size))
            return self.image.read(offset, size)

    with ChunkStore.open(store_root, readonly=True) as store:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        mfusepy.FUSE(Traced(BlockImage.open(store, data), sink), str(top), foreground=True, ro=True, nothreads=True)


@contextlib.contextmanager
def traced_mount(
    work: Path, store_root: Path, metadata: bytes, data: ChunkId, options: str, read_ahead_kb: int
) -> Iterator[tuple[Path, Path]]:
    """The image mounted over FUSE, nothing of it cached: (mount point, log of reads)."""
    blocks, root, log = work / "blocks", work / "root", work / "reads"
    blocks.mkdir(exist_ok=True)
    root.mkdir(exist_ok=True)
    log.write_bytes(b"")
    (work / "metadata").write_bytes(metadata)
    command = [sys.executable, "-m", "bench.chunk_size", "--serve", str(store_root), str(data), str(blocks), str(log)]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 10
        while not (blocks / "data").exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the FUSE server of the benchmark did not start, status {server.poll()}")
            time.sleep(0.02)
        # A file-backed EROFS has a bdi named erofs-<number>, which nothing connects with the mount but its time.
        before = set(Path("/sys/class/bdi").glob("erofs-*"))
        linux.mount(work / "metadata", root, "erofs", linux.MS_RDONLY, f"{options}device={blocks / 'data'}")
        try:
            (bdi,) = set(Path("/sys/class/bdi").glob("erofs-*")) - before
            (bdi / "read_ahead_kb").write_text(str(read_ahead_kb))
            yield root, log
        finally:
            linux.umount(root, linux.MNT_DETACH)
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(blocks)], check=False, timeout=10)
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def touched(image: BlockImage, log: Path) -> tuple[set[ChunkId], set[int], int]:
    """The chunks and leaf numbers that the logged reads need, and how many reads there were."""
    chunks: set[ChunkId] = set()
    leaves: set[int] = set()
    lines = log.read_text().splitlines()
    for line in lines:
        offset, length = map(int, line.split())
        chunks.update(piece.chunk for piece in image.pieces(offset, length) if piece.chunk is not None)
        leaves.update(range(offset // LEAF_BYTES, (offset + length - 1) // LEAF_BYTES + 1))
    return chunks, leaves, len(lines)


def wire(work: Path, store: ChunkStore, result: Result, metadata: bytes, data: ChunkId) -> None:
    """Run every command on a cold mount and fill in what it would fetch."""
    image = BlockImage.open(store, data)
    fixed = result.metadata_stored_bytes + stored(store, [data])
    for options, read_ahead_kb in MOUNTS:
        for command in COMMANDS:
            key = f"{options}{read_ahead_kb} KiB: {command}"
            with traced_mount(work, store.root, metadata, data, options, read_ahead_kb) as (root, log):
                subprocess.run(
                    ["chroot", str(root), *shlex.split(command)], check=True, capture_output=True, timeout=60
                )
                chunks, leaves, reads = touched(image, log)
            walked = [leaf for number in leaves if (leaf := leaf_at(image, number)) is not None]
            result.wire_bytes[key] = fixed + stored(store, chunks) + stored(store, walked)
            result.wire_chunks[key] = len(chunks)
            result.reads[key] = reads


def leaf_at(image: BlockImage, number: int) -> ChunkId | None:
    """The id of one leaf, None for a hole."""
    return image.root.leaves[number] if number < len(image.root.leaves) else None


def measure(tar: Path, result: Result, *, last: bool) -> None:
    """One conversion into a fresh store; in the last round also everything else about the image."""
    with tempfile.TemporaryDirectory(prefix="chunk-size-") as name:
        work = Path(name)
        with ChunkStore.open(work / "store") as store:
            started = time.perf_counter()
            metadata, blob, data = convert(tar, store, result.chunk_bytes)
            result.convert_s.add(time.perf_counter() - started)
            if not last:
                return
            device, description = BlockImage.open(store, data), BlockImage.open(store, blob)
            chunks = list(device.chunk_ids())
            result.chunks = len(chunks)
            result.data_stored_bytes = stored(store, chunks)
            result.index_stored_bytes = stored(store, [data, *device.leaf_ids()])
            parts = [blob, *description.leaf_ids(), *description.chunk_ids()]
            result.metadata_stored_bytes = stored(store, parts)
            wire(work, store, result, metadata, data)


def tables(results: list[Result]) -> None:
    """One table of what an image costs, one of what a cold shell costs."""
    rows = [
        (
            f"{result.chunk_bytes >> 10} KiB",
            f"{result.chunks}",
            f"{result.data_stored_bytes / 1e6:.2f}",
            f"{result.index_stored_bytes / 1e3:.1f}",
            f"{result.metadata_stored_bytes / 1e3:.1f}",
            f"{result.convert_s.p50:.2f}",
            f"{result.convert_s.p95:.2f}",
            f"{len(result.convert_s.values)}",
        )
        for result in results
    ]
    show("image", ("chunk", "chunks", "data MB", "index KB", "metadata KB", "convert P50 s", "P95 s", "n"), rows)
    header = ("mount, read-ahead, command", *(f"{result.chunk_bytes >> 10} KiB" for result in results))
    for title, cell in (
        ("wire MB", lambda result, key: f"{result.wire_bytes[key] / 1e6:.3f}"),
        ("data chunks fetched / FUSE reads", lambda result, key: f"{result.wire_chunks[key]} / {result.reads[key]}"),
    ):
        show(title, header, [(key, *(cell(result, key) for result in results)) for key in results[0].wire_bytes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tar", type=Path, nargs="?", help="default: the Debian root of the other benchmarks")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as scratch:
        tar = arguments.tar
        if tar is None:
            tar = Path(scratch) / "debian.tar"
            with tar.open("wb") as output:
                subprocess.run(["zcat", *map(str, layers(debian_layout()))], stdout=output, check=True)
        compare(tar, arguments.rounds)


def compare(tar: Path, rounds: int) -> None:
    """Every size in every round, and the tables."""
    # Sizes alternate within a round, so that noise of the machine meets all of them.
    results = [Result(size) for size in SIZES]
    for number in range(rounds):
        for result in results:
            measure(tar, result, last=number == rounds - 1)
    tables(results)
    rows = [asdict(result) | {"convert_s": result.convert_s.to_json()} for result in results]
    write("chunk_size", {"input": tar.name, "results": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_trace(Path(sys.argv[2]), ChunkId.parse(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
