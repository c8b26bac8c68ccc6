"""Leases over HTTP, and a real server that is collected, killed and uploaded to at the same time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from imaged import catalog
from imaged.chunkstore import condemned
from imaged.chunkstore.fsck import check
from imaged.chunkstore.index import Index
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import ChunkMissingError, NotFoundError, UpstreamError
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.progress import NoProgress
from imaged.reach import reachable
from imaged.signature import Signature
from imaged.transfer.push import push_image
from imaged.transfer.remotelease import leased
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.store_images import build_image, name_image, noise

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChunkServer]:
    with chunk_server(tmp_path / "server") as server:
        yield server


@pytest.fixture
def upstream(server: ChunkServer) -> Iterator[HttpUpstream]:
    with HttpUpstream(server.url, retry=RetryPolicy(total_s=5.0)) as upstream:
        yield upstream


def lease(server: ChunkServer, method: str, path: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    status, _, answer = ask(server, method, f"/v1/leases{path}", json.dumps(body).encode(), **headers)
    return status, json.loads(answer)


def image_at(root: Path, seeds: range, name: str) -> ChunkId:
    with ChunkStore.open(root) as store:
        record = build_image(store, seeds)
        name_image(store, name, record)
        return record.id


def test_what_a_node_has_open_stays(tmp_path: Path, server: ChunkServer, upstream: HttpUpstream) -> None:
    root = tmp_path / "server"
    record = image_at(root, range(5), "box:1")
    status, made = lease(server, "POST", holder="node 7", keeps=[str(record), "ab" * 32], ttl_s=60)
    assert (status, made["gone"]) == (201, ["ab" * 32])
    ask(server, "DELETE", "/v1/images/box:1")
    with ChunkStore.open(root) as store:
        assert store.refs.items() == []
    assert collect(root).removed_chunks == 0
    assert upstream.get(record)
    assert lease(server, "PUT", f"/{made['id']}", ttl_s=600)[1]["expires_at"] > made["expires_at"]
    assert lease(server, "PUT", f"/{made['id']}", keeps=[], ttl_s=60)[0] == 200
    assert collect(root).kept_chunks == 0
    assert lease(server, "DELETE", f"/{made['id']}") == (200, {"ended": True})
    assert lease(server, "DELETE", f"/{made['id']}") == (200, {"ended": False})
    assert lease(server, "PUT", f"/{made['id']}", ttl_s=60)[0] == 404
    assert lease(server, "POST", holder="late", keeps=[str(record)])[1]["gone"] == [str(record)]


def test_what_a_lease_kept_before_a_collection_is_not_told_to_go(tmp_path: Path, server: ChunkServer) -> None:
    """Between condemning and pardoning it looks as what is about to go; to a lease that comes only then, it is."""
    root = tmp_path / "server"
    kept, other = image_at(root, range(5), "box:1"), image_at(root, range(5, 9), "other:1")
    with ChunkStore.open(root) as store:
        store.refs.delete("box:1")
        store.refs.delete("other:1")
    made: dict[str, Any] = {}
    gone: list[list[str]] = []
    looks = 0

    def keep() -> list[ChunkId]:
        nonlocal looks
        looks += 1
        if looks == 2:  # all is condemned, and the leases were looked at
            for keeps in ([str(kept)], [str(kept), str(other)]):
                answer = lease(server, "PUT", f"/{made['id']}", keeps=keeps, ttl_s=60)[1]
                gone.append(answer["gone"])
        return []

    real = condemned.finish

    def finish(index: Index) -> None:
        if not made:
            made.update(lease(server, "POST", holder="node 7", keeps=[str(kept)], ttl_s=60)[1])
        real(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(condemned, "finish", finish)
        collect(root, keep=keep)
    assert (made["gone"], gone) == ([], [[], [str(other)]])
    with ChunkStore.open(root) as store:
        assert store.absent(reachable(store, kept)) == []


def test_bad_leases_are_refused(server: ChunkServer) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"holder": ""},
        {"holder": "a\nb"},
        {"holder": "x" * 201},
        {"holder": "x", "ttl_s": 0},
        {"holder": "x", "ttl_s": 1e9},
        {"holder": "x", "ttl_s": True},
        {"holder": "x", "keeps": "all"},
        {"holder": "x", "keeps": ["nonsense"]},
        {"holder": "x", "keeps": ["ab" * 32] * 4097},
    ]
    assert [lease(server, "POST", **body)[0] for body in bodies] == [400] * len(bodies)


def test_an_upload_is_kept_until_it_is_named(tmp_path: Path, server: ChunkServer, upstream: HttpUpstream) -> None:
    """Beside collections after each of its requests; and what it did not send because it was there."""
    root, chunk, other = tmp_path / "server", noise(5000, 1), noise(5000, 2)
    ids = [ChunkId.of(chunk), ChunkId.of(other)]
    upstream.upload([Frame.of(chunk)])
    with leased(upstream, "a test") as under:
        assert under.missing(ids) == ids[1:]
        assert collect(root).removed_chunks == 0
        under.upload([Frame.of(other)])
        assert collect(root).removed_chunks == 0
        assert under.missing(ids) == []
    report = collect(root)
    assert (report.removed_chunks, report.waiting_for) == (0, ("uploads without a lease",))
    server.stop()
    assert collect(root).removed_chunks == 2


class Unlucky(HttpUpstream):
    """Before it first publishes, `accident` happens."""

    accident: Callable[[], None] | None = None

    def publish(self, name: str, chunk: ChunkId, signatures: Sequence[Signature] = ()) -> None:
        accident, Unlucky.accident = Unlucky.accident, None
        if accident is not None:
            accident()
        super().publish(name, chunk, signatures)


def test_a_push_whose_lease_is_lost_sends_again(tmp_path: Path, server: ChunkServer) -> None:
    """As when a clock jumps: what it was told is there goes, its image is refused, and what is missing comes."""
    root, removed = tmp_path / "server", list[int]()
    image_at(root, range(4), "old:1")

    def lose() -> None:
        with ChunkStore.open(root) as store:
            store.refs.delete("old:1")
            for state in store.leases.live():
                store.leases.revoke(state.id)
        removed.append(collect(root).removed_chunks)

    Unlucky.accident = lose
    with ChunkStore.open(tmp_path / "client") as client, Unlucky(server.url) as upstream:
        record = build_image(client, range(6))
        name_image(client, "new:1", record)
        push_image(client, upstream, catalog.find(client, "new:1"), NoProgress())
    assert removed[0] > 6
    with ChunkStore.open(root) as store:
        assert store.missing(reachable(store, record.id)) == []
    assert check(root).errors == []


def test_everything_at_once(tmp_path: Path) -> None:
    """Clients push and read images while the store is collected all the time, names go, and server and collections are
    killed: what has a name can be read, and nothing is ever wrong."""
    root, dice = tmp_path / "server", random.Random(8)
    ends_s = time.monotonic() + 5.0
    ended, failures = threading.Event(), list[BaseException]()
    pushed = [0, 0]
    with ChunkStore.open(tmp_path / "client") as client:
        for number in range(6):
            name_image(client, f"image:{number}", build_image(client, range(number, number + 5)))
        entries = [catalog.find(client, f"image:{number}") for number in range(6)]
        server, port = chunk_server(root), 0

        def pushing(which: int) -> None:
            own = random.Random(which)
            while not ended.is_set():
                entry = entries[own.randrange(6)]
                with HttpUpstream(f"http://127.0.0.1:{port}", retry=RetryPolicy(total_s=10.0)) as upstream:
                    push_image(client, upstream, entry, NoProgress())
                    pushed[which] += 1
                    for frame in upstream.frames(list(reachable(client, entry.ref.record))):
                        if frame.header.size_bytes:
                            frame.open()

        def removing() -> None:
            own = random.Random(3)
            while not ended.wait(0.05):
                with ChunkStore.open(root) as store:
                    store.refs.delete(f"docker.io/library/image:{own.randrange(6)}")
                    store.refs.delete(f"image:{own.randrange(6)}")

        def noting(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        with server as running:
            port = running.port
            threads = [threading.Thread(target=noting, args=(lambda: pushing(0),))]
            threads += [threading.Thread(target=noting, args=(lambda: pushing(1),))]
            threads += [threading.Thread(target=noting, args=(removing,))]
            for thread in threads:
                thread.start()
            while time.monotonic() < ends_s and not failures:
                collecting = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.store_worker", "gc", str(root)],
                    stdout=subprocess.DEVNULL,
                    cwd=REPOSITORY,
                )
                if dice.random() < 0.5:
                    time.sleep(dice.uniform(0.2, 0.6))
                    collecting.kill()
                collecting.wait(60)
                whole(root)
            ended.set()
            for thread in threads:
                thread.join(60)
    assert failures == []
    assert min(pushed) > 0
    whole(root)
    assert check(root).errors == []


def whole(root: Path) -> None:
    """Every image that has a name now, and has it still when all of it was read, was whole."""
    with ChunkStore.open(root, readonly=True) as store:
        for name, ref in store.refs.items():
            try:
                for chunk in reachable(store, ref.record):
                    store.get(chunk)
            except ChunkMissingError:
                assert store.refs.get(name) != ref, name


def test_a_killed_server_loses_nothing_that_was_named(tmp_path: Path) -> None:
    root, dice = tmp_path / "server", random.Random(9)
    port = 0
    with ChunkStore.open(tmp_path / "client") as client:
        named = set()
        for number in range(4):
            record = build_image(client, range(3 * number, 3 * number + 5))
            name_image(client, f"image:{number}", record)
            entry = catalog.find(client, f"image:{number}")
            with chunk_server(root, port=port) as server:
                port = server.port
                killing = threading.Timer(dice.uniform(0.0, 0.06), server.process.kill)
                killing.start()
                try:
                    with HttpUpstream(server.url, retry=RetryPolicy(total_s=0.1)) as upstream:
                        push_image(client, upstream, entry, NoProgress())
                        named.add(entry.name)
                except (UpstreamError, NotFoundError):
                    pass
                killing.join()
            collect(root)
            with ChunkStore.open(root) as store:
                assert named <= {name for name, _ in store.refs.items()}
            whole(root)
    assert check(root).errors == []
