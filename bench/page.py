"""How long pages of a store with many images take: `python -m bench.page [-n 1000]`.

The images are of 40 files of their own and 40 that all share. Prints the time of the first look at each page, and the
median of ten more, over one connection of loopback HTTP.
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import tempfile
import time
from pathlib import Path

from imaged.blockbuilder import BlockImageBuilder, write_blob
from imaged.chunkstore.refs import Ref, RefTable
from imaged.chunkstore.store import ChunkStore
from imaged.extent import Extent
from imaged.record import ImageRecord
from tests.support.chunkserver import chunk_server

_FILES = 40
_PATHS = ("/", "/?page=2", "/?q=image-77", "/images/team/image-7:v1", "/jobs", "/store", "/snapshots")


def fill(root: Path, count: int) -> None:
    with ChunkStore.open(root) as store:
        shared = [store.put(f"shared {number}".encode() * 300) for number in range(_FILES)]
        refs = {}
        for image in range(count):
            builder = BlockImageBuilder(store)
            for number in range(_FILES):
                builder.append(Extent(1, store.put(f"file {number} of {image} ".encode() * 200)))
                builder.append(Extent(1, shared[number]))
            record = ImageRecord(
                metadata=write_blob(store, f"metadata of {image}".encode() * 99),
                metadata_bytes=1 << 20,
                data=builder.finish(),
                data_bytes=2 * _FILES * 4096,
                entries=2 * _FILES,
                platform="linux/amd64",
                config={"Cmd": ["sh"]},
            )
            refs[f"team/image-{image}:v1"] = Ref(
                record=store.put(record.to_bytes()),
                created_at=1_700_000_000 + image,
                source="bench",
                origin="",
                chunks=2 * _FILES + 5,
                stored_bytes=100_000,
            )
        store.flush()
        RefTable.restore(store.index, refs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=1000)
    count = parser.parse_args().n
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "store"
        fill(root, count)
        with chunk_server(root) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port)

            def look(path: str) -> tuple[float, int]:
                started = time.perf_counter()
                connection.request("GET", path)
                answer = connection.getresponse()
                body = answer.read()
                assert answer.status == 200, (path, answer.status)
                return 1000 * (time.perf_counter() - started), len(body)

            started = time.perf_counter()
            for path in _PATHS:
                first, size_bytes = look(path)
                median = statistics.median(look(path)[0] for _ in range(10))
                print(f"{path:28} first {first:6.1f} ms, then {median:6.1f} ms, {size_bytes} bytes")
            while True:
                connection.request("GET", "/")
                if b"being counted" not in connection.getresponse().read():
                    break
                time.sleep(0.05)
            print(f"own and shared bytes counted after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
