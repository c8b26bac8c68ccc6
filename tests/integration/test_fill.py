"""Fills: a lazily pulled image becomes complete behind the back of what runs in it, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cli.progress import ProgressLine
from fuse import node, rundir
from imaged import catalog
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.ids import ChunkId
from imaged.reach import reachable
from tests.support.chunkserver import ChunkServer, chunk_server
from tests.support.command import Host, host
from tests.support.node import convert_tree, kill_daemon, wait_for
from tests.support.proxy import Passed, Proxy, proxy

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"),
]
FILES = 12
FILE_BYTES = 700_123
WIRE_BYTES = FILES * FILE_BYTES
"""They do not compress."""
GROUP = 8
FAST = ("--fill-rate", "1000")
SLOW = ("--fill-rate", "0.3")
"""MiB a second: on a slow host, too, some commands run before it is done."""


@cache
def content(number: int) -> bytes:
    return random.Random(number).randbytes(FILE_BYTES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for number in range(FILES):
        (root / f"file{number:02}").write_bytes(content(number))
    return root


@pytest.fixture
def server(tree: Path, tmp_path: Path) -> Iterator[ChunkServer]:
    convert_tree(tmp_path / "server/home/store", tree, "app:1")
    with chunk_server(tmp_path / "server/home/store") as running:
        yield running


@pytest.fixture
def front(server: ChunkServer) -> Iterator[Proxy]:
    with proxy(server.url) as made:
        yield made


@pytest.fixture
def worker(tmp_path: Path, front: Proxy) -> Iterator[Host]:
    """A host that has nothing."""
    with host(tmp_path / "worker", front.url) as made:
        try:
            yield made
        finally:
            subprocess.run(["umount", "-l", str(made.root / "mnt")], check=False, capture_output=True)


def config_of(worker: Host) -> Config:
    return Config(home=worker.root / "home", run=worker.root / "run", server=worker.server)


def fill_of(worker: Host) -> dict[str, Any]:
    """The one that the daemon knows."""
    found: dict[str, Any]
    (found,) = node.Node(config_of(worker)).status()["fills"].values()
    return found


def expect(worker: Host, state: str, wait_s: float = 60.0) -> dict[str, Any]:
    """The fill when it was seen in this state: a moment later it may be in another."""
    found: dict[str, Any] = {}

    def is_there() -> bool:
        found.update(fill_of(worker))
        return bool(found["state"] == state)

    wait_for(is_there, wait_s)
    return found


def hasten(worker: Host) -> None:
    """Wish for the same once more, at a rate that is no bound."""
    node.Node(config_of(worker)).fill(image_of(worker), bytes_per_s=1 << 30)


def image_of(worker: Host) -> str:
    (image,) = node.Node(config_of(worker)).status()["fills"]
    return str(image)


def is_under_way(worker: Host) -> bool:
    """Whether a good part has come, and a good part has not."""
    fill = fill_of(worker)
    return bool(2 * GROUP < fill["present_chunks"] < fill["chunks"] - 4 * GROUP)


def read_all(worker: Host) -> None:
    """Each file of the image has the right bytes."""
    directory = worker.root / "mnt"
    directory.mkdir(exist_ok=True)
    worker.run("mount", "app:1", str(directory))
    for number in range(FILES):
        assert (directory / f"file{number:02}").read_bytes() == content(number), number
    worker.run("umount", str(directory))


def asked(front: Proxy) -> Counter[ChunkId]:
    """The chunks that went through the proxy because somebody asked for them, and how often."""
    found: Counter[ChunkId] = Counter()
    for request in list(front.requests):
        if request.path == "/v1/chunks/batch":
            found.update(ChunkId(raw) for raw in request.ids)
        elif request.path.startswith("/v1/chunks/"):
            found[ChunkId.parse(request.path.rpartition("/")[2])] += 1
    return found


def chunks_here(worker: Host) -> set[ChunkId]:
    with ChunkStore.open(worker.root / "home/store", readonly=True) as store:
        return {chunk for chunk, _ in store.index.chunks()}


def all_chunks(server_store: Path) -> set[ChunkId]:
    with ChunkStore.open(server_store, readonly=True) as store:
        return set(reachable(store, catalog.find(store, "app:1").ref.record))


def test_a_filled_image_needs_no_server(worker: Host, front: Proxy, server: ChunkServer, tmp_path: Path) -> None:
    pulled = worker.json("pull", "--lazy", "--fill", *SLOW, "app:1")
    assert (pulled["filling"], pulled["requests"]) == (True, 1)
    (listed,) = worker.json("image", "ls")
    assert (listed["complete"], listed["filling"]) == (False, True)
    assert b"filling" in worker.run("image", "ls").stdout
    wait_for(lambda: is_under_way(worker))
    shown = worker.json("image", "inspect", "app:1")
    assert shown["present_chunks"] < shown["chunks"]
    assert b" of %d " % shown["chunks"] in worker.run("node", "status").stdout
    hasten(worker)
    filled = expect(worker, "complete")
    assert (
        filled["present_chunks"]
        == filled["chunks"]
        == shown["chunks"]
        == len(all_chunks(tmp_path / "server/home/store"))
    )
    assert WIRE_BYTES < filled["fetched_bytes"] < 1.1 * WIRE_BYTES
    assert set(asked(front).values()) == {1}
    server.stop()
    shown = worker.json("image", "inspect", "app:1")
    assert (shown["origin"], shown["complete"], shown["filling"]) == ("", True, False)
    assert shown["present_chunks"] == shown["chunks"]
    (listed,) = worker.json("image", "ls")
    assert (listed["complete"], listed["filling"]) == (True, False)
    read_all(worker)
    worker.run("node", "stop")
    worker.assert_sound()
    read_all(worker)
    assert node.Node(config_of(worker)).status()["fills"] == {}


def test_the_pull_returns_while_nothing_was_filled_yet(worker: Host, front: Proxy) -> None:
    go_on = threading.Event()

    def body(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if request.path.startswith("/v1/chunks"):
            go_on.wait(60)
        return block

    front.body = body
    worker.run("pull", "--lazy", "--fill", *FAST, "app:1")
    assert not go_on.is_set()
    assert fill_of(worker)["state"] in ("waiting", "filling")
    go_on.set()
    expect(worker, "complete")
    read_all(worker)


def test_the_rate_is_a_bound(worker: Host, front: Proxy) -> None:
    started_s = time.monotonic()
    worker.run("pull", "--lazy", "--fill", "--fill-rate", "4", "app:1")
    filled = expect(worker, "complete")
    # A request is accounted for when it has come, and its bytes are the last ones not waited for.
    assert time.monotonic() - started_s >= (filled["fetched_bytes"] - (1 << 20)) / (4 << 20)
    assert all(len(request.ids) <= GROUP for request in front.requests)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_next_daemon_goes_on(worker: Host, front: Proxy, end: str) -> None:
    worker.run("pull", "--lazy", "--fill", *SLOW, "app:1")
    wait_for(lambda: is_under_way(worker))
    if end == "stop":
        worker.run("node", "stop")
    else:
        before = chunks_here(worker)
        wait_for(lambda: chunks_here(worker) > before)  # committed, not only written
        kill_daemon(config_of(worker))
    held = chunks_here(worker)
    first = asked(front)
    assert 0 < len(first) < WIRE_BYTES // (32 << 10)
    front.requests.clear()
    worker.run("node", "start")
    wait_for(lambda: asked(front))  # without being told
    hasten(worker)
    expect(worker, "complete")
    assert held & set(asked(front)) == set()
    assert worker.json("image", "inspect", "app:1")["complete"]
    read_all(worker)


def test_a_read_does_not_wait_for_what_a_fill_is_fetching(worker: Host, front: Proxy) -> None:
    """The fill's first large answer stands still; the same chunks are read meanwhile."""
    go_on, held = threading.Event(), list[Passed]()

    def body(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if len(request.ids) == GROUP and (not held or held[0] is request):
            held[:] = [request]
            go_on.wait(60)
        return block

    front.body = body
    worker.run("pull", "--lazy", "--fill", *FAST, "app:1")
    wait_for(lambda: held)
    stuck = {ChunkId(raw) for raw in held[0].ids}
    with contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        read_all(worker)
        assert not go_on.is_set()
        assert fill_of(worker)["fetched_chunks"] < GROUP
        again = {chunk for chunk, count in asked(front).items() if count > 1}
        assert stuck <= again, "the reads ask for what the fill has asked for"
    expect(worker, "complete")
    counters = node.Node(config_of(worker)).status()
    (image,) = counters["images"].values()
    assert image["fetched_bytes"] > WIRE_BYTES, "the reads brought nearly everything by themselves"


def test_a_server_that_is_away_is_asked_again(worker: Host, front: Proxy) -> None:
    is_away = threading.Event()

    def body(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if is_away.is_set():
            raise ConnectionAbortedError("away")
        return block

    front.body = body
    worker.run("pull", "--lazy", "--fill", *SLOW, "app:1")
    wait_for(lambda: is_under_way(worker))
    is_away.set()
    away = expect(worker, "retrying")
    assert front.url in away["error"]
    requests = len(front.requests)
    wait_for(lambda: len(front.requests) > requests)
    wait_for(lambda: b"retrying" in worker.run("node", "status").stdout)  # not while it is being tried
    is_away.clear()
    wait_for(lambda: fill_of(worker)["state"] == "filling", 60)
    hasten(worker)
    filled = expect(worker, "complete")
    assert filled["error"] == ""
    read_all(worker)
    lines = rundir.log_path(config_of(worker)).read_text().splitlines()
    assert len([line for line in lines if "fuse.fill" in line]) == 2, "one says that it retries, one that it is done"


def test_a_server_that_lacks_a_chunk_is_asked_for_the_rest(
    worker: Host, front: Proxy, server: ChunkServer, tmp_path: Path
) -> None:
    store_path = tmp_path / "server/home/store"
    worker.run("pull", "--lazy", "app:1")
    lost = sorted(all_chunks(store_path) - chunks_here(worker))[0]
    with ChunkStore.open(store_path) as store:
        kept = store.get(lost)
        place = store.index.find(lost)
        assert place is not None
        store.index.drop([(lost, place)], forget_memos=False)
    worker.run("pull", "--lazy", "--fill", *FAST, "app:1")
    stuck = expect(worker, "retrying")
    assert str(lost) in stuck["error"]
    assert stuck["present_chunks"] == stuck["chunks"] - 1
    assert not worker.json("image", "inspect", "app:1")["complete"]
    with ChunkStore.open(store_path) as store:
        store.put(kept)
    expect(worker, "complete")
    read_all(worker)


def test_a_full_disk_stops_a_fill_and_no_read(worker: Host, front: Proxy) -> None:
    home = worker.root / "home"
    home.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(home)], check=True)
    try:
        worker.run("pull", "--lazy", "--fill", *FAST, "app:1")
        full = expect(worker, "stopped")
        assert "nearly full" in full["error"]
        read_all(worker)
        assert b"stopped" in worker.run("node", "status").stdout
        assert fill_of(worker)["state"] == "stopped"
        log = rundir.log_path(config_of(worker)).read_text().splitlines()
        assert len([line for line in log if "fuse.fill" in line]) == 1
        (listed,) = worker.json("image", "ls")
        assert (listed["complete"], listed["filling"]) == (False, True)
        subprocess.run(["mount", "-o", "remount,size=64m", str(home)], check=True)
        worker.run("pull", "--lazy", "--fill", *FAST, "app:1")
        expect(worker, "complete")
        read_all(worker)
        worker.run("node", "stop")
        worker.assert_sound()
    finally:
        kill_daemon(config_of(worker))
        subprocess.run(["umount", "-l", str(home)], check=False)


