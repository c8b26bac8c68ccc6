"""Startup profiles: recorded on one host, followed on the next, and harmless when they are wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fuse import node
from fuse.errors import NodeError
from fuse.imagemount import drop_leases, mount_image
from fuse.node import OpenImage
from imaged import catalog
from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.errors import NotFoundError, UpstreamError
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import HEADER_BYTES, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.profile import ENTRY_LIMIT, Profile
from imaged.reach import reachable
from imaged.record import ImageRecord
from imaged.serving.profileapi import PROFILE_TYPE
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.command import host
from tests.support.node import convert_tree, kill_daemon, node_directories, wait_for
from tests.support.proxy import Passed, Proxy, proxy

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
FILES = 40
FILE_BYTES = 200_123
START = (31, 4, 17)
"""The files that the process reads."""
BOOT = "GET /v1/images/app:1?view=boot&profile=frame"
TOGETHER = "GET /v1/images/app:1?view=boot&profile=chunks"
BATCH = "POST /v1/chunks/batch"


@cache
def content(number: int) -> bytes:
    """Different for each file, and not compressible."""
    return random.Random(number).randbytes(FILE_BYTES)


def make_tree(root: Path, *, changed: int | None = None) -> Path:
    root.mkdir()
    for number in range(FILES):
        (root / f"file{number:02}").write_bytes(content(number if number != changed else number + 1000))
    return root


@pytest.fixture
def server_store(tmp_path: Path) -> Path:
    store = tmp_path / "server" / "store"
    store.parent.mkdir()
    convert_tree(store, make_tree(tmp_path / "tree"), "app:1")
    convert_tree(store, make_tree(tmp_path / "sibling", changed=17), "app:2")
    return store


@pytest.fixture
def server(server_store: Path) -> Iterator[ChunkServer]:
    with chunk_server(server_store) as running:
        yield running


@pytest.fixture
def front(server: ChunkServer) -> Iterator[Proxy]:
    """What every host here asks; it knows what was asked for."""
    with proxy(server.url) as made:
        yield made


@contextlib.contextmanager
def worker(directory: Path, front: Proxy) -> Iterator[Config]:
    """A host that has nothing."""
    with node_directories(directory, server=front.url) as config:
        yield config
        stop(config)


def stop(config: Config) -> None:
    """End the daemon, which keeps what it recorded. Another's new mount namespace may have our mounts for a moment."""

    def stopped() -> bool:
        try:
            return node.stop(config) or True
        except NodeError:
            return False

    wait_for(stopped)


