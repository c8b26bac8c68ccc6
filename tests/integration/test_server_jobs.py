"""Jobs of real servers: one conversion for many clients, seen, cancelled and taken up again by whoever serves the
store, and the commands that tell of it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.errors import NotFoundError, UpstreamError
from imaged.fetching.remote import Job
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.names import ImageName, SourceName
from imaged.transfer.serverjob import ConvertedThere, convert_there
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.command import Host
from tests.support.heldregistry import LAYER_BYTES, HeldRegistry, held_registry
from tests.support.parked import add_snapshot
from tests.support.synthetic import add_image

pytestmark = pytest.mark.network
QUICK = RetryPolicy(total_s=5.0, first_wait_s=0.02, longest_wait_s=0.1)
_WAIT_S = 40.0


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[HeldRegistry]:
    with held_registry(tmp_path, (".wh..wh.aufs", b"bookkeeping")) as held:
        yield held


def until(look: Callable[[], Job], wanted: Callable[[Job], bool]) -> Job:
    deadline = time.monotonic() + _WAIT_S
    while not wanted(job := look()):
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
    return job


def halfway(job: Job) -> bool:
    return int(job.progress.get("done_bytes") or 0) >= LAYER_BYTES // 4


def workers_of(store: Path) -> list[str]:
    """Processes of jobs of this store."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"--store={store}" in argv:
            found.append(process.name)
    return found


def test_fifty_clients_of_two_servers_convert_once(tmp_path: Path, registry: HeldRegistry) -> None:
    with chunk_server(tmp_path / "store") as one, chunk_server(tmp_path / "store", workers=2) as other:
        found: list[tuple[str, str]] = []
        joined = threading.Semaphore(0)

        class Asking(HttpUpstream):
            def convert(self, *arguments: Any, **options: Any) -> Job:
                job = super().convert(*arguments, **options)
                joined.release()
                return job

        def client(server: ChunkServer) -> None:
            with Asking(server.url, retry=QUICK) as upstream:
                source = SourceName.parse(registry.source)
                done = convert_there(
                    upstream, source, name=ImageName.parse("app:v1"), platform=None, progress=_Silent()
                )
                found.append((done.job, str(done.id)))

        clients = [threading.Thread(target=client, args=((one, other)[number % 2],)) for number in range(50)]
        for thread in clients:
            thread.start()
        with HttpUpstream(other.url, retry=QUICK) as upstream:
            until(lambda: _only(upstream), halfway)
        assert all(joined.acquire(timeout=_WAIT_S) for _ in clients)  # none comes when the job has ended
        registry.go.set()
        for thread in clients:
            thread.join(_WAIT_S)
        assert len(found) == 50
        assert len(set(found)) == 1
        assert registry.asked == 1


class _Silent:
    def start(self, step: str, total_bytes: int | None) -> None: ...

    def advance(self, byte_count: int) -> None: ...


def _only(upstream: HttpUpstream) -> Job:
    found = [Job.parse(document) for document in upstream.jobs()]
    assert len(found) <= 1
    return found[0] if found else Job(id="", state="", source="", progress={})


def test_a_job_is_seen_and_cancelled_through_another_server(tmp_path: Path, registry: HeldRegistry) -> None:
    store = tmp_path / "store"
    with chunk_server(store) as one, chunk_server(store) as other:
        asking, watching = HttpUpstream(one.url, retry=QUICK), HttpUpstream(other.url, retry=QUICK)
        job = asking.convert(registry.source, name="app:v1")
        seen = until(lambda: watching.job(job.id), halfway)
        assert seen.state == "running"
        assert seen.progress["total_bytes"] >= LAYER_BYTES
        assert workers_of(store)
        cancelled = watching.cancel_job(job.id)
        assert (cancelled["state"], cancelled["starts"]) == ("cancelled", 1)
        assert workers_of(store) == []
        for upstream in (asking, watching):
            assert upstream.job(job.id).state == "cancelled"
            assert upstream.cancel_job(job.id)["state"] == "cancelled"
            with pytest.raises(NotFoundError):
                upstream.image("app:v1")
        registry.go.set()
        again = asking.convert(registry.source, name="app:v1")
        assert again.id != job.id
        done = until(lambda: watching.job(again.id), lambda found: found.finished)
        assert done.state == "done"
        with pytest.raises(UpstreamError, match="ended already: done"):
            watching.cancel_job(again.id)
        for upstream in (asking, watching):
            upstream.close()


