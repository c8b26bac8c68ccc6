"""What a chunk server and its clients make of damage, nonsense and lies."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.config import Config
from imaged.errors import ChunkMissingError, InvalidNameError, PvisorError, UpstreamError
from imaged.fetching.bootstream import BootStream
from imaged.fetching.credentials import KNOWN
from imaged.fetching.fetch import Fetcher, Tally
from imaged.fetching.remote import Job, RemoteImage
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.names import SourceName
from imaged.progress import NoProgress
from imaged.serving.listening import listen
from imaged.transfer import acquire
from imaged.transfer.pull import pull_image
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.flaky import Content, Handler, run_flaky
from tests.support.oci import digest, make_tar, write_layout
from tests.support.registry import run_registry
from tests.support.synthetic import Synthetic, add_image
from tests.support.tokens import write_tokens

pytestmark = pytest.mark.network
QUICK = RetryPolicy(total_s=1.0, first_wait_s=0.02, longest_wait_s=0.1)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/chunks/missing"), ("PUT", "/v1/chunks")])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br", "x"])
def test_compressed_bodies_are_refused(server: ChunkServer, method: str, path: str, encoding: str) -> None:
    """And not inflated: that would cost the server a hundred times what it costs to send them."""
    status, _, body = ask(server, method, path, gzip.compress(b"no such thing" * 10), Content_Encoding=encoding)
    assert status == 415, body
    assert set(json.loads(body)) == {"error", "hint"}


def torn_server(store: Path, chunks: Callable[[Synthetic], ChunkId]) -> contextlib.AbstractContextManager[ChunkServer]:
    """A server whose image hurt:latest has lost this chunk's bytes on the disk; whole:latest is sound."""
    with ChunkStore.open(store) as opened:
        add_image(opened, "whole:latest", seed=1, chunks=1)
        image = add_image(opened, "hurt:latest", seed=9)
        location = opened.index.find(chunks(image))
        assert location is not None
    with (store / "packs" / f"{location.pack:08}.pack").open("r+b") as pack:
        pack.seek(location.offset + HEADER_BYTES + 10)
        pack.write(b"torn")
    return chunk_server(store)


def test_a_damaged_record_hides_no_other_image(tmp_path: Path) -> None:
    with torn_server(tmp_path / "store", lambda image: image.id) as server, HttpUpstream(server.url) as upstream:
        assert [image.name for image in upstream.images()] == ["whole:latest"]
        assert [image.name for image in upstream.images()] == ["whole:latest"]


@pytest.mark.parametrize("part", ["id", "metadata", "data"])
def test_what_the_server_lost_is_not_the_clients_fault(tmp_path: Path, part: str) -> None:
    def chunk(image: Synthetic) -> ChunkId:
        return image.id if part == "id" else getattr(image.record, part)

    with torn_server(tmp_path / "store", chunk) as server:
        for _ in range(2):
            status, _, body = ask(server, "GET", "/v1/images/hurt?view=boot")
            assert status == 500
            assert "the server's own store is damaged: chunk" in json.loads(body)["error"]
        assert ask(server, "GET", "/v1/images/whole?view=boot")[0] == 200


