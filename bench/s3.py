"""Cold reads of chunks from a bucket at a real S3 server (Swift on loopback): one request a chunk, and coalesced.

    python -m bench.s3 [-n 5] [--chunks 512]

A server's cache is emptied before each sample. "one by one" is a plain range GET for each chunk; "store.get" reads the
chunks in the order of their files, one after the other, with read-ahead; "store.frames" is one batch; "scattered" is
every eighth chunk, as one batch. Samples are interleaved. Loopback has no latency: what counts is also the number of
requests, each of which takes a round trip elsewhere.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.common import Samples, show, write
from imaged.chunkstore.store import ChunkStore
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.s3.address import BucketAddress
from imaged.s3.client import S3Objects
from imaged.s3.mirror import make_mirror
from imaged.s3.packtable import pack_key
from imaged.s3.store import MirrorStore
from tests.support.swift import run_swift

_CHUNK_BYTES = 64 << 10


def _one_by_one(store: MirrorStore, chunks: list[ChunkId]) -> None:
    for chunk in chunks:
        place = store.index.find(chunk)
        assert place is not None
        pack = store.bucket.packs.find(place.pack)
        assert pack is not None
        raw = store.bucket.objects.read(pack_key(pack.id), place.offset, place.stored_bytes)
        Frame.parse(raw).open()


def _get(store: MirrorStore, chunks: list[ChunkId]) -> None:
    for chunk in chunks:
        store.get(chunk)


def _frames(store: MirrorStore, chunks: list[ChunkId]) -> None:
    for frame in store.frames(chunks):
        frame.open()


WAYS: dict[str, tuple[Callable[[MirrorStore, list[ChunkId]], None], int]] = {
    "one by one": (_one_by_one, 1),
    "store.get": (_get, 1),
    "store.frames": (_frames, 1),
    "one by one, scattered": (_one_by_one, 8),
    "store.frames, scattered": (_frames, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5, help="samples of each")
    parser.add_argument("--chunks", type=int, default=512)
    options = parser.parse_args()
    samples = {way: Samples() for way in WAYS}
    requests = dict.fromkeys(WAYS, 0)
    with run_swift() as swift, tempfile.TemporaryDirectory(prefix="pvisor-bench-s3-") as name:
        os.environ.update(swift.environ)
        address = BucketAddress(swift.make_bucket("bench"), "")
        make_mirror(Path(name) / "writer", address)
        make_mirror(Path(name) / "reader", address)
        noise = random.Random(1)
        with ChunkStore.open(Path(name) / "writer") as writer:
            data = [noise.randbytes(_CHUNK_BYTES // 2) + bytes(_CHUNK_BYTES // 2) for _ in range(options.chunks)]
            began = time.perf_counter()
            chunks = [writer.put(piece) for piece in data]
            writer.flush()
            upload_s = time.perf_counter() - began
        with ChunkStore.open(Path(name) / "reader") as reader:
            assert isinstance(reader, MirrorStore) and isinstance(reader.bucket.objects, S3Objects)
            for _ in range(options.n):
                for way, (read, step) in WAYS.items():
                    reader.evict_copies(1 << 40)
                    before = reader.bucket.objects.requests
                    began = time.perf_counter()
                    read(reader, chunks[::step])
                    samples[way].add(time.perf_counter() - began)
                    requests[way] = reader.bucket.objects.requests - before
    rows = [
        (
            way,
            f"{options.chunks // step}",
            f"{requests[way]}",
            f"{samples[way].p50 * 1e3:.0f}",
            f"{samples[way].p95 * 1e3:.0f}",
        )
        for way, (_, step) in WAYS.items()
    ]
    show(f"cold reads from a bucket, n = {options.n}", ("way", "chunks", "requests", "P50 ms", "P95 ms"), rows)
    print(f"{options.chunks} chunks of {_CHUNK_BYTES >> 10} KiB were put and uploaded in {upload_s:.2f} s")
    document = {
        way: {**samples[way].to_json(), "unit": "s", "chunks": options.chunks // step, "requests": requests[way]}
        for way, (_, step) in WAYS.items()
    }
    write("s3", {"ways": document, "upload_s": upload_s})


if __name__ == "__main__":
    main()