@pytest.mark.parametrize(("number", "starts"), [(signal.SIGKILL, 2), (signal.SIGTERM, 1)])
def test_the_next_server_goes_on(tmp_path: Path, registry: HeldRegistry, number: signal.Signals, starts: int) -> None:
    store = tmp_path / "store"
    found: list[ConvertedThere] = []
    with chunk_server(store) as server, HttpUpstream(server.url, retry=QUICK) as upstream:
        port = server.port

        def follow() -> None:
            source, name = SourceName.parse(registry.source), ImageName.parse("app:v1")
            found.append(convert_there(upstream, source, name=name, platform=None, progress=_Silent()))

        client = threading.Thread(target=follow)
        client.start()
        until(lambda: _only(upstream), halfway)
        server.stop(number)
    registry.go.set()
    with chunk_server(store, port=port) as server, HttpUpstream(server.url, retry=QUICK) as upstream:
        client.join(_WAIT_S)
        (done,) = found
        assert (done.name, len(done.warnings)) == ("app:v1", 1)
        assert upstream.image("app:v1").id == done.id
        job = upstream.job_document(done.job)
        assert (job["state"], job["starts"]) == ("done", starts)
        (listed,) = upstream.jobs()
        assert listed["image"] == {"name": "app:v1", "id": str(done.id), "warning_count": 1}


def test_names_are_removed_and_collected_at_the_server(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        image = add_image(store, "gone:v1", seed=3, chunks=30)
        kept = add_image(store, "kept:v1", seed=4, chunks=3)
        add_snapshot(store, "parked", kept.id)
    with chunk_server(tmp_path / "store") as server, HttpUpstream(server.url, retry=QUICK) as upstream:
        host = Host(tmp_path / "host", server.url)
        assert host.json("image", "rm", "gone:v1", "--remote") == {"removed": ["gone:v1"]}
        assert host.json("snapshot", "rm", "parked", "--server", server.url) == {"removed": ["parked"]}
        assert "no image gone:v1" in host.error("image", "rm", "gone:v1", "--remote")
        assert "no snapshot parked" in host.error("snapshot", "rm", "parked", "--remote")
        assert "--store" in host.error("image", "rm", "x", "--remote", "--store", str(tmp_path / "store"), code=2)
        status, headers, body = ask(server, "POST", "/v1/gc", b"")
        assert status == 202
        job = upstream.job(json.loads(body)["job"])
        assert headers["location"] == f"/v1/jobs/{job.id}"
        done = until(lambda: upstream.job(job.id), lambda found: found.finished)
        assert (done.state, done.kind, done.error) == ("done", "gc", "")
        assert done.report is not None
        assert done.report["removed_chunks"] > 30
        assert upstream.missing([image.id, kept.id]) == [image.id]
        assert "freed" in host.run("job", "ls").stdout.decode()


def test_the_commands_tell_of_jobs_and_end_them(tmp_path: Path, registry: HeldRegistry) -> None:
    with chunk_server(tmp_path / "store") as server:
        host = Host(tmp_path / "host", server.url)
        assert host.json("job", "ls") == []
        running = host.start("convert", registry.source, "--name", "app:v1")
        with HttpUpstream(server.url, retry=QUICK) as upstream:
            job = until(lambda: _only(upstream), halfway)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=_WAIT_S)
        assert running.returncode == 130
        assert f"pvisor job inspect {job.id} --server {server.url}" in said.decode()
        assert b"job cancel" in said
        assert b"Traceback" not in said
        (listed,) = host.json("job", "ls", "--unfinished")
        assert (listed["id"], listed["state"]) == (job.id, "running")
        assert "layer 1 of 1, 1.0 MiB of" in host.run("job", "ls").stdout.decode()
        assert host.json("job", "cancel", job.id) == {"cancelled": [job.id]}
        assert host.json("job", "inspect", job.id)["state"] == "cancelled"
        assert host.json("job", "ls", "--unfinished") == []
        for command in (("inspect", "nonsense"), ("cancel", "0" * 20)):
            assert "no job" in host.error("job", *command)
        registry.go.set()
        assert b"AUFS bookkeeping, left out" in host.run("pull", registry.source).stderr


def test_a_collection_of_the_hosts_own_store_asks_its_stages(tmp_path: Path) -> None:
    host = Host(tmp_path)
    with ChunkStore.open(tmp_path / "home/store") as store:
        add_image(store, "kept:v1", chunks=3)
    (tmp_path / "home/stages/damaged").mkdir(parents=True)
    serving = host.start("serve", "--listen", "127.0.0.1:0", "--json")
    try:
        assert serving.stdout is not None
        server = ChunkServer(json.loads(serving.stdout.readline())["url"], serving)  # type: ignore[arg-type]
        job = json.loads(ask(server, "POST", "/v1/gc", b"")[2])["job"]
        with HttpUpstream(server.url, retry=QUICK) as upstream:
            ended = until(lambda: upstream.job(job), lambda found: found.finished)
        assert (ended.state, "stage 'damaged'" in ended.error) == ("failed", True)
        assert "pvisor stage drop damaged" in ended.hint
    finally:
        serving.terminate()
        serving.communicate(timeout=_WAIT_S)