def test_a_name_that_is_removed_is_not_filled(worker: Host, front: Proxy) -> None:
    worker.run("pull", "--lazy", "--fill", *SLOW, "app:1")
    wait_for(lambda: is_under_way(worker))
    worker.run("image", "tag", "app:1", "other:1")
    worker.run("image", "rm", "app:1")
    assert worker.json("image", "inspect", "other:1")["filling"]
    worker.run("image", "rm", "other:1")
    wait_for(lambda: not node.Node(config_of(worker)).status()["fills"])
    worker.run("pull", "--lazy", "app:1")
    assert not worker.json("image", "inspect", "app:1")["filling"]


def test_a_rate_may_be_changed_on_the_way(worker: Host, front: Proxy) -> None:
    worker.run("pull", "--lazy", "--fill", "--fill-rate", "0.01", "app:1")
    wait_for(lambda: fill_of(worker)["present_chunks"] > 0)
    worker.run("pull", "--lazy", "--fill", *FAST, "app:1")
    expect(worker, "complete")
    assert set(asked(front).values()) == {1}


def test_an_image_that_is_complete_is_filled_at_once(worker: Host, front: Proxy) -> None:
    worker.run("pull", "app:1")
    front.requests.clear()
    worker.run("pull", "--lazy", "--fill", "app:1")
    expect(worker, "complete")
    assert asked(front) == {}
    assert worker.json("image", "inspect", "app:1")["complete"]


