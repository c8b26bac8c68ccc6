"""Cold starts at the same time on one host: each chunk crosses the wire once, whoever asks for it how often."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from imaged import catalog
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.frame import HEADER_BYTES, Codec, FrameHeader
from imaged.ids import ChunkId
from tests.support.chunkserver import chunk_server
from tests.support.command import Host, busybox_layout, directory_layer, host
from tests.support.node import wait_for
from tests.support.proxy import Passed, Proxy, proxy

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
STARTS = 8
NOISE = random.Random(8).randbytes(3_000_000)
COMMAND = ("run", "box:v1", "--", "sh", "-c", "sha256sum < /srv/noise; wc -c < /srv/small")
EXPECTED = f"{sha256(NOISE).hexdigest()}  -\n5000\n".encode()


class Frames:
    """Which chunks went through a proxy. Threads share it."""

    def __init__(self) -> None:
        self._answers: dict[int, tuple[str, bytearray]] = {}
        self._lock = threading.Lock()

    def note(self, request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if request.path.startswith(("/v1/chunks", "/v1/images")):
            with self._lock:
                self._answers.setdefault(id(request), (request.path, bytearray()))[1].extend(block)
        return block

    def counts(self, prefix: str = "/v1/") -> Counter[ChunkId]:
        """How often each came, in answers below this path."""
        found: Counter[ChunkId] = Counter()
        with self._lock:
            answers = [(path, bytes(answer)) for path, answer in self._answers.values()]
        for path, answer in answers:
            if not path.startswith(prefix):
                continue
            at = 0
            while at + HEADER_BYTES <= len(answer) and answer.startswith(b"pvF1", at):
                header = FrameHeader.parse(answer[at : at + HEADER_BYTES])
                at += HEADER_BYTES + header.payload_bytes
                if header.codec is not Codec.MISSING and at <= len(answer):
                    found[header.id] += 1
        return found


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Proxy]:
    """A server that has the image, and what stands before it."""
    more = tmp_path / "more"
    (more / "srv").mkdir(parents=True)
    (more / "srv/noise").write_bytes(NOISE)
    (more / "srv/small").write_bytes(NOISE[:5000])
    layout = busybox_layout(tmp_path, directory_layer(more))
    with host(tmp_path / "server") as server:
        server.run("convert", f"oci:{layout}:v1", "--name", "box:v1")
    with chunk_server(tmp_path / "server/home/store") as running, proxy(running.url) as made:
        yield made


def doubles(counts: Counter[ChunkId], worker: Host) -> dict[ChunkId, int]:
    """What came more than once though nothing was late: on a loaded host a request may be, and is made again."""
    if "are late" in (worker.root / "run/node.log").read_text():
        return {}
    return {chunk: count for chunk, count in counts.items() if count > 1}


def start_all(worker: Host) -> None:
    """Eight of them; each sees the right bytes."""
    worker.run("node", "start")
    processes = [worker.start(*COMMAND) for _ in range(STARTS)]
    for process in processes:
        out, errors = process.communicate(timeout=100)
        assert (process.returncode, out) == (0, EXPECTED), errors


@pytest.mark.parametrize("profiled", [False, True], ids=["without a profile", "with a profile"])
def test_starts_of_one_image_fetch_each_chunk_once(tmp_path: Path, front: Proxy, profiled: bool) -> None:
    if profiled:
        with host(tmp_path / "first", front.url) as first:
            assert first.run(*COMMAND).stdout == EXPECTED
            wait_for(lambda: any(path.startswith("PUT /v1/profiles/") for path in front.paths()))
    frames = Frames()
    front.body = frames.note
    front.requests.clear()
    with host(tmp_path / "worker", front.url) as worker:
        start_all(worker)
        counts = frames.counts()
        assert doubles(counts, worker) == {}
    assert len(counts) > len(NOISE) // (64 << 10)
    boots = [path for path in front.paths() if path.startswith("GET /v1/images/")]
    assert len(boots) == 1, boots


def test_starts_of_different_images_at_once(tmp_path: Path) -> None:
    """Each has a base in common with the others and a file of its own; what they share is fetched once."""
    noises = [random.Random(number).randbytes(1_000_000) for number in range(STARTS)]
    with host(tmp_path / "server") as server:
        for number, noise in enumerate(noises):
            more = tmp_path / f"more{number}"
            (more / "srv").mkdir(parents=True)
            (more / "srv/noise").write_bytes(noise)
            (more / "srv/small").write_bytes(NOISE[:5000])
            layout = busybox_layout(tmp_path, directory_layer(more), tag=f"v{number}")
            server.run("convert", f"oci:{layout}:v{number}", "--name", f"box:v{number}")
    frames = Frames()
    with chunk_server(tmp_path / "server/home/store") as running, proxy(running.url) as front:
        front.body = frames.note
        with host(tmp_path / "worker", front.url) as worker:
            worker.run("node", "start")
            processes = [worker.start("run", f"box:v{number}", *COMMAND[2:]) for number in range(STARTS)]
            for process, noise in zip(processes, noises, strict=True):
                out, errors = process.communicate(timeout=100)
                expected = f"{sha256(noise).hexdigest()}  -\n5000\n".encode()
                assert (process.returncode, out) == (0, expected), errors
            status = worker.json("node", "status")
            fetched = frames.counts("/v1/chunks")
            assert doubles(fetched, worker) == {}
        boots = Counter(path for path in front.paths() if path.startswith("GET /v1/images/"))
    assert len(boots) == STARTS
    assert set(boots.values()) == {1}
    assert len(status["images"]) == STARTS
    assert len(frames.counts()) > STARTS * len(noises[0]) // (64 << 10)
    shared = common_chunks(tmp_path / "server/home/store")
    assert shared & fetched.keys(), "the base is read, and comes once"
    assert len(shared & fetched.keys()) > len(fetched) // 8


def common_chunks(path: Path) -> set[ChunkId]:
    """Data that every image of this store has."""
    with ChunkStore.open(path, readonly=True) as store:
        records = [catalog.load(store, name, ref).record for name, ref in store.refs.items()]
        return set.intersection(*(set(BlockImage.open(store, record.data).chunk_ids()) for record in records))