def test_a_record_that_is_none_is_not_the_clients_fault(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        add_image(store, "whole:latest", chunks=1)
        held = store.refs.get("whole:latest")
        assert held is not None
        store.refs.set("odd:latest", dataclasses.replace(held, record=store.put(b"no record")))
    with chunk_server(tmp_path / "store") as server, HttpUpstream(server.url) as upstream:
        status, _, body = ask(server, "GET", "/v1/images/odd")
        assert (status, "odd:latest" in json.loads(body)["error"]) == (500, True)
        assert [image.name for image in upstream.images()] == ["whole:latest"]


@pytest.mark.parametrize("what", ["image", "snapshot"])
def test_what_is_no_entry_of_a_list_hides_no_other(
    server: ChunkServer, image: Synthetic, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (sound,) = (
        entry for entry in json.loads(ask(server, "GET", "/v1/images")[2])["images"] if entry["id"] == str(image.id)
    )
    with run_flaky() as liar, HttpUpstream(f"http://{liar.address}", retry=QUICK) as upstream:
        listed = upstream.images if what == "image" else upstream.snapshots
        entries = [{**sound, "id": "0" * 64}, 7, None, *([sound] if what == "image" else [])]
        for found in (entries, None, 7):
            body = json.dumps({f"{what}s": found}).encode()
            liar.content[f"/v1/{what}s"] = Content(body, "application/json")
            assert [entry.id for entry in listed()] == ([image.id] if what == "image" and found is entries else [])
    assert [record.getMessage().partition(" of http")[0] for record in caplog.records] == [
        f"{what} {sound['name']!r}",
        f"{what} one",
        f"{what} one",
    ]


def test_an_answer_that_is_none_names_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it reads as a fault of this host's own store."""
    chunk, json_type = ChunkId.of(b"x"), "application/json"
    with run_flaky() as liar, HttpUpstream(f"http://{liar.address}", retry=QUICK) as upstream:
        liar.content["/v1/images/box:1"] = Content(b'{"id": "no id"}', json_type)
        liar.content["/v1/snapshots/box"] = Content(b"{}", json_type)
        liar.content["/v1/jobs/j1"] = Content(b'{"state": 7}', json_type)
        liar.content[f"/v1/profiles/{chunk}"] = Content(b"no profile", "application/octet-stream")
        for ask_for in (
            lambda: upstream.image("box:1"),
            lambda: upstream.snapshot("box"),
            lambda: upstream.job("j1"),
            lambda: upstream.profile(chunk),
        ):
            with pytest.raises(UpstreamError, match=f"^chunk server http://{liar.address}: "):
                ask_for()
        for found in (None, ["no id"]):
            monkeypatch.setattr(upstream, "_json", lambda *_, found=found: {"missing": found})
            with pytest.raises(UpstreamError, match=f"^chunk server http://{liar.address}: "):
                upstream.missing([chunk])


def test_a_token_that_is_for_another_server_is_told(tmp_path: Path) -> None:
    """By the client, as the server only knows that there is none."""
    tokens = write_tokens(tmp_path / "tokens")
    KNOWN.learn("", "http://elsewhere.test:1=secret-canary")
    with chunk_server(tmp_path / "store", token_file=str(tokens.path)) as server, HttpUpstream(server.url) as upstream:
        with pytest.raises(UpstreamError, match="the request has none") as caught:
            upstream.images()
        assert f"PVISOR_TOKEN has none for {server.url}" in caught.value.hint
        KNOWN.learn(server.url, "not-a-token")
        with pytest.raises(UpstreamError, match="none of this server's") as caught:
            upstream.images()
    assert "has none" not in caught.value.hint


@pytest.mark.parametrize("name", ["a\ud800", "a b", "", "../x"])
def test_names_that_are_none_are_not_asked_for(name: str) -> None:
    with HttpUpstream("http://127.0.0.1:9", retry=QUICK) as upstream:
        with pytest.raises(InvalidNameError):
            upstream.image(name)
        with pytest.raises(InvalidNameError):
            upstream.publish(name, ChunkId.of(b""))
        with pytest.raises(InvalidNameError), upstream.boot(name):
            pass


class Renaming(HttpUpstream):
    """A server that answers with another image, or with the right one under another name."""

    def __init__(self, url: str, changes: dict[str, Any]) -> None:
        super().__init__(url, retry=QUICK)
        self._changes = changes

    @contextlib.contextmanager
    def boot(
        self, name: str, *, known: ChunkId | None = None, ahead: bool = False
    ) -> Iterator[BootStream[RemoteImage] | None]:
        with super().boot(self._changes.get("asked", name), known=known, ahead=ahead) as stream:
            assert stream is not None
            changed = dataclasses.replace(stream.found, name=self._changes.get("name", stream.found.name))
            yield dataclasses.replace(stream, found=changed)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ("app:v1", {"name": "debian:12"}),
        ("app:v1", {"name": "registry.test/myapp:v1"}),
        ("app:v1", {"name": "app:v1/x"}),
        ("app:v1", {"name": "x" * 600 + "/app:v1"}),
        ("app:v1", {"name": "\ud800/app:v1"}),
        ("app:v1", {"name": ""}),
        ("ID", {"name": "no name"}),
        ("ID", {"asked": "other"}),
        ("SHORT", {"asked": "other"}),
    ],
)
def test_a_server_does_not_choose_the_name_that_a_pull_sets(
    server: ChunkServer, image: Synthetic, local: ChunkStore, asked: str, changes: dict[str, Any], lazy: bool
) -> None:
    wanted = {"ID": str(image.id), "SHORT": str(image.id)[:12]}.get(asked, asked)
    upstream = Renaming(server.url, changes)
    fetcher = Fetcher(local, [upstream])
    with pytest.raises(UpstreamError, match=r"asked for image|is not an image name"):
        pull_image(fetcher, upstream, wanted, lazy=lazy)
    fetcher.drain()
    assert local.refs.items() == []
    fetcher.close()


