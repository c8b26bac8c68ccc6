"""Several servers in order, and servers that are caches of others: real ones, of which some lie, lack or are dead."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imaged.blockimage import BlockImage, read_blob
from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.errors import ChunkCorruptError, NotFoundError
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.serverconnection import VIA
from imaged.fetching.tiers import first, tiers
from imaged.fetching.upstream import HttpUpstream
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.serving.listening import accepting, base_url, listen
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.server import FAST, application
from imaged.transfer.pull import Pulled, pull_image
from imaged.transfer.snapshotpull import pull_snapshot
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.command import Host, host
from tests.support.node import convert_tree, kill_daemon, wait_for
from tests.support.parked import add_snapshot
from tests.support.ports import free_port
from tests.support.proxy import Passed, Proxy, proxy
from tests.support.synthetic import Synthetic, add_image

QUICK = RetryPolicy(total_s=1.0, first_wait_s=0.02, longest_wait_s=0.1)
NAME = "registry.test:5000/team/app:v1"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("origin")


@pytest.fixture(scope="module")
def image(home: Path) -> Synthetic:
    with ChunkStore.open(home / "store") as store:
        return add_image(store, NAME, chunks=120)


@pytest.fixture(scope="module")
def origin(home: Path, image: Synthetic) -> Iterator[ChunkServer]:
    with chunk_server(home / "store") as running:
        yield running


@pytest.fixture
def front(origin: ChunkServer) -> Iterator[Proxy]:
    """The origin, with its requests counted."""
    with proxy(origin.url) as made:
        yield made


@pytest.fixture
def dead() -> Iterator[str]:
    """The URL of a port that answers nobody, and refuses nobody either."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def as_if_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """However loaded this host is, no answer is late and no round trip long: for tests that count what is asked for.

    Else it is asked for again, or together with what lies around it, or of the next server.
    """
    for name in ("link.FIRST_HEDGE_S", "link.LEAST_HEDGE_S", "link.MOST_HEDGE_S", "link.SHORT_S", "tiers.SILENCE_S"):
        monkeypatch.setattr(f"imaged.fetching.{name}", 60.0)
    monkeypatch.setattr("imaged.fetching.link.LACK_S", 60.0)


@dataclass(frozen=True, slots=True)
class Served(ChunkServer):
    """A server on a thread of this process: a process of its own takes a second and more to start."""


@contextmanager
def serving(store: Path, *, port: int = 0, **options: Any) -> Iterator[ChunkServer]:
    """As `chunk_server`, on a thread."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    with closing(listen("127.0.0.1", port)) as listener:
        url = base_url(listener, "127.0.0.1", tls=False)

        async def serve() -> None:
            with ChunkStore.open(store) as opened:
                app_of = application(opened, ServeOptions(store=str(store), **options))
                async with app_of as app, accepting(app, listener, app[FAST], None):
                    ready.set()
                    await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            assert ready.wait(30)
            yield Served(url, None)  # type: ignore[arg-type]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)
            loop.close()


@contextmanager
def fetching(directory: Path, *urls: str) -> Iterator[Fetcher]:
    with ChunkStore.open(directory) as store:
        fetcher = Fetcher(store, [HttpUpstream(url) for url in urls])
        try:
            yield fetcher
        finally:
            fetcher.close()


def pull(fetcher: Fetcher, name: str = NAME, *, lazy: bool = True, tally: Tally | None = None) -> Pulled:
    last = fetcher.upstreams[-1].url

    def attempt(upstream: HttpUpstream) -> Pulled:
        return pull_image(fetcher, upstream, name, lazy=lazy, tally=tally, last=last)

    return first(tiers(fetcher.upstreams, QUICK), attempt)


def read_all(fetcher: Fetcher, image: Synthetic, tally: Tally | None = None) -> None:
    reader = fetcher.reader(image.record.data, tally or Tally())
    data = BlockImage.open(reader, image.record.data)
    step = 256 << 10
    for offset in range(0, data.size_bytes, step):
        assert data.read(offset, step) == image.data[offset : offset + step]
    assert read_blob(reader, image.record.metadata) == image.metadata


def asked(front: Proxy) -> Counter[ChunkId]:
    """The chunks that somebody asked this server for, and how often."""
    found: Counter[ChunkId] = Counter()
    for request in list(front.requests):
        if request.path == "/v1/chunks/batch":
            found.update(ChunkId(raw) for raw in request.ids)
        elif request.path.startswith("/v1/chunks/"):
            found[ChunkId.parse(request.path.rpartition("/")[2])] += 1
    return found


def lie(request: Passed, sent_bytes: int, block: bytes) -> bytes:
    return block[:-1] + bytes([block[-1] ^ 1]) if "/v1/chunks" in request.path else block


# Tiers


