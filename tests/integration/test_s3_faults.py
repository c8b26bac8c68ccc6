"""A store over an S3 server (moto) that fails in every way it can. moto has conditional PUT."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.errors import BucketUnavailableError, ChunkError, ChunkUnreadableError
from imaged.ids import ChunkId
from imaged.s3.address import BucketAddress, Patience
from imaged.s3.client import PART_BYTES, S3Objects
from imaged.s3.mirror import make_mirror
from imaged.s3.objects import Made
from imaged.s3.store import MirrorStore
from tests.support.chunkserver import ask, chunk_server
from tests.support.faultys3 import ACCESS_KEY, SECRET_KEY, Faults, run_faulty_s3
from tests.support.store_images import noise
from tests.support.swift import S3Server

_BUCKET = "faulty"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[S3Server, Faults]]:
    with run_faulty_s3(tmp_path_factory.mktemp("moto") / "log") as (server, faults):
        server.make_bucket(_BUCKET)
        yield server, faults


@pytest.fixture
def faults(
    running: tuple[S3Server, Faults], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Faults]:
    """Only who gets no answer is impatient: moto takes a busy host's time for those that it gives."""
    server, faults = running
    timeout_s = "1.5" if "hang" in request.node.name else "20"
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    for name, value in {"TIMEOUT_S": timeout_s, "ATTEMPTS": "3", "POLL_S": "3600", "LEASE_S": "3600"}.items():
        monkeypatch.setenv(f"PVISOR_S3_{name}", value)
    yield faults
    faults.none()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def objects(faults: Faults, prefix: str) -> Iterator[S3Objects]:
    found = S3Objects(BucketAddress(_BUCKET, prefix), Patience.resolve())
    yield found
    found.close()


@pytest.fixture
def stores(faults: Faults, prefix: str, tmp_path: Path) -> Iterator[list[MirrorStore]]:
    """Two servers of one bucket."""
    with ExitStack() as stack:
        found: list[MirrorStore] = []
        for name in "ab":
            make_mirror(tmp_path / name, BucketAddress(_BUCKET, prefix))
            store = stack.enter_context(ChunkStore.open(tmp_path / name))
            assert isinstance(store, MirrorStore)
            found.append(store)
        yield found
        faults.none()


@pytest.mark.parametrize("what", ["503", "cut", "hang"])
def test_what_passes_is_tried_again(faults: Faults, objects: S3Objects, what: str) -> None:
    body = noise(20_000)
    faults.once(what, method="PUT", path="/one")
    objects.put("one", body)
    faults.once(what, method="GET", path="/one", count=2)
    assert objects.get("one") == body
    faults.once(what, method="GET", path="/one")
    assert objects.read("one", 100, 50) == body[100:150]
    faults.once(what, method="GET", path=_BUCKET)
    assert [entry.key for entry in objects.list("on")] == ["one"]


@pytest.mark.parametrize("what", ["503", "cut"])
def test_what_does_not_pass_is_a_clear_error(faults: Faults, objects: S3Objects, what: str) -> None:
    objects.put("one", b"x" * 1000)
    faults.always(what, path="/one")
    calls = [lambda: objects.get("one"), lambda: objects.read("one", 0, 900)]
    if what == "503":  # the answer to a PUT has no body to cut
        calls.append(lambda: bytes(int(objects.put("one", b""))))
    for call in calls:
        with pytest.raises(BucketUnavailableError) as caught:
            call()
        assert f"s3://{_BUCKET}/" in caught.value.message and "/one" in caught.value.message
        assert "3 tries" in caught.value.message and "127.0.0.1" in caught.value.hint
        assert SECRET_KEY not in str(caught.value) and ACCESS_KEY not in str(caught.value)
        assert caught.value.__cause__ is None


def test_an_answer_that_got_lost_is_no_lost_claim(faults: Faults, objects: S3Objects) -> None:
    """The conditional PUT arrived, and its answer did not: the second try finds what the first wrote."""
    faults.once("late503", method="PUT", path="/new")
    assert objects.put_new("new", b"mine") is Made.YES
    assert objects.put_new("new", b"another's") is Made.TAKEN
    assert objects.get("new") == b"mine"


def test_big_packs_go_in_parts_and_parts_that_fail_are_sent_again(
    faults: Faults, objects: S3Objects, tmp_path: Path
) -> None:
    path = tmp_path / "pack"
    length = PART_BYTES + 1_000_000
    path.write_bytes(noise(length + 100))
    faults.once("503", method="PUT", path="/big", count=2)
    objects.upload("big", path, length)
    assert objects.read("big", PART_BYTES - 10, 20) == noise(length + 100)[PART_BYTES - 10 : PART_BYTES + 10]
    assert objects.list("big")[0].size_bytes == length
    faults.always("503", method="PUT", path="/other")
    with pytest.raises(BucketUnavailableError):
        objects.upload("other", path, length)
    faults.none()
    assert objects.list("other") == []
    assert objects.abort_uploads(time.time() + 100) == 0  # nothing of it is left