@pytest.mark.parametrize("asked", ["app:v1", "team/app:v1", "registry.test:5000/team/app:v1", "ID", "SHORT"])
def test_a_pull_sets_the_full_name(
    server: ChunkServer, upstream: HttpUpstream, image: Synthetic, local: ChunkStore, asked: str
) -> None:
    fetcher = Fetcher(local, [upstream])
    wanted = {"ID": str(image.id), "SHORT": str(image.id)[:12]}.get(asked, asked)
    assert pull_image(fetcher, upstream, wanted, lazy=True).id == image.id
    fetcher.drain()
    assert [name for name, _ in local.refs.items()] == ["registry.test:5000/team/app:v1"]
    fetcher.close()


def test_a_pull_reports_the_name_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        image = add_image(store, "registry.test/j:1", chunks=1)
        for name in ("a:1", "z:1"):
            add_image(store, name, chunks=1)
    monkeypatch.setenv("PVISOR_HOME", str(tmp_path / "home"))
    with chunk_server(tmp_path / "store") as server:
        config = Config.resolve(server=server.url)
        for asked, name in (("a:1", "a:1"), ("z:1", "z:1"), ("j:1", "registry.test/j:1"), ("a:1", "a:1")):
            pulled = acquire.pull_image(config, asked, lazy=True, platform=None, progress=NoProgress())
            assert (pulled.name, pulled.id) == (name, image.id)
        pulled = acquire.pull_image(config, str(image.id), lazy=True, platform=None, progress=NoProgress())
        assert pulled.name in ("a:1", "z:1", "registry.test/j:1")


