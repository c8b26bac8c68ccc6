"""A data image behind a FUSE file of its own that notes every read, mounted as EROFS with a cold page cache.

Run as a module it is the server of that file. Needs root, /dev/fuse and a kernel that mounts EROFS from files (6.12).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fuse import linux
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.ids import ChunkId


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
    command = [sys.executable, "-m", "bench.traced_mount", str(store_root), str(data), str(blocks), str(log)]
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


def reads(log: Path) -> list[tuple[int, int]]:
    """(offset, length) of each read so far."""
    return [(int(offset), int(length)) for offset, length in map(str.split, log.read_text().splitlines())]


if __name__ == "__main__":
    serve_trace(Path(sys.argv[1]), ChunkId.parse(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
