"""Chunk servers over a real S3 server: OpenStack Swift, which has no conditional PUT."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imaged import catalog
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.errors import ChunkError, NotFoundError, PvisorError
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.progress import NoProgress
from imaged.reach import reachable
from imaged.s3.address import BucketAddress
from imaged.s3.mirror import make_mirror
from imaged.transfer.push import push_image
from tests.support.chunkserver import ChunkServer, ask
from tests.support.command import Host
from tests.support.store_images import build_image, name_image, noise
from tests.support.swift import SECRET_KEY, S3Server

pytestmark = pytest.mark.s3
_numbers = itertools.count()
_QUICK = {"PVISOR_S3_POLL_S": "0.3", "PVISOR_S3_SETTLE_S": "0", "PVISOR_S3_WAIT_S": "20", "PVISOR_S3_LEASE_S": "60"}
_RETRY = RetryPolicy(total_s=60.0, first_wait_s=0.05, longest_wait_s=0.5)


@pytest.fixture
def environ(swift: S3Server) -> dict[str, str]:
    return {**swift.environ, **_QUICK}


@pytest.fixture
def url(swift: S3Server) -> str:
    """A new bucket, and a prefix in it."""
    return f"s3://{swift.make_bucket(f'pvisor-{next(_numbers)}')}/some/prefix"


class Served:
    """`pvisor serve` with a home of its own."""

    def __init__(self, host: Host, *arguments: str) -> None:
        self.log = host.root / "log"
        host.root.mkdir(exist_ok=True)
        with self.log.open("ab") as output:
            self.process = host.start("serve", "--listen", "127.0.0.1:0", "--json", *arguments, stderr=output)
        self.url = ""

    def ready(self) -> Served:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.url = json.loads(line)["url"]
        return self

    @property
    def server(self) -> ChunkServer:
        return ChunkServer(self.url, self.process)  # type: ignore[arg-type]

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


@contextlib.contextmanager
def _servers(root: Path, names: str, environ: dict[str, str], url: str, *more: str) -> Iterator[list[Served]]:
    found = [Served(Host(root / name, extra=environ), "--store", url, *more) for name in names]
    try:
        yield [one.ready() for one in found]
    finally:
        for one in found:
            one.stop()


@contextlib.contextmanager
def _mirror(root: Path, url: str, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> Iterator[ChunkStore]:
    """A server's store, in this process."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    make_mirror(root, BucketAddress.parse(url))
    with ChunkStore.open(root) as store:
        yield store


def _push(local: ChunkStore, url: str, name: str) -> None:
    entry = catalog.find(local, name)
    with HttpUpstream(url, retry=_RETRY) as upstream:
        push_image(local, upstream, entry, NoProgress())