def test_a_whole_pull_from_a_peer_that_has_a_part_says_which_and_what_to_do(
    server: ChunkServer, image: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(tmp_path / "peer") as store, HttpUpstream(server.url) as upstream:
        fetcher = Fetcher(store, [upstream])
        pull_image(fetcher, upstream, "app:v1", lazy=True)
        fetcher.drain()
        fetcher.close()
    monkeypatch.setenv("PVISOR_HOME", str(tmp_path / "home"))

    def pull(servers: str) -> acquire.Acquired:
        config = Config.resolve(server=servers)
        return acquire.pull_image(config, "app:v1", lazy=False, platform=None, progress=NoProgress())

    with chunk_server(tmp_path / "peer") as peer:
        with pytest.raises(ChunkMissingError) as caught:
            pull(peer.url)
        assert peer.url in caught.value.message
        assert "--server" in caught.value.hint
        assert pull(f"{peer.url},{server.url}").id == image.id


@pytest.mark.alone
def test_a_command_does_not_wait_long_for_a_server_that_refuses() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    with acquire.command_upstream(f"http://127.0.0.1:{port}") as upstream, pytest.raises(UpstreamError) as caught:
        upstream.images()
    assert time.monotonic() - started < 4
    assert "refused" in caught.value.message
    assert caught.value.hint and "doctor" not in caught.value.hint


def test_a_client_that_breaks_off_is_no_error_of_the_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        chunks = list(BlockImage.open(store, add_image(store, "app:v1").record.data).chunk_ids())
    body = b"".join(chunks * 100)
    head = "POST /v1/chunks/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: "
    with chunk_server(tmp_path / "store") as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
                client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
                assert client.recv(1000).startswith(b"HTTP/1.1 200")
                time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            client.sendall(b"PUT /v1/chunks HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nshort")
        assert ask(server, "GET", "/healthz")[0] == 200
        assert server.stop() == 0
    assert capfd.readouterr().err == ""


class Watcher:
    """Remembers what a progress line would show: (step, bytes done) each time something is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.steps: list[tuple[str, int | None]] = []

    def start(self, step: str, total_bytes: int | None) -> None:
        self.steps.append((step, total_bytes))
        self.seen.append((step, 0))

    def advance(self, byte_count: int) -> None:
        step, done_bytes = self.seen[-1]
        self.seen.append((step, done_bytes + byte_count))


def test_a_servers_conversion_is_seen_to_grow(
    server: ChunkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_tar(("data", os.urandom(6 << 20)))

    def slowly(handler: Handler, content: Content) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content.data)))
        handler.end_headers()
        for start in range(0, len(content.data), 1 << 20):
            before, deadline = watcher.seen[-1:], time.monotonic() + 20
            handler.wfile.write(content.data[start : start + (1 << 20)])
            while watcher.seen[-1:] == before and time.monotonic() < deadline:
                time.sleep(0.05)

    monkeypatch.setenv("PVISOR_HOME", str(tmp_path / "home"))
    watcher = Watcher()
    layout = write_layout(tmp_path / "layout", [layer], compression="none")
    with run_flaky() as registry:
        registry.serve(layout, "app")
        registry.plan(f"/blobs/{digest(layer)}", slowly)
        source = SourceName.parse(registry.source("app"))
        config = Config.resolve(server=server.url)
        acquire.convert_image(config, source, name="slow:1", platform="linux/amd64", progress=watcher)
    assert watcher.steps.count(("layer 1 of 1", len(layer))) == 1
    grown = sorted({done for step, done in watcher.seen if step == "layer 1 of 1"})
    assert len(grown) > 3
    assert 0 < grown[1] <= grown[-1] <= len(layer)


def test_no_host_is_every_address() -> None:
    with contextlib.closing(listen("", 0)) as listener:
        address, port = listener.getsockname()[:2]
        assert ipaddress.ip_address(address).is_unspecified
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    with pytest.raises(PvisorError, match="not a host name"):
        listen("a..b", 0)


def test_a_chunk_of_no_bytes_ends_no_fetcher(tmp_path: Path, local: ChunkStore) -> None:
    fetcher = Fetcher(local)
    frame = Frame.parse(Frame.of(b"some").pack())
    fetcher.admit(Frame(FrameHeader(ChunkId.of(b""), Codec.RAW, 0, 0), b""), Tally())
    fetcher.admit(frame, Tally())
    fetcher.drain()
    assert local.has(frame.id)
    fetcher.close()


def test_a_server_does_not_choose_the_name_of_what_it_converted(
    server: ChunkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = HttpUpstream.job

    def lie(upstream: HttpUpstream, name: str) -> Job:
        found = job(upstream, name)
        return dataclasses.replace(found, image=found.image and {**found.image, "name": "other:latest"})

    monkeypatch.setattr(HttpUpstream, "job", lie)
    monkeypatch.setenv("PVISOR_HOME", str(tmp_path / "home"))
    config = Config.resolve(server=server.url)
    layout = write_layout(tmp_path / "layout", [make_tar(("hello", b"hello\n"))])
    with run_registry() as registry:
        registry.push(f"oci:{layout}", "app:v1")
        source = registry.source("app:v1")
        pulled = acquire.pull_image(config, source, lazy=True, platform="linux/amd64", progress=NoProgress())
    assert pulled.name == str(SourceName.parse(source).default_name)