def test_a_chain_of_which_one_lies_one_is_dead_and_one_lacks(
    origin: ChunkServer,
    front: Proxy,
    image: Synthetic,
    dead: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    as_if_quick: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FIRST_HEDGE_S", "LEAST_HEDGE_S", "MOST_HEDGE_S"):
        monkeypatch.setattr(f"imaged.fetching.link.{name}", 3.0)  # as late is the dead one, and no other
    monkeypatch.setattr("imaged.fetching.link.REST_S", 60.0)
    monkeypatch.setattr("imaged.fetching.tiers.SILENCE_S", 1.0)
    with ExitStack() as stack:
        liar = stack.enter_context(proxy(origin.url))
        liar.body = lie
        with ChunkStore.open(tmp_path / "peer"):
            pass
        peer = stack.enter_context(proxy(stack.enter_context(serving(tmp_path / "peer")).url))
        rack = stack.enter_context(serving(tmp_path / "rack", upstreams=(front.url,)))
        fetcher = stack.enter_context(fetching(tmp_path / "own", liar.url, dead, peer.url, rack.url, origin.url))
        tally = Tally()
        assert pull(fetcher, tally=tally).id == image.id
        read_all(fetcher, image, tally)
        fetcher.drain()
        assert [record for record in caplog.records if liar.url in record.message and "lies" in record.message]
        # Each of the first three was asked now and then, the rack for nearly everything, and the origin through it.
        counts = tally.to_dict()
        assert len(liar.requests) <= 4
        assert len(peer.requests) <= 4
        assert sum(asked(front).values()) >= 100
        assert max(asked(front).values()) == 1
        assert counts["fetched_chunks"] >= 120
    assert check(tmp_path / "own").errors == []


def test_all_servers_lie(origin: ChunkServer, image: Synthetic, tmp_path: Path) -> None:
    with proxy(origin.url) as one, proxy(origin.url) as other, fetching(tmp_path, one.url, other.url) as fetcher:
        pull(fetcher)
        one.body = other.body = lie
        chunk = next(BlockImage.open(fetcher.reader(image.record.data, Tally()), image.record.data).chunk_ids())
        with pytest.raises(ChunkCorruptError):
            fetcher.get(chunk, Tally())
        one.body = lambda request, sent_bytes, block: block
        assert ChunkId.of(fetcher.get(chunk, Tally())) == chunk  # the liar is asked last, and has reformed


def test_a_name_is_that_of_the_first_server_that_has_it(
    origin: ChunkServer, image: Synthetic, dead: str, tmp_path: Path
) -> None:
    with ChunkStore.open(tmp_path / "peer") as store:
        own = add_image(store, "own:1", seed=7, chunks=3)
    with serving(tmp_path / "peer") as peer, fetching(tmp_path / "own", dead, peer.url, origin.url) as fetcher:
        assert pull(fetcher, "own:1").id == own.id
        assert pull(fetcher).id == image.id
        with pytest.raises(NotFoundError, match="asked before, did not answer"):
            pull(fetcher, "nowhere:1")
        fetcher.drain()
        read_all(fetcher, own)
        origins = {name: ref.origin for name, ref in fetcher.store.refs.items()}
        assert origins == {"own:1": peer.url, NAME: origin.url}


def test_a_peer_that_has_it_in_part_gives_that_and_is_not_the_origin(
    origin: ChunkServer, front: Proxy, image: Synthetic, tmp_path: Path, as_if_quick: None
) -> None:
    with fetching(tmp_path / "peer", origin.url) as fetcher:
        pull(fetcher)
        reader = fetcher.reader(image.record.data, Tally())
        size = len(image.data) // 2
        assert BlockImage.open(reader, image.record.data).read(0, size) == image.data[:size]
        fetcher.drain()
    with serving(tmp_path / "peer") as peer, fetching(tmp_path / "own", peer.url, front.url) as fetcher:
        document = json.loads(ask(peer, "GET", f"/v1/images/{NAME}")[2])
        assert document["complete"] is False
        pull(fetcher)
        read_all(fetcher, image)
        fetcher.drain()
        ref = fetcher.store.refs.get(NAME)
        assert ref is not None and ref.origin == front.url
        # Half of it came from the peer, and no name was asked of the origin.
        assert 30 <= len(asked(front)) <= 100
        assert not any("images" in path for path in front.paths())
    # A peer that has lost a part of what a start needs is as one that has nothing.
    with ChunkStore.open(tmp_path / "peer") as store:
        store.index.drop([(image.record.metadata, store.index.find(image.record.metadata))], forget_memos=False)  # type: ignore[list-item]
    with serving(tmp_path / "peer") as peer, fetching(tmp_path / "third", peer.url, origin.url) as fetcher:
        assert ask(peer, "GET", f"/v1/images/{NAME}?view=boot")[0] == 404
        assert pull(fetcher).id == image.id


def test_what_one_server_lacks_costs_one_request(
    origin: ChunkServer, front: Proxy, image: Synthetic, tmp_path: Path, as_if_quick: None
) -> None:
    with ChunkStore.open(tmp_path / "peer"):
        pass
    counts = {}
    for number, tiered in enumerate((False, True)):
        with serving(tmp_path / "peer") as server, proxy(server.url) as peer:
            urls = [peer.url] * tiered + [origin.url]
            with fetching(tmp_path / f"own{number}", *urls) as fetcher:
                tally = Tally()
                pull(fetcher, tally=tally)
                read_all(fetcher, image, tally)
                counts[tiered] = tally.to_dict()["requests"]
                assert len(peer.requests) <= 3
    assert counts[True] <= counts[False] + 4


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse")
def test_commands_take_several_servers(dead: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(os.urandom(300_000))
    convert_tree(tmp_path / "origin", tree, "app:1")
    with (
        chunk_server(tmp_path / "origin") as server,
        serving(tmp_path / "rack", upstreams=(server.url,)) as rack,
        host(tmp_path / "worker", f"{dead}, {rack.url}/,{server.url}") as worker,
    ):
        try:
            _reads_through(worker, tree)
            assert worker.json("node", "status")["server"] == f"{dead},{rack.url},{server.url}"
            # What is written goes to the last.
            worker.run("convert", f"dir:{tree}", "--name", "mine:1")
            assert [found["name"] for found in worker.json("image", "ls", "--remote")] == ["app:1", "mine:1"]
            assert ask(server, "GET", "/v1/images/mine:1")[0] == 200
        finally:
            kill_daemon_of(worker)
    bad = Host(tmp_path / "other", "http://good,ftp://bad")
    assert "'ftp://bad' is not an http:// or https:// URL" in bad.error("pull", "x:1", code=2)


def _reads_through(worker: Host, tree: Path) -> None:
    directory = worker.root / "mnt"
    directory.mkdir(parents=True)
    worker.run("mount", "app:1", str(directory))
    assert (directory / "file").read_bytes() == (tree / "file").read_bytes()
    worker.run("umount", str(directory))


def kill_daemon_of(worker: Host) -> None:
    kill_daemon(Config(home=worker.root / "home", run=worker.root / "run"))


# Caches of other servers


def test_twenty_clients_fetch_each_chunk_once(
    front: Proxy, image: Synthetic, tmp_path: Path, as_if_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaged.serving.through._FRESH_S", 60.0)  # longer than the twenty take
    with serving(tmp_path / "rack", upstreams=(front.url,)) as rack:
        start = threading.Barrier(20)

        def client(number: int) -> None:
            with fetching(tmp_path / f"client{number}", rack.url) as fetcher:
                start.wait()
                assert pull(fetcher).id == image.id
                read_all(fetcher, image)

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(client, range(20)))
        found = asked(front)
        with ChunkStore.open(tmp_path / "rack", readonly=True) as store:
            wait_for(lambda: store.absent(reachable(store, image.id)) == [])
        assert set(found.values()) == {1}
        assert len([path for path in front.paths() if "images" in path]) <= 2
        status, _, metrics = ask(rack, "GET", "/metrics")
        assert status == 200 and b"pvisor_cache" in metrics
    assert check(tmp_path / "rack").errors == []


def test_a_cache_whose_upstream_is_down(
    front: Proxy, home: Path, image: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imaged.fetching.link.SHORT_S", 60.0)  # nothing is taken along, however slow this host is
    with chunk_server(home / "store") as upstream:
        port = upstream.port
        with serving(tmp_path / "rack", upstreams=(upstream.url,)) as rack:
            with fetching(tmp_path / "first", rack.url) as fetcher:
                pull(fetcher)
                reader = fetcher.reader(image.record.data, Tally())
                chunks = list(BlockImage.open(reader, image.record.data).chunk_ids())
                fetcher.get_many(chunks[:40], Tally())
            upstream.stop()
            with fetching(tmp_path / "second", rack.url) as fetcher:
                pull(fetcher)  # it means what it meant last
                assert len(fetcher.get_many(chunks[:40], Tally())) == 40
            status, _, body = ask(rack, "GET", f"/v1/chunks/{chunks[50]}")
            assert status == 502
            assert upstream.url in json.loads(body)["error"]
            status, _, body = ask(rack, "GET", "/v1/images/other:1")
            assert status == 502 and upstream.url in json.loads(body)["error"]
            with serving(home / "store", port=port):
                # For a second it is not asked for again what was just waited for in vain.
                wait_for(lambda: ask(rack, "GET", f"/v1/chunks/{chunks[50]}")[0] == 200)
                assert ask(rack, "GET", "/v1/images/other:1")[0] == 404


def test_a_bounded_cache_keeps_its_bound(origin: ChunkServer, home: Path, tmp_path: Path) -> None:
    with ChunkStore.open(home / "store") as store:
        large = add_image(store, "large:1", seed=9, chunks=700)  # 22 MiB
    bound = 16 << 20
    with serving(tmp_path / "rack", upstreams=(origin.url,), cache_max_bytes=bound) as rack:
        for number in range(2):
            with fetching(tmp_path / f"own{number}", rack.url) as fetcher:
                pull(fetcher, "large:1")
                read_all(fetcher, large)
            assert disk_bytes(tmp_path / "rack/packs") <= bound + (2 << 20)
    assert check(tmp_path / "rack").errors == []
    with ChunkStore.open(tmp_path / "rack", readonly=True) as store:
        assert len(store.absent(reachable(store, large.id))) > 100


def disk_bytes(directory: Path) -> int:
    """What its files take, while some of them go."""
    used = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


def test_snapshots_and_profiles_come_through(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "origin") as store:
        image = add_image(store, "app:1", chunks=8)
        parked = add_snapshot(store, "one", image.id)
    with (
        serving(tmp_path / "origin") as origin,
        serving(tmp_path / "rack", upstreams=(origin.url,)) as rack,
        fetching(tmp_path / "own", rack.url) as fetcher,
    ):
        upstream = fetcher.upstreams[0]
        pulled = pull_snapshot(fetcher, upstream, "one", lazy=True)
        assert pulled.id == parked.id
        memory = BlockImage.open(fetcher.reader(parked.record.memory, Tally()), parked.record.memory)
        assert memory.read(0, 4 << 20) == parked.memory[: 4 << 20]
        assert [found.name for found in upstream.snapshots()] == ["one"]
        # What a run has touched is told to who else asks, here and there.
        pull(fetcher, "app:1")
        data = BlockImage.open(fetcher.reader(image.record.data, Tally()), image.record.data)
        upstream.merge_profile(image.id, data.way(0, 100_000))
        assert upstream.profile(image.id) is not None
        with HttpUpstream(origin.url) as there:
            wait_for(lambda: there.profile(image.id) is not None)


def test_what_a_client_keeps_at_a_cache_is_kept_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imaged.serving.passedleases.LOOK_S", 0.05)
    with ChunkStore.open(tmp_path / "origin") as store:
        image = add_image(store, "app:1", chunks=8)
        with (
            serving(tmp_path / "origin") as origin,
            serving(tmp_path / "rack", upstreams=(origin.url,)) as rack,
            fetching(tmp_path / "own", rack.url) as fetcher,
        ):
            pull(fetcher, "app:1")
            lease = fetcher.upstreams[0].new_lease("a node", keeps=[image.id], ttl_s=60.0)

            def kept() -> list[ChunkId]:
                return [record for state in store.leases.live() for record in state.keeps]

            wait_for(lambda: kept() == [image.id])
            fetcher.upstreams[0].end_lease(lease)
            wait_for(lambda: kept() == [])


def test_caches_of_each_other_end_with_an_error(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    paths = [f"/v1/chunks/{ChunkId.of(b'nowhere')}", "/v1/images/nowhere:1", "/v1/snapshots/nowhere"]
    with (
        serving(tmp_path / "a", port=ports[0], upstreams=(urls[1],)) as a,
        serving(tmp_path / "b", port=ports[1], upstreams=(urls[0],)) as b,
        ThreadPoolExecutor(12) as pool,
    ):
        # At the same time from both sides, so that each waits for what the other is about to ask for.
        questions = [(server, path) for path in paths for server in (a, b) for _ in range(2)]
        began = time.monotonic()
        answers = list(pool.map(lambda question: ask(question[0], "GET", question[1]), questions))
        assert {status for status, _, _ in answers} <= {404, 502, 508}
        assert time.monotonic() - began < 15
        for path in paths:
            status, _, body = ask(a, "GET", path, **{VIA: "1,2,3,4,5,6,7,8"})
            assert status == 508 and "caches of each other" in json.loads(body)["error"]


def test_caches_of_each_other_that_also_ask_an_origin(
    origin: ChunkServer, front: Proxy, image: Synthetic, tmp_path: Path
) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with (
        serving(tmp_path / "a", port=ports[0], upstreams=(urls[1], front.url)) as a,
        serving(tmp_path / "b", port=ports[1], upstreams=(urls[0], front.url)) as b,
        ThreadPoolExecutor(2) as pool,
    ):

        def client(server: ChunkServer) -> None:
            with fetching(tmp_path / f"client{server.port}", server.url) as fetcher:
                assert pull(fetcher).id == image.id
                read_all(fetcher, image)

        list(pool.map(client, (a, b)))
