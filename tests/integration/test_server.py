"""A real server process: chunks, images, uploads, bad input, jobs, and pulling from it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from imaged.blockimage import BlockImage, read_blob
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkCorruptError, ChunkMissingError, NotFoundError, UpstreamError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.remote import Job
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.serving.openapi import document
from imaged.serving.server import application
from imaged.transfer.pull import pull_image
from imaged.web.site import PATHS
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.oci import make_tar, write_layout
from tests.support.registry import run_registry
from tests.support.synthetic import Synthetic, add_image

pytest_plugins = ("tests.support.fetching",)
pytestmark = pytest.mark.network
QUICK = RetryPolicy(total_s=1.0, first_wait_s=0.02, longest_wait_s=0.1)


def post_json(server: ChunkServer, path: str, value: Any) -> tuple[int, dict[str, Any]]:
    status, _, body = ask(server, "POST", path, json.dumps(value).encode(), Content_Type="application/json")
    return status, json.loads(body)


def split(raw: bytes) -> list[Frame]:
    frames = []
    while raw:
        end = HEADER_BYTES + FrameHeader.parse(raw[:HEADER_BYTES]).payload_bytes
        frames.append(Frame.parse(raw[:end]))
        raw = raw[end:]
    return frames


def test_one_chunk_is_immutable_and_conditional(server: ChunkServer, image: Synthetic) -> None:
    path = f"/v1/chunks/{image.id}"
    status, headers, body = ask(server, "GET", path)
    assert status == 200
    assert Frame.parse(body).open() == image.record.to_bytes()
    assert "immutable" in headers["cache-control"]
    assert headers["etag"] == f'"{image.id}"'
    assert ask(server, "GET", path, If_None_Match=headers["etag"])[0] == 304
    status, headers, body = ask(server, "HEAD", path)
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > HEADER_BYTES
    absent = ChunkId.of(b"absent")
    assert ask(server, "GET", f"/v1/chunks/{absent}")[0] == 404
    assert ask(server, "GET", f"/v1/chunks/{absent}", If_None_Match=f'"{absent}"')[0] == 404


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/json", None])
@pytest.mark.parametrize("count", [0, 1, 5, 17, 41])
def test_a_batch_is_in_order_and_marks_what_is_missing(
    server: ChunkServer, upstream: HttpUpstream, image: Synthetic, kind: str | None, count: int
) -> None:
    chunks = list(BlockImage.open(upstream, image.record.data).chunk_ids())
    ids = [*chunks, ChunkId.of(b"absent")][::-1][:count]
    body = json.dumps({"ids": [str(chunk) for chunk in ids]}).encode()
    if kind == "application/octet-stream":
        body = b"".join(ids)
    told = {} if kind is None else {"Content_Type": kind}
    status, headers, raw = ask(server, "POST", "/v1/chunks/batch", body, **told)
    assert status == 200
    assert int(headers["content-length"]) == len(raw)
    frames = split(raw)
    assert [frame.id for frame in frames] == ids
    assert [frame.header.codec is Codec.MISSING for frame in frames] == [n == 0 for n in range(count)]
    held = b"".join(frame.open() for frame in reversed(frames[1:]))
    assert held == image.data[len(image.data) - len(held) :]


def test_upstream_reads_verify_and_say_what_is_missing(upstream: HttpUpstream, image: Synthetic) -> None:
    absent = ChunkId.of(b"absent")
    assert upstream.missing([absent, image.id]) == [absent]
    assert upstream.missing([]) == []
    assert read_blob(upstream, image.record.metadata) == image.metadata
    frames = list(upstream.frames([absent, image.id]))
    assert frames[0].header.codec is Codec.MISSING
    assert frames[1].open() == image.record.to_bytes()


def test_names_short_names_and_ids_resolve(upstream: HttpUpstream, image: Synthetic) -> None:
    for text in ("registry.test:5000/team/app:v1", "team/app:v1", "app:v1", str(image.id)):
        found = upstream.image(text)
        assert (found.name, found.id, found.record) == ("registry.test:5000/team/app:v1", image.id, image.record)
        assert found.source == "synthetic"
    assert {entry.name for entry in upstream.images()} >= {"other:latest", "registry.test:5000/team/app:v1"}
    for text in ("app:v2", "0" * 64):
        with pytest.raises(NotFoundError):
            upstream.image(text)


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status"),
    [
        ("GET", "/v1/chunks/xyz", None, "", 400),
        ("GET", "/v1/chunks/" + "A" * 64, None, "", 400),
        ("GET", "/v1/images/Bad%20Name", None, "", 400),
        ("GET", "/v1/images/%00", None, "", 400),
        ("GET", "/v1/images/other?view=all", None, "", 400),
        ("GET", "/v1/jobs/nope", None, "", 404),
        ("GET", "/v1/nothing", None, "", 404),
        ("DELETE", "/v1/chunks/batch", None, "", 405),
        ("POST", "/v1/chunks/batch", b"\xff", "application/json", 400),
        ("POST", "/v1/chunks/batch", b"[]", "application/json", 400),
        ("POST", "/v1/chunks/batch", b'{"ids": [1]}', "application/json", 400),
        ("POST", "/v1/chunks/batch", b'{"ids": "00"}', "application/json", 400),
        ("POST", "/v1/chunks/batch", b"[" * 100_000, "application/json", 400),
        ("POST", "/v1/chunks/batch", b"x" * 33, "application/octet-stream", 400),
        ("POST", "/v1/chunks/batch", b"x" * 32 * 4097, "application/octet-stream", 400),
        ("POST", "/v1/chunks/batch", b"x" * (5 << 20), "application/octet-stream", 413),
        ("POST", "/v1/chunks/missing", b"{}", "application/json", 400),
        ("PUT", "/v1/chunks", b"not a frame", "application/octet-stream", 400),
        ("PUT", "/v1/chunks", b"x" * 100, "application/octet-stream", 400),
        ("PUT", "/v1/chunks", Frame.missing(ChunkId.of(b"")).pack(), "application/octet-stream", 400),
        ("PUT", "/v1/chunks", Frame.of(b"").pack(), "application/octet-stream", 400),
        ("PUT", "/v1/images/app:v1", b'{"id": 5}', "application/json", 400),
        ("PUT", "/v1/images/app:v1", b'{"id": "zz"}', "application/json", 400),
        ("PUT", "/v1/images/-:v1", b'{"id": "zz"}', "application/json", 400),
        ("POST", "/v1/images", b"{}", "application/json", 400),
        ("POST", "/v1/images", b'{"source": "ftp://x"}', "application/json", 400),
        ("POST", "/v1/images", b'{"source": "docker://h.test/x", "name": 3}', "application/json", 400),
        ("POST", "/v1/images", b'{"source": "docker://h.test/x", "platform": "--store"}', "application/json", 400),
        (
            "POST",
            "/v1/images",
            b'{"source": "docker://h.test/x", "platform": "linux/\\u0000"}',
            "application/json",
            400,
        ),
        (
            "POST",
            "/v1/images",
            b'{"source": "docker://h.test/x", "platform": "linux/\\ud800"}',
            "application/json",
            400,
        ),
        ("POST", "/v1/images", b'{"source": "docker://h.test/x\\ud800"}', "application/json", 400),
        ("POST", "/v1/images", b'{"source": "docker://h.test/x", "name": "\\ud800"}', "application/json", 400),
        ("POST", "/v1/images", b'{"source": "oci:/\\ud800"}', "application/json", 400),
        ("GET", "/v1/images/%ed%a0%80", None, "", 400),
        ("GET", "/v1/jobs/%ed%a0%80", None, "", 404),
    ],
)
def test_bad_requests_are_refused_with_a_reason(
    server: ChunkServer, method: str, path: str, body: bytes | None, kind: str, status: int
) -> None:
    headers = {"Content_Type": kind} if kind else {}
    found, answer_headers, answer = ask(server, method, path, body, **headers)
    assert found == status, answer
    assert answer_headers["content-type"].startswith("application/json")
    assert set(json.loads(answer)) == {"error", "hint"}


def test_upload_and_publish(server: ChunkServer, upstream: HttpUpstream, local: ChunkStore) -> None:
    made = add_image(local, "mine:latest", seed=7, chunks=20)
    local.flush()
    wanted = list(reachable(local, made.id))
    assert set(upstream.missing(wanted)) == set(wanted)
    with pytest.raises(UpstreamError, match="not complete"):
        upstream.publish("mine:latest", made.id)
    frames = list(local.frames(wanted))
    upstream.upload(frames[:-1])
    with pytest.raises(UpstreamError, match="1 of"):
        upstream.publish("mine:latest", made.id)
    upstream.upload(frames)
    upstream.publish("mine:latest", made.id)
    found = upstream.image("mine")
    assert (found.id, found.chunks) == (made.id, len(wanted))
    assert found.stored_bytes == sum(frame.stored_bytes for frame in frames)
    status, _, body = ask(server, "PUT", "/v1/images/t:1", json.dumps({"id": str(wanted[3])}).encode())
    assert status in (400, 409), body


def test_an_upload_that_lies_is_refused_and_not_kept(server: ChunkServer, upstream: HttpUpstream) -> None:
    good, other = os.urandom(5000), os.urandom(5000)
    lie = Frame(FrameHeader(ChunkId.of(other), Codec.RAW, 5000, 5000), good)
    status, _, body = ask(server, "PUT", "/v1/chunks", Frame.of(good).pack() + lie.pack())
    assert status == 400
    assert str(ChunkId.of(other)) in json.loads(body)["error"]
    assert upstream.missing([ChunkId.of(other), ChunkId.of(good)]) == [ChunkId.of(other)]
    status, _, body = ask(server, "PUT", "/v1/chunks", Frame.of(other).pack()[:-1])
    assert status == 400


async def routes_of(store: ChunkStore) -> set[tuple[str, str]]:
    async with application(store) as app:
        return {
            (route.method.lower(), route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD" and route.resource.canonical not in PATHS
        }


def test_every_route_is_described(server: ChunkServer, local: ChunkStore) -> None:
    described = {(method, path) for path, operations in document()["paths"].items() for method in operations}
    assert asyncio.run(routes_of(local)) == described
    served = json.loads(ask(server, "GET", "/v1/openapi.json")[2])
    assert served == json.loads(json.dumps(document()))
    assert ask(server, "GET", "/healthz")[::2] == (200, b"ok\n")
    assert ask(server, "GET", "/readyz")[::2] == (200, b"ok\n")


@pytest.mark.usefixtures("no_hedges")
def test_lazy_pull_is_one_request_and_reads_fetch_the_rest(
    server: ChunkServer, upstream: HttpUpstream, image: Synthetic, local: ChunkStore
) -> None:
    fetcher = Fetcher(local, [upstream])
    tally = Tally()
    pulled = pull_image(fetcher, upstream, "team/app:v1", lazy=True, tally=tally)
    assert (pulled.id, pulled.record, pulled.name) == (image.id, image.record, "registry.test:5000/team/app:v1")
    assert tally.requests == 1
    assert tally.fetched_bytes < len(image.metadata) + 20_000
    reader = fetcher.reader(image.record.data, tally)
    data = BlockImage.open(reader, image.record.data)
    assert data.read(70_000, 10) == image.data[70_000:70_010]
    assert tally.requests == 2
    assert data.read(0, 1 << 20) == image.data[: 1 << 20]
    assert tally.requests == 3
    fetcher.drain()
    ref = local.refs.get("registry.test:5000/team/app:v1")
    assert ref is not None
    assert (ref.record, ref.origin, ref.source) == (image.id, upstream.url, "synthetic")
    assert local.origins.get(image.record.data) == upstream.url
    again = Tally()
    assert pull_image(fetcher, upstream, "app:v1", lazy=True, tally=again) == pulled
    assert (again.requests, again.fetched_chunks) == (1, 0)
    fetcher.close()


def test_full_pull_needs_no_server_afterwards(home: Path, image: Synthetic, local: ChunkStore) -> None:
    with chunk_server(home / "store") as server:
        upstream = HttpUpstream(server.url)
        fetcher = Fetcher(local, [upstream])
        tally = Tally()
        pull_image(fetcher, upstream, "app:v1", lazy=True, tally=tally)
        pulled = pull_image(fetcher, upstream, "app:v1", lazy=False, tally=tally)
        assert tally.requests <= 4
        fetcher.close()
        assert server.stop() == 0
    assert read_blob(local, pulled.record.metadata) == image.metadata
    assert BlockImage.open(local, pulled.record.data).read(0, len(image.data)) == image.data
    ref = local.refs.get("registry.test:5000/team/app:v1")
    assert ref is not None
    assert ref.origin == ""


def test_pull_of_a_name_that_is_not_there(upstream: HttpUpstream, local: ChunkStore) -> None:
    fetcher = Fetcher(local, [upstream])
    with pytest.raises(NotFoundError):
        pull_image(fetcher, upstream, "nothing:here", lazy=True)
    assert local.refs.items() == []
    fetcher.close()


def test_many_clients_read_at_once(server: ChunkServer, image: Synthetic) -> None:
    def read(number: int) -> bool:
        upstream = HttpUpstream(server.url)
        try:
            data = BlockImage.open(upstream, image.record.data)
            offset = number * 30_000
            return data.read(offset, 300_000) == image.data[offset : offset + 300_000]
        finally:
            upstream.close()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(32)))


def test_a_server_that_restarts_is_survived(home: Path, image: Synthetic, local: ChunkStore) -> None:
    with chunk_server(home / "store") as server:
        port = server.port
        upstream = HttpUpstream(server.url, retry=RetryPolicy(total_s=20))
        fetcher = Fetcher(local, [upstream], retry=RetryPolicy(total_s=20))
        pull_image(fetcher, upstream, "app:v1", lazy=True)
        server.stop(signal.SIGKILL)
    results: list[bytes] = []
    data = BlockImage.open(fetcher.reader(image.record.data, Tally()), image.record.data)
    thread = threading.Thread(target=lambda: results.append(data.read(0, 200_000)))
    thread.start()
    time.sleep(0.2)
    with chunk_server(home / "store", port=port):
        thread.join(20)
    assert results == [image.data[:200_000]]
    fetcher.close()


def test_sigterm_lets_an_answer_finish(home: Path, image: Synthetic) -> None:
    with chunk_server(home / "store") as server:
        upstream = HttpUpstream(server.url)
        chunks = list(BlockImage.open(upstream, image.record.data).chunk_ids())
        stream = upstream.fetch(chunks * 20)
        first = next(stream)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        rest = list(stream)
        assert [frame.id for frame in (first, *rest)] == chunks * 20
        assert server.process.wait(20) == 0
        upstream.close()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_a_frame_found_damaged_cuts_the_answer_and_is_then_missing(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        image = add_image(store, "hurt:latest", seed=9)
        chunks = list(BlockImage.open(store, image.record.data).chunk_ids())
        location = store.index.find(chunks[30])
        assert location is not None
    with (tmp_path / "store" / "packs" / f"{location.pack:08}.pack").open("r+b") as pack:
        pack.seek(location.offset)
        pack.write(b"torn")
    with chunk_server(tmp_path / "store") as server:
        upstream = HttpUpstream(server.url, retry=QUICK)
        frames = list(upstream.frames(chunks))
        assert [frame.id for frame in frames] == chunks
        assert [n for n, frame in enumerate(frames) if frame.header.codec is Codec.MISSING] == [30]
        upstream.close()


def test_a_damaged_payload_is_dropped_when_a_client_complains(tmp_path: Path, local: ChunkStore) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        image = add_image(store, "hurt:latest", seed=9)
        chunk = next(iter(BlockImage.open(store, image.record.data).chunk_ids()))
        location = store.index.find(chunk)
        assert location is not None
    with (tmp_path / "store" / "packs" / f"{location.pack:08}.pack").open("r+b") as pack:
        pack.seek(location.offset + HEADER_BYTES + 1000)
        pack.write(b"torn")
    with chunk_server(tmp_path / "store") as server:
        upstream = HttpUpstream(server.url, retry=QUICK)
        fetcher = Fetcher(local, [upstream])
        with pytest.raises(ChunkCorruptError):
            fetcher.get(chunk, Tally())
        assert upstream.missing([chunk]) == [chunk]
        with pytest.raises(ChunkMissingError):
            fetcher.get(chunk, Tally())
        upstream.upload([Frame.of(image.data[:65536])])
        assert fetcher.get(chunk, Tally()) == image.data[:65536]
        fetcher.close()


def test_frames_from_the_page_cache_are_those_from_the_disk(local: ChunkStore) -> None:
    image = add_image(local, "mine:latest", seed=5, chunks=2)
    local.flush()
    chunks = [image.id, *BlockImage.open(local, image.record.data).chunk_ids()]
    for chunk, frame in zip(chunks, local.frames(chunks), strict=True):
        assert local.packed_cached(chunk) in (frame.pack(), None)
    assert local.packed_cached(ChunkId.of(b"absent")) is None


def test_an_upload_refused_early_is_told_why(server: ChunkServer, upstream: HttpUpstream) -> None:
    lie = Frame(FrameHeader(ChunkId.of(b"x"), Codec.RAW, 5000, 5000), bytes(5000))
    filler = [Frame.of(os.urandom(1 << 20)) for _ in range(16)]
    with pytest.raises(UpstreamError, match="do not match"):
        upstream.upload([lie, *filler])


def wait_for(upstream: HttpUpstream, job: Job) -> Job:
    deadline = time.monotonic() + 30
    while not job.finished:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        job = upstream.job(job.id)
    return job


def test_convert_job(upstream: HttpUpstream, tmp_path: Path) -> None:
    tar = make_tar(("etc/", b""), ("etc/hello", b"hello\n" * 1000))
    layout = write_layout(tmp_path / "layout", [tar])
    with run_registry() as registry:
        registry.push(f"oci:{layout}", "app:v1")
        source = registry.source("app:v1")
        first = upstream.convert(source, name="made:1", platform="linux/amd64")
        joined = upstream.convert(source, name="made:1", platform="linux/amd64")
        assert joined.id == first.id
        job = wait_for(upstream, first)
    assert (job.state, job.error) == ("done", "")
    assert job.image is not None
    assert job.image["name"] == "made:1"
    assert upstream.image("made:1").id == ChunkId.parse(job.image["id"])


def test_a_job_that_fails_says_why(upstream: HttpUpstream) -> None:
    with run_registry() as registry:
        job = wait_for(upstream, upstream.convert(registry.source("nothing:v1")))
        assert job.state == "failed"
        assert f"{registry.address} does not have the manifest" in job.error
        assert job.hint
        assert job.image is None


@pytest.mark.parametrize("source", ["dir:{}", "oci:{}", "oci-archive:{}/x.tar", "docker-archive:{}/x.tar"])
def test_files_of_the_servers_host_are_no_source(server: ChunkServer, tmp_path: Path, source: str) -> None:
    (tmp_path / "secret").write_text("of the server")
    status, answer = post_json(server, "/v1/images", {"source": source.format(tmp_path)})
    assert status == 403
    assert source.partition(":")[0] in answer["error"]
    assert "pvisor convert" in answer["hint"]