def test_fill_goes_with_lazy(worker: Host) -> None:
    assert "--fill goes with --lazy" in worker.error("pull", "--fill", "app:1", code=2)
    for rate in ("0", "nan", "inf", "-inf", "1e308", "fast", ""):
        said = worker.error("pull", "--lazy", "--fill", f"--fill-rate={rate}", "app:1", code=2)
        assert "--fill-rate" in said
        assert f"{rate!r} is not a number of MiB a second" in said


# Without --lazy


def cut_after(count: int) -> Callable[[Passed, int, bytes], bytes]:
    """Answers end once so many bytes of chunks went through."""
    room = count

    def body(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        nonlocal room
        if request.path.startswith("/v1/chunks"):
            room -= len(block)
            if room < 0:
                raise ConnectionAbortedError("cut")
        return block

    return body


def test_a_complete_pull_needs_no_daemon_and_goes_on_where_one_failed(worker: Host, front: Proxy) -> None:
    front.body = cut_after(WIRE_BYTES // 2)
    assert front.url in worker.error("pull", "app:1")
    held = chunks_here(worker)
    assert len(held) * (32 << 10) > WIRE_BYTES // 4
    front.requests.clear()
    front.body = Proxy("").body
    worker.run("pull", "app:1")
    assert asked(front)
    assert set(asked(front)) & held == set()
    assert node.connect(config_of(worker)) is None
    assert worker.json("image", "inspect", "app:1")["complete"]
    read_all(worker)


def test_a_complete_pull_ends_a_fill(worker: Host, front: Proxy) -> None:
    worker.run("pull", "--lazy", "--fill", "--fill-rate", "0.1", "app:1")
    wait_for(lambda: fill_of(worker)["present_chunks"] > 0)
    worker.run("pull", "app:1")
    shown = worker.json("image", "inspect", "app:1")
    assert (shown["complete"], shown["filling"]) == (True, False)
    worker.run("node", "stop")
    worker.run("node", "start")
    assert node.Node(config_of(worker)).status()["fills"] == {}


def test_a_complete_pull_shows_how_far_it_is(worker: Host, front: Proxy) -> None:
    def slowly(request: Passed, sent_bytes: int, block: bytes) -> bytes:
        if request.ids and sent_bytes % (1 << 20) < 1 << 16:
            time.sleep(ProgressLine.INTERVAL_S)
        return block

    front.body = slowly
    terminal, end = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        pull = worker.start("pull", "app:1", stderr=end)
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # EIO is the end of a terminal
            while block := screen.read(1 << 16):
                shown += block
        assert pull.wait(60) == 0
    assert re.search(rb"fetching \d+ of \d+ chunks +\[#+ +\] [2-6]\.\d MiB of \d\.\d MiB", shown), shown