def test_a_second_server_starts_empty_and_serves_what_the_first_was_given(
    environ: dict[str, str], url: str, swift: S3Server, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(40):
        (tree / f"f{number}").write_bytes(noise(30_000, number))
    (tree / "hello").write_text("hello from the bucket")
    operator = Host(tmp_path / "operator", extra=environ)
    with _servers(tmp_path, "a", environ, url, "--workers", "2") as (first,):
        client = Host(tmp_path / "client", first.url)
        client.run("convert", f"dir:{tree}", "--name", "app:1", "--server", first.url)
        assert ask(first.server, "GET", "/readyz")[0] == 200
        df = operator.json("store", "df", "--store", url)
        assert df["chunks"] > 20 and df["packs"] >= 1
        with _servers(tmp_path, "b", environ, url) as (second,):
            other = Host(tmp_path / "other", second.url)
            other.run("pull", "app:1")
            other.run("image", "export", "app:1", str(tmp_path / "out.tar"))
            assert b"hello from the bucket" in (tmp_path / "out.tar").read_bytes()
            # What one names the other knows, and what one takes away.
            assert [one["name"] for one in operator.json("image", "ls", "--store", url)] == ["app:1"]
            with HttpUpstream(second.url, retry=_RETRY) as upstream:
                upstream.remove_image("app:1")
                _eventually(lambda: not upstream.images())
            report = operator.json("store", "gc", "--store", url)
            assert report["removed_chunks"] > 20 and report["waiting_chunks"] == 0
            checked = operator.json("store", "fsck", "--store", url)
            assert checked["errors"] == [] and checked["chunks"] == 0
    logs = b"".join(path.read_bytes() for path in tmp_path.glob("*/log"))
    assert b"Traceback" not in logs and b"ERROR" not in logs, logs.decode()[-3000:]
    assert SECRET_KEY.encode() not in logs
    assert all(key.startswith("some/prefix/") for key in swift.keys(url.split("/")[2]))


def _eventually(true: Any) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def test_two_servers_and_collections_under_load_lose_nothing(
    environ: dict[str, str], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients push, take away and read through both servers while a third host collects, all on the same few chunks."""
    begun = 0.0
    problems: list[str] = []
    counts = {"pushed": 0, "read": 0, "collected": 0, "removed": 0}
    enough = {"pushed": 20, "read": 8, "collected": 2, "removed": 1}
    lock = threading.Lock()

    def going_on() -> bool:
        """Until enough was done, which takes a busy host longer."""
        done = all(counts[what] >= least for what, least in enough.items())
        return not problems and time.monotonic() < begun + (8 if done else 150)

    def count(what: str, more: int = 1) -> None:
        with lock:
            counts[what] += more

    def client(number: int, urls: list[str]) -> None:
        chance = random.Random(number)
        with ChunkStore.open(tmp_path / f"client{number}") as local:
            while going_on():
                name, start = f"n{chance.randrange(6)}:1", chance.randrange(12)
                try:
                    act = chance.random()
                    with HttpUpstream(chance.choice(urls), retry=_RETRY, timeout_s=90.0) as upstream:
                        if act < 0.5:
                            name_image(local, name, build_image(local, range(start, start + 3)))
                            push_image(local, upstream, catalog.find(local, name), NoProgress())
                            count("pushed")
                        elif act < 0.7:
                            upstream.remove_image(name)
                        else:
                            image = upstream.image(name).id
                            try:
                                wanted = list(reachable(upstream, image))
                                assert all(frame.open() for frame in upstream.frames(wanted))
                                count("read")
                            except (ChunkError, AssertionError):
                                # Only what has lost its name may be gone.
                                if upstream.image(name).id == image:
                                    raise
                except NotFoundError:
                    continue
                except Exception as error:
                    problems.append(f"{type(error).__name__}: {error}")
                    return

    def collector() -> None:
        while going_on():
            try:
                report = collect(tmp_path / "collector")
                count("collected")
                count("removed", report.removed_chunks)
            except PvisorError as error:
                problems.append(f"collection: {error}")
                return

    with _servers(tmp_path, "ab", environ, url) as both, _mirror(tmp_path / "collector", url, monkeypatch, environ):
        urls = [one.url for one in both]
        begun = time.monotonic()
        threads = [threading.Thread(target=client, args=(number, urls)) for number in range(4)]
        threads.append(threading.Thread(target=collector))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems
        assert all(counts[what] >= least for what, least in enough.items()), counts
        with _mirror(tmp_path / "fresh", url, monkeypatch, environ) as fresh:
            names = {name: ref.record for name, ref in fresh.refs.items()}
            for record in names.values():
                assert all(fresh.get(chunk) for chunk in reachable(fresh, record))
        for one in urls:
            with HttpUpstream(one, retry=_RETRY) as upstream:
                _eventually(lambda up=upstream: {image.name: image.id for image in up.images()} == names)
    report = Host(tmp_path / "operator", extra=environ).json("store", "fsck", "--store", url)
    assert report["errors"] == []


def test_names_are_not_lost_however_many_set_them_at_once(
    environ: dict[str, str], url: str, swift: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 2
    with (
        _mirror(tmp_path / "a", url, monkeypatch, environ) as first,
        _mirror(tmp_path / "b", url, monkeypatch, environ) as second,
    ):
        record = first.put(b"a record")
        first.flush()
        problems: list[Exception] = []

        def publish(store: ChunkStore, number: int) -> None:
            try:
                for turn in range(each):
                    source = f"{number}.{turn}"
                    ref = Ref(record=record, created_at=1, source=source, origin="", chunks=1, stored_bytes=1)
                    store.refs.set(f"own{number}.{turn}:1", ref)
                    store.refs.set("shared:1", ref)
            except Exception as error:
                problems.append(error)

        threads = [
            threading.Thread(target=publish, args=(store, number))
            for number, store in enumerate([first, second, first, second])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        first.bucket.sync.everything()  # type: ignore[attr-defined]
        second.bucket.sync.everything()  # type: ignore[attr-defined]
        assert dict(first.refs.items()) == dict(second.refs.items())
        assert {f"own{number}.{turn}:1" for number in range(4) for turn in range(each)} < dict(
            first.refs.items()
        ).keys()
    keys = [key for key in swift.keys(url.split("/")[2]) if "/shared" in key]
    assert len(keys) == 4 * each and not [key for key in keys if key.endswith(".claim")]
    assert [int(key.rpartition("/")[2][:12]) for key in sorted(keys)] == list(range(1, 4 * each + 1))


def test_a_server_killed_in_an_upload_loses_nothing_that_it_confirmed(
    environ: dict[str, str], url: str, tmp_path: Path
) -> None:
    """kill -9 again and again while a client uploads; what the server had taken is then still there, and sound."""
    confirmed: list[ChunkId] = []
    home = tmp_path / "a"
    for turn in range(2):
        with _servers(tmp_path, "a", environ, url) as (server,):
            killer = threading.Timer(0.3 + 0.25 * turn, server.process.send_signal, [signal.SIGKILL])
            killer.start()
            with (
                contextlib.suppress(PvisorError),
                HttpUpstream(server.url, retry=RetryPolicy(total_s=0.1, first_wait_s=0.02, longest_wait_s=0.05)) as up,
            ):
                for number in itertools.count():
                    frames = [Frame.of(noise(60_000, 1000 * turn + 20 * number + one)) for one in range(20)]
                    up.upload(frames)
                    confirmed += [frame.id for frame in frames]
            killer.join()
            assert server.process.wait(10) == -signal.SIGKILL
    assert home.is_dir()
    with _servers(tmp_path, "ab", environ, url) as (again, other):
        for served in (again, other):
            with HttpUpstream(served.url, retry=_RETRY) as upstream:
                assert upstream.missing(confirmed) == []
                assert all(frame.open() for frame in upstream.frames(confirmed[-64:]))
    report = Host(tmp_path / "operator", extra=environ).json("store", "fsck", "--store", url)
    assert report["errors"] == []


def test_what_is_wrong_with_bucket_or_credentials_is_said_and_no_secret_is(
    environ: dict[str, str], url: str, tmp_path: Path
) -> None:
    for changes, address, expected in (
        ({}, "s3://no-such-bucket/x", "no-such-bucket"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-77"}, url, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "PVISOR_S3_ATTEMPTS": "2"}, url, "127.0.0.1:9"),
        ({}, "s3://x", "s3://BUCKET/PREFIX"),
    ):
        host = Host(tmp_path / "host", extra={**environ, **changes})
        code = 2 if address == "s3://x" else 1
        text = host.error("store", "df", "--store", address, code=code)
        assert expected in text
        assert "wrong-secret" not in text and SECRET_KEY not in text
        if not changes:
            continue
        served = subprocess.run(
            [*_argv("serve", "--store", address, "-v")], env=host.env, capture_output=True, text=True, timeout=60
        )
        assert served.returncode == code and expected in served.stderr
        assert "wrong-secret" not in served.stderr and SECRET_KEY not in served.stderr


def _argv(*arguments: str) -> list[str]:
    from tests.support.command import ARGV

    return [*ARGV, *arguments]