def held_back(front: Proxy) -> threading.Event:
    """Answers stop after their first blocks until the event is set."""
    go_on = threading.Event()

    def body(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if sent_bytes > 100_000:
            go_on.wait(60)
        return block

    front.body = body
    return go_on


def start(config: Config, name: str = "app:1", files: tuple[int, ...] = START) -> OpenImage:
    """What a process does that reads these files from front to back of each."""
    image = node.ensure(config).open_image(name, start=True)
    mounted = mount_image(config, image)
    for number in files:
        with (mounted / f"file{number:02}").open("rb") as file:
            expected = content(number if (name, number) != ("app:2", 17) else number + 1000)
            assert file.read() == expected, number
    return image


def profile_at(store: Path, name: str = "app:1") -> Profile | None:
    with ChunkStore.open(store, readonly=True) as opened:
        return opened.profiles.get(catalog.find(opened, name).record.data)


def record_of(store: Path, name: str = "app:1") -> ImageRecord:
    with ChunkStore.open(store, readonly=True) as opened:
        return catalog.find(opened, name).record


def leaves_and_chunks(store: Path, name: str) -> tuple[list[ChunkId], list[ChunkId]]:
    with ChunkStore.open(store, readonly=True) as opened:
        image = BlockImage.open(opened, catalog.find(opened, name).record.data)
        return image.leaf_ids(), list(image.chunk_ids())


def expect_here(config: Config, profile: Profile) -> None:
    """Wait until every chunk of the profile is in the host's store."""

    def complete() -> bool:
        with ChunkStore.open(config.store, readonly=True) as store:
            return not store.missing(profile.chunks)

    wait_for(complete)


@pytest.fixture
def profile(tmp_path: Path, front: Proxy, server_store: Path) -> Profile:
    """Of app:1, recorded on a host that is gone."""
    with worker(tmp_path / "first", front) as config:
        start(config)
    found = profile_at(server_store)
    assert found is not None
    front.requests.clear()
    return found


def test_a_first_run_is_recorded_here_and_at_the_server(
    tmp_path: Path, front: Proxy, server_store: Path, server: ChunkServer
) -> None:
    with worker(tmp_path / "first", front) as config:
        image = start(config)
    profile = profile_at(server_store)
    assert profile is not None
    assert profile_at(config.store) == profile
    assert profile.runs == 1
    with ChunkStore.open(server_store, readonly=True) as store:
        data = BlockImage.open(store, ChunkId.parse(image.data_id))
        wanted = set()
        for number in START:
            at = 0
            while data.read(at, 64) != content(number)[:64]:
                at += 4096
            wanted |= set(data.way(at, FILE_BYTES))
    assert wanted <= set(profile.chunks)
    assert len(profile.chunks) < len(wanted) + 20, "the kernel reads little that no file has"
    assert front.paths()[-1] == f"PUT /v1/profiles/{image.id}"
    status, headers, body = ask(server, "GET", "/v1/profiles/app:1")
    assert (status, headers["content-type"], body) == (200, PROFILE_TYPE, profile.pack())
    with HttpUpstream(server.url) as upstream:
        assert upstream.profile(ChunkId.parse(image.id)) == profile
        assert upstream.profile(ChunkId.of(b"no image")) is None
    assert ask(server, "GET", "/v1/profiles/app:2")[0] == 404


def test_only_the_first_run_in_a_daemon_is_recorded_and_runs_are_merged(
    tmp_path: Path, front: Proxy, server_store: Path, profile: Profile
) -> None:
    with worker(tmp_path / "second", front) as config:
        start(config, files=(4, 20))
        wait_for(lambda: (profile_at(server_store) or profile).runs == 2)
        start(config, files=(21,))
    merged = profile_at(server_store)
    assert merged is not None
    assert profile_at(config.store) == merged
    assert merged.chunks[: len(profile.chunks)] == profile.chunks
    assert len(merged.chunks) > len(profile.chunks)
    assert set(merged.ages) == {0, 1}


def test_a_host_without_any_chunk_starts_with_one_request(tmp_path: Path, front: Proxy, profile: Profile) -> None:
    with worker(tmp_path / "second", front) as config:
        image = node.ensure(config).open_image("app:1")
        expect_here(config, profile)
        start(config)
        assert front.paths() == [TOGETHER]
        counters = node.Node(config).status()["images"][image.id]
        assert counters["requests"] == 1
        assert counters["fetched_chunks"] >= len(profile.chunks)


def test_open_does_not_wait_for_the_profile_and_reads_join_what_is_on_its_way(
    tmp_path: Path, front: Proxy, profile: Profile
) -> None:
    """The server sends the small chunks, and then nothing until the process is about to read."""
    go_on = held_back(front)
    with worker(tmp_path / "second", front) as config:
        mounted = mount_image(config, node.ensure(config).open_image("app:1"))
        assert sorted(path.name for path in mounted.iterdir())[-1] == "file39"
        assert not go_on.is_set()
        go_on.set()
        start(config)
        assert front.paths().count(TOGETHER) == 1


def test_a_host_with_a_sibling_fetches_the_difference_in_one_batch(
    tmp_path: Path, front: Proxy, server_store: Path
) -> None:
    with worker(tmp_path / "first", front) as config:
        start(config, "app:2")
        stop(config)
        with ChunkStore.open(config.store, readonly=True) as store:
            (held,) = [profile for image in store.profiles.ids() if (profile := store.profiles.get(image))]
    sibling = profile_at(server_store, "app:2")
    assert sibling == held
    with worker(tmp_path / "second", front) as config:
        start(config, "app:1")
        stop(config)
        front.requests.clear()
        node.ensure(config).open_image("app:2")
        expect_here(config, sibling)
        start(config, "app:2")
        assert front.paths() == ["GET /v1/images/app:2?view=boot&profile=frame", BATCH]
        asked = {ChunkId(raw) for raw in front.requests[1].ids}
        with ChunkStore.open(config.store, readonly=True) as store:
            mine = set(BlockImage.open(store, record_of(server_store, "app:1").data).leaf_ids())
    ours = profile_at(server_store, "app:1")
    assert ours is not None
    assert asked <= set(sibling.chunks) - set(ours.chunks) - mine
    assert 0 < len(asked) <= FILE_BYTES // 16384 + 2, "one file of three differs"


def test_a_complete_image_makes_no_request(tmp_path: Path, front: Proxy, profile: Profile) -> None:
    with host(tmp_path / "second", front.url) as whole:
        whole.run("pull", "app:1")
        front.requests.clear()
        assert whole.json("image", "inspect", "app:1")["profile"]["runs"] == 1
        assert whole.run("mount", "app:1", str(make_directory(tmp_path / "mnt"))).stdout == b""
        for number in START:
            assert (tmp_path / "mnt" / f"file{number:02}").read_bytes() == content(number)
        whole.run("umount", str(tmp_path / "mnt"))
        assert front.paths() == []


def make_directory(path: Path) -> Path:
    path.mkdir()
    return path


def evict(config: Config, chunks: tuple[ChunkId, ...]) -> None:
    with ChunkStore.open(config.store) as store:
        places = [(chunk, store.index.find(chunk)) for chunk in chunks]
        store.index.drop([(chunk, place) for chunk, place in places if place is not None], forget_memos=False)


def test_a_local_profile_brings_back_what_was_evicted(
    tmp_path: Path, front: Proxy, server_store: Path, profile: Profile
) -> None:
    with worker(tmp_path / "second", front) as config:
        start(config)
        stop(config)
        leaves, _ = leaves_and_chunks(server_store, "app:1")
        gone = tuple(chunk for chunk in profile.chunks if chunk not in leaves)[::2]
        evict(config, gone)
        front.requests.clear()
        node.ensure(config).open_image("app:1")
        expect_here(config, profile)
        assert front.paths() == [BATCH]
        assert [ChunkId(raw) for raw in front.requests[0].ids] == list(gone)
        start(config)
        assert front.paths() == [BATCH]


def test_an_image_pulled_before_there_was_a_profile_gets_it_later(
    tmp_path: Path, front: Proxy, server_store: Path
) -> None:
    with worker(tmp_path / "early", front) as early:
        node.ensure(early).open_image("app:1")
        wait_for(lambda: early.store.exists() and profile_at_name(early.store))
        stop(early)
        with worker(tmp_path / "first", front) as config:
            start(config)
        profile = profile_at(server_store)
        assert profile is not None
        front.requests.clear()
        image = node.ensure(early).open_image("app:1")
        expect_here(early, profile)
        start(early)
        assert front.paths() == [f"GET /v1/profiles/{image.id}", BATCH]


def profile_at_name(store: Path) -> bool:
    """Whether the name is set."""
    with ChunkStore.open(store, readonly=True) as opened:
        return opened.refs.get("app:1") is not None


def test_pull_lazy_starts_the_profile_and_returns(tmp_path: Path, front: Proxy, profile: Profile) -> None:
    go_on = held_back(front)
    with host(tmp_path / "second", front.url) as lazy:
        pulled = lazy.json("pull", "--lazy", "app:1")
        assert not go_on.is_set()
        assert (pulled["name"], pulled["requests"]) == ("app:1", 1)
        assert 0 < pulled["fetched_chunks"] < len(profile.chunks)
        assert [image["name"] for image in lazy.json("image", "ls")] == ["app:1"]
        go_on.set()
        config = Config(home=lazy.root / "home", run=lazy.root / "run", server=front.url)
        expect_here(config, profile)
        start(config)
        drop_leases()
        assert front.paths() == [TOGETHER]
        again = lazy.json("pull", "--lazy", "app:1")
        assert (again["id"], again["requests"], again["fetched_chunks"]) == (pulled["id"], 1, 0)


def test_pull_lazy_follows_a_name_that_moved(tmp_path: Path, front: Proxy, server: ChunkServer) -> None:
    with host(tmp_path / "second", front.url) as lazy, HttpUpstream(server.url) as upstream:
        first = lazy.json("pull", "--lazy", "app:1")["id"]
        moved = upstream.image("app:2").id
        upstream.publish("app:1", moved)
        assert lazy.json("pull", "--lazy", "app:1")["id"] == str(moved) != first
        assert lazy.json("image", "inspect", "app:1")["id"] == str(moved)


def test_pull_lazy_says_what_is_wrong(tmp_path: Path, front: Proxy, server: ChunkServer) -> None:
    with host(tmp_path / "second", front.url) as lazy:
        assert "nothing:1" in lazy.error("pull", "--lazy", "nothing:1")
        assert "name" in lazy.error("pull", "--lazy", "Not A Name", code=2)
        server.stop()
        assert front.url in lazy.error("pull", "--lazy", "app:2")


def test_inspect_shows_the_profile(tmp_path: Path, front: Proxy, profile: Profile) -> None:
    with host(tmp_path / "second", front.url) as lazy:
        lazy.run("pull", "--lazy", "app:2")
        assert lazy.json("image", "inspect", "app:2")["profile"] is None
        lazy.run("pull", "--lazy", "app:1")
        expect_here(Config(home=lazy.root / "home", run=lazy.root / "run"), profile)
        shown = lazy.json("image", "inspect", "app:1")["profile"]
        assert (shown["runs"], shown["entries"], shown["absent"]) == (1, len(profile.chunks), 0)
        assert shown["bytes"] >= len(START) * FILE_BYTES
        text = lazy.run("image", "inspect", "app:1").stdout.decode()
        assert json.loads(text)["profile"] == shown


# Profiles that are wrong


def plant(server_store: Path, chunks: list[ChunkId]) -> None:
    """A profile that no client could have made."""
    with ChunkStore.open(server_store) as store:
        data = catalog.find(store, "app:1").record.data
        store.profiles.delete(data)
        store.profiles.offer(data, Profile(9, tuple(chunks), bytes(len(chunks))))


@pytest.mark.parametrize("kind", ["absent", "of another image", "huge", "rubbish", "sent wrong"])
def test_a_wrong_profile_costs_bounded_bytes(
    tmp_path: Path, front: Proxy, server_store: Path, profile: Profile, kind: str
) -> None:
    """Every read is right, and nothing is asked for that is not of the image."""
    own = set(ids_of(server_store, "app:1"))
    foreign = [chunk for chunk in ids_of(server_store, "app:2") if chunk not in own]
    numbers = [ChunkId.of(b"%d" % number) for number in range(ENTRY_LIMIT)]
    plant(
        server_store,
        {
            "absent": [*profile.chunks, *numbers[:500]],
            "of another image": [*foreign, *profile.chunks],
            "huge": numbers,
            "rubbish": [],
            "sent wrong": list(profile.chunks),
        }[kind],
    )
    if kind == "rubbish":
        with ChunkStore.open(server_store) as store, store.index.write("damage") as txn:
            store.index.put(txn, "profiles", record_of(server_store).data, b"rubbish")
    if kind == "sent wrong":
        front.body = spoilt
    with worker(tmp_path / "second", front) as config:
        start(config, files=(*START, 9))
        counters = node.Node(config).status()["images"]
        asked = {ChunkId(raw) for request in front.requests for raw in asked_for(request)}
        assert asked <= own
        # Four files, and what is around a miss: how much that is depends on how fast the server seems.
        assert sum(image["fetched_bytes"] for image in counters.values()) < FILE_BYTES * FILES // 2


def spoilt(request: Passed, sent_bytes: int, block: bytes) -> bytes:
    """The chunks behind the boot answer with a wrong byte here and there."""
    if "profile=chunks" not in request.path or not 100_000 < sent_bytes < 400_000:
        return block
    return block[:-1] + bytes([block[-1] ^ 1])


def ids_of(store: Path, name: str) -> list[ChunkId]:
    with ChunkStore.open(store, readonly=True) as opened:
        return list(reachable(opened, catalog.find(opened, name).ref.record))


def asked_for(request: Passed) -> list[bytes]:
    """The ids of chunks that a request asks for one by one."""
    if request.path.startswith("/v1/chunks/") and request.method == "GET":
        return [bytes.fromhex(request.path.rpartition("/")[2])]
    return request.ids if request.path == "/v1/chunks/batch" else []


def test_a_profile_that_breaks_off_is_asked_for_again(tmp_path: Path, front: Proxy, profile: Profile) -> None:
    died = threading.Event()

    def body(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if sent_bytes > 300_000 and not died.is_set():
            died.set()
            raise ConnectionAbortedError("cut")
        return block

    front.body = body
    with worker(tmp_path / "second", front) as config:
        start(config)
        assert died.is_set()
        assert front.paths()[0] == TOGETHER
        asked = {ChunkId(raw) for request in front.requests[1:] for raw in asked_for(request)}
        assert 0 < len(asked) < len(profile.chunks), "what had come is not asked for again"


def test_a_daemon_that_is_killed_while_it_records_loses_only_that(
    tmp_path: Path, front: Proxy, server_store: Path
) -> None:
    with worker(tmp_path / "first", front) as config:
        start(config)
        kill_daemon(config)
        start(config)
        stop(config)
        kept = profile_at(config.store)
        assert kept is not None
        assert profile_at(server_store) == kept


# The interface


def test_put_keeps_what_is_of_the_image_and_merges(server: ChunkServer, server_store: Path) -> None:
    leaves, chunks = leaves_and_chunks(server_store, "app:1")
    _, others = leaves_and_chunks(server_store, "app:2")
    foreign = [chunk for chunk in others if chunk not in chunks]
    assert foreign
    run = [ChunkId.of(b"absent"), *foreign, leaves[0], chunks[2], chunks[0]]
    body = json.dumps({"ids": [str(chunk) for chunk in run]}).encode()
    status, _, answer = ask(server, "PUT", "/v1/profiles/app:1", body, Content_Type="application/json")
    assert (status, json.loads(answer)) == (200, {"runs": 1, "entries": 3})
    with HttpUpstream(server.url) as upstream:
        image = upstream.image("app:1").id
        assert upstream.profile(image) == Profile(1, (leaves[0], chunks[2], chunks[0]), bytes(3))
        upstream.merge_profile(image, [leaves[0], chunks[1]])
        assert upstream.profile(image) == Profile(2, (leaves[0], chunks[2], chunks[0], chunks[1]), bytes([0, 1, 1, 0]))
        with pytest.raises(UpstreamError, match="none of them"):
            upstream.merge_profile(image, foreign)
        with pytest.raises(NotFoundError):
            upstream.merge_profile(ChunkId.of(b"no image"), chunks)
        found = upstream.profile(image)
        assert found is not None and found.runs == 2


@pytest.mark.parametrize(
    ("path", "body", "kind", "status"),
    [
        ("app:1", b"x" * 33, "application/octet-stream", 400),
        ("app:1", b"", "application/octet-stream", 400),
        ("app:1", bytes(32 * (ENTRY_LIMIT + 1)), "application/octet-stream", 400),
        ("app:1", bytes(5 << 20), "application/octet-stream", 413),
        ("app:1", b"{}", "application/json", 400),
        ("app:1", b'{"ids": [1]}', "application/json", 400),
        ("Bad%20Name", b"", "application/octet-stream", 400),
        ("nothing:1", bytes(32), "application/octet-stream", 404),
    ],
)
def test_bad_profiles_are_refused_with_a_reason(
    server: ChunkServer, path: str, body: bytes, kind: str, status: int
) -> None:
    found, _, answer = ask(server, "PUT", f"/v1/profiles/{path}", body, Content_Type=kind)
    assert (found, set(json.loads(answer))) == (status, {"error", "hint"}), answer
    assert ask(server, "GET", "/v1/profiles/app:1")[0] == 404


def test_a_client_that_does_not_ask_for_the_profile_gets_the_record_first(
    server: ChunkServer, server_store: Path, profile: Profile
) -> None:
    """As one does that is older than profiles are."""
    status, headers, body = ask(server, "GET", "/v1/images/app:1?view=boot")
    assert status == 200
    document = json.loads(headers["pvisor-image"])
    assert "profile" not in document
    assert FrameHeader.parse(body[:HEADER_BYTES]).id == ChunkId.parse(document["id"])
    asked = ask(server, "GET", "/v1/images/app:1?view=boot&profile=frame")
    assert asked[2] == Frame.of(profile.pack()).pack() + body
    assert json.loads(asked[1]["pvisor-image"])["profile"] == str(ChunkId.of(profile.pack()))


@pytest.mark.parametrize("stated", ["its id", "x" * 64, "", {"an": "object"}, 7])
@pytest.mark.parametrize("frame", ["none", "rubbish", "wrong bytes"])
def test_a_profile_that_is_none_is_passed_over(server_store: Path, tmp_path: Path, stated: object, frame: str) -> None:
    """The header says that there is one; what comes before the record is something else, or nothing."""
    record = record_of(server_store)
    lead = Frame.of(b"no profile")
    if frame == "wrong bytes":
        lead = Frame(lead.header, lead.payload[:-1] + b"x")
    body = (b"" if frame == "none" else lead.pack()) + Frame.of(record.to_bytes()).pack()
    said = str(record.id if frame == "none" else lead.header.id) if stated == "its id" else stated
    document = {"id": str(record.id), "name": "app:1", "frames": 1, "profile": said}
    with (
        answering(body, {"Pvisor-Image": json.dumps(document)}) as url,
        HttpUpstream(url) as upstream,
        upstream.boot("app:1") as stream,
    ):
        assert stream is not None
        assert (stream.found.id, stream.profile, list(stream.first)) == (record.id, None, [])


@contextlib.contextmanager
def answering(body: bytes, headers: dict[str, str]) -> Iterator[str]:
    """A server with one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_reading_the_whole_image_through_a_mount_is_no_start(tmp_path: Path, front: Proxy, server_store: Path) -> None:
    """Neither before the first run nor while that is recorded."""
    with host(tmp_path / "copy", front.url) as copy:
        copy.run("mount", "app:1", str(make_directory(tmp_path / "mnt")))
        for number in range(FILES):
            assert (tmp_path / "mnt" / f"file{number:02}").read_bytes() == content(number)
        copy.run("umount", str(tmp_path / "mnt"))
        copy.run("node", "stop")
        assert profile_at(server_store) is None
    with worker(tmp_path / "both", front) as config:
        start(config)
        node.ensure(config).open_image("app:1")
        stop(config)
        assert profile_at(config.store) is None
    with worker(tmp_path / "search", front) as config:
        start(config, files=tuple(range(FILES)))
        stop(config)
        assert profile_at(config.store) is None


def test_the_boot_answer_carries_the_leaves_that_the_profile_names(server: ChunkServer, server_store: Path) -> None:
    leaves, chunks = leaves_and_chunks(server_store, "app:1")
    assert len(leaves) > 2
    with HttpUpstream(server.url, retry=RetryPolicy(total_s=1.0)) as upstream:
        image = upstream.image("app:1").id
        with upstream.boot("app:1") as stream:
            assert stream is not None
            assert stream.profile is None
            assert {frame.id for frame in stream.first} >= set(leaves)
            assert list(stream.rest) == []
        with ChunkStore.open(server_store, readonly=True) as store:
            touched = BlockImage.open(store, record_of(server_store).data).way(0, 1)
        upstream.merge_profile(image, touched)
        for ahead in (False, True):
            with upstream.boot("app:1", ahead=ahead) as stream:
                assert stream is not None
                assert stream.profile == Profile().merged(touched)
                assert {frame.id for frame in stream.first} & {*leaves, *chunks} == {touched[0]}
                assert [frame.id for frame in stream.rest] == touched[1:] * ahead
    for query in ("view=boot&profile=all", "profile=none"):
        assert ask(server, "GET", f"/v1/images/app:1?{query}")[0] == 400
