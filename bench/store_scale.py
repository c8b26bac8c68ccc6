"""A store of a million chunks: how long it takes to open, to look chunks up, to mark and sweep; bytes of index a chunk.

    python -m bench.store_scale [--chunks 1000000] [--garbage 0.2] [--keep DIR]

The store is synthetic: chunks of 64 bytes, in images of 8,192 data chunks that share half of them with the one before,
written straight through `Appender`. A fifth of the chunks is garbage. Prints JSON, medians of `n`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.chunkstore.appender import Appender
from imaged.chunkstore.store import ChunkStore, Ref
from imaged.extent import Extent
from imaged.frame import ZSTD_LEVEL, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.record import ImageRecord

PER_IMAGE = 8192
_COMMIT_COUNT = 50_000


class _Fast:
    """A ChunkWriter without compression and threads."""

    def __init__(self, appender: Appender) -> None:
        self.count = 0
        self._appender = appender

    def put(self, data: bytes, *, level: int = ZSTD_LEVEL) -> ChunkId:
        chunk = ChunkId.of(data)
        self._appender.append([Frame(FrameHeader(chunk, Codec.RAW, len(data), len(data)), data)])
        self.count += 1
        if self.count % _COMMIT_COUNT == 0:
            self._appender.commit()
        return chunk

    def flush(self) -> None:
        self._appender.commit()


def build(root: Path, chunks: int, garbage: float) -> list[ChunkId]:
    """The ids of some of its chunks."""
    seen: list[ChunkId] = []
    with ChunkStore.open(root) as store, closing(Appender(root, store.index)) as appender:
        writer = _Fast(appender)

        def data(number: int) -> bytes:
            return number.to_bytes(8, "little") * 8

        seen += [writer.put(data(number)) for number in range(int(chunks * garbage))]
        number = int(chunks * garbage)
        images: list[tuple[str, ChunkId]] = []
        shared: list[ChunkId] = []
        while writer.count < chunks:
            fresh = [writer.put(data(number + i)) for i in range(PER_IMAGE - len(shared))]
            number += len(fresh)
            builder = BlockImageBuilder(writer)
            for chunk in [*shared, *fresh]:
                builder.append(Extent(4, chunk))
            root_id = builder.finish()
            record = ImageRecord(
                metadata=write_blob(writer, b"metadata %d" % number),
                metadata_bytes=4096,
                data=root_id,
                data_bytes=PER_IMAGE * 16384,
                entries=1,
                platform="linux/amd64",
                layers=(),
            )
            images.append((f"image:{len(images)}", writer.put(record.to_bytes())))
            shared = fresh[: PER_IMAGE // 2]
            seen += fresh[::64]
        writer.flush()
        for name, record_id in images:
            ref = Ref(record=record_id, created_at=1, source="bench", origin="", chunks=1, stored_bytes=1)
            store.refs.set(name, ref)
    return seen


def measured(work: Callable[[], Any], n: int) -> float:
    """Median seconds."""
    return statistics.median(_timed(work) for _ in range(n))


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_process(code: str, root: Path) -> dict[str, float]:
    """Run in a process of its own; what it prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


_COLLECT = """
import json, resource, sys, threading, time
from pathlib import Path
from imaged.collection.collect import collect
from imaged.chunkstore.store import ChunkStore

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024

ended, anonymous = threading.Event(), [memory("RssAnon")]

def watch():  # pages of the index and of packs count as resident, too
    while not ended.wait(0.02):
        anonymous.append(memory("RssAnon"))

ChunkStore.open(Path(sys.argv[1])).close()
before = memory("RssAnon")
threading.Thread(target=watch, daemon=True).start()
began = time.perf_counter()
report = collect(Path(sys.argv[1]))
print(json.dumps({
    "seconds": time.perf_counter() - began,
    "cpu_seconds": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
    "anonymous_before_mib": before,
    "anonymous_peak_mib": max(anonymous),
    "resident_peak_mib": memory("VmHWM"),
    "removed_chunks": report.removed_chunks,
    "kept_chunks": report.kept_chunks,
}))
"""
_OPEN = """
import json, sys, time
from pathlib import Path
from imaged.chunkstore.store import ChunkStore
began = time.perf_counter()
store = ChunkStore.open(Path(sys.argv[1]))
opened = time.perf_counter()
usage = store.df()
print(json.dumps({"seconds": opened - began, "df_seconds": time.perf_counter() - opened, "chunks": usage.chunks}))
"""
_USAGE = """
import json, sys, time
from pathlib import Path
from imaged.chunkstore.store import ChunkStore
from imaged.collection.usage import image_usage
store = ChunkStore.open(Path(sys.argv[1]), readonly=True)
began = time.perf_counter()
images = image_usage(store)
print(json.dumps({"seconds": time.perf_counter() - began, "images": len(images)}))
"""


def rounds(root: Path, code: str, n: int) -> Iterator[dict[str, float]]:
    for _ in range(n):
        yield in_process(code, root)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--garbage", type=float, default=0.2)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pvisor-scale-") as temporary:
        root = (options.keep or Path(temporary)) / "store"
        built_s = time.perf_counter()
        seen = build(root, options.chunks, options.garbage)
        built_s = time.perf_counter() - built_s
        opens = list(rounds(root, _OPEN, 5))
        chunks = int(opens[0]["chunks"])
        random.Random(1).shuffle(seen)
        wanted = seen[:20_000]
        with ChunkStore.open(root) as store:
            one_s = measured(lambda: [store.has(chunk) for chunk in wanted], 3) / len(wanted)
            many_s = measured(lambda: store.absent(wanted), 3) / len(wanted)
            missing_s = measured(lambda: store.missing(wanted), 3) / len(wanted)
            read_s = measured(lambda: [store.get(chunk) for chunk in wanted], 3) / len(wanted)
        index_bytes = (root / "index.mdb").stat().st_blocks * 512
        usage = in_process(_USAGE, root)
        first, again = in_process(_COLLECT, root), in_process(_COLLECT, root)
        report = {
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
            "load": os.getloadavg(),
            "chunks": chunks,
            "build_s": built_s,
            "open_s": statistics.median(one["seconds"] for one in opens),
            "df_s": statistics.median(one["df_seconds"] for one in opens),
            "lookup_us": {"has": one_s * 1e6, "absent": many_s * 1e6, "missing": missing_s * 1e6, "get": read_s * 1e6},
            "index_bytes_per_chunk": index_bytes / chunks,
            "df_images": usage,
            "collect": first,
            "collect_again": again,
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