def test_wrong_bytes_are_never_given(faults: Faults, stores: list[MirrorStore]) -> None:
    first, second = stores
    chunks = [first.put(noise(30_000, number)) for number in range(8)]
    first.flush()
    second.bucket.catch_up()
    faults.always("wrong", method="GET", path=".pack")
    refused = []
    for number, chunk in enumerate(chunks):
        try:
            assert ChunkId.of(second.get(chunk)) == chunk
        except ChunkError:
            refused.append(number)
    faults.none()
    assert refused
    # Who has them can put them right; they count as missing here, and are in the bucket twice.
    assert second.missing(chunks) == [chunks[number] for number in refused]
    for number in refused:
        second.put(noise(30_000, number))
    second.flush()
    assert all(ChunkId.of(second.get(chunk)) == chunk for chunk in chunks)


def test_an_outage_is_no_loss(faults: Faults, stores: list[MirrorStore]) -> None:
    first, second = stores
    chunk = first.put(noise(30_000))
    first.flush()
    second.bucket.catch_up()
    faults.always("503")
    with pytest.raises(BucketUnavailableError):
        second.get(chunk)
    other = second.put(noise(30_000, 2))
    with pytest.raises(BucketUnavailableError):
        second.refs.set("name:1", _ref(other))
    assert second.get(other)
    faults.none()
    second.refs.set("name:1", _ref(other))
    assert ChunkId.of(second.get(chunk)) == chunk
    assert first.refs.get("name:1") == _ref(other) and ChunkId.of(first.get(other)) == other


def test_a_pack_that_is_gone_is_told_by_name(faults: Faults, stores: list[MirrorStore]) -> None:
    first, second = stores
    chunk = first.put(noise(30_000))
    first.flush()
    second.bucket.catch_up()
    key = next(entry.key for entry in first.bucket.objects.list("packs/") if entry.key.endswith(".pack"))
    first.bucket.objects.delete(key)
    with pytest.raises(ChunkUnreadableError, match=key):
        second.get(chunk)


def test_names_are_claimed_by_conditional_put(faults: Faults, stores: list[MirrorStore]) -> None:
    first, _ = stores
    record = first.put(b"a record")
    first.flush()
    problems: list[Exception] = []

    def publish(store: MirrorStore, number: int) -> None:
        try:
            for turn in range(3):
                store.refs.set("shared:1", _ref(record, f"{number}.{turn}"))
                store.refs.set(f"own{number}.{turn}:1", _ref(record))
        except Exception as error:
            problems.append(error)

    threads = [
        threading.Thread(target=publish, args=(store, number)) for number, store in enumerate([*stores, *stores])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for store in stores:
        store.bucket.sync.everything()
        assert store.bucket.tables.names.conditional
        assert len(store.refs.items()) == 13
    versions = [entry.key for entry in first.bucket.objects.list("refs/images/") if "/shared" in entry.key]
    assert [key.rpartition("/")[2] for key in versions] == [f"{number:012d}.json" for number in range(1, 13)]


def test_a_server_over_a_dead_bucket_says_so(faults: Faults, prefix: str, tmp_path: Path) -> None:
    make_mirror(tmp_path / "a", BucketAddress(_BUCKET, prefix))
    with ChunkStore.open(tmp_path / "a") as store:
        chunk = store.put(noise(30_000))
        store.flush()
    make_mirror(tmp_path / "b", BucketAddress(_BUCKET, prefix))
    log = tmp_path / "log"
    with log.open("wb") as output, chunk_server(tmp_path / "b", stderr=output) as server:
        faults.always("503")
        status, _, body = ask(server, "GET", f"/v1/chunks/{chunk}")
        assert status == 503 and b"s3://" in body
        status, _, body = ask(server, "POST", "/v1/chunks/batch", bytes(chunk), Content_Type="application/octet-stream")
        assert status == 503
        assert ask(server, "GET", "/healthz")[0] == 200
        faults.none()
        assert ask(server, "GET", f"/v1/chunks/{chunk}")[0] == 200
    text = log.read_text()
    assert "Traceback" not in text and SECRET_KEY not in text and ACCESS_KEY not in text


def test_a_debug_log_has_no_secrets(faults: Faults, objects: S3Objects, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    objects.put("one", b"x")
    faults.once("503", path="/one")
    objects.get("one")
    assert SECRET_KEY not in caplog.text and "Signature=" not in caplog.text and ACCESS_KEY not in caplog.text


def _ref(record: ChunkId, source: str = "x") -> Ref:
    return Ref(record=record, created_at=1, source=source, origin="", chunks=1, stored_bytes=1)
