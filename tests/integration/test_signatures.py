"""Only signed images: what a publisher signs is pulled and run, and nothing else is, whatever the server says."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.fetching.upstream import HttpUpstream
from tests.support.chunkserver import chunk_server
from tests.support.command import Host, busybox_layout, host
from tests.support.keys import KeyPair, make_keys
from tests.support.oci import make_tar
from tests.support.registry import run_registry

pytestmark = [pytest.mark.root, pytest.mark.fuse]
RUN = ("--", "echo", "started")


class Origin(NamedTuple):
    """A chunk server, and its store: what somebody who rules the server can change."""

    url: str
    store: Path

    def ref(self, name: str) -> Ref:
        with ChunkStore.open(self.store) as store:
            found = store.refs.get(name)
        assert found is not None
        return found

    def set(self, name: str, ref: Ref) -> None:
        with ChunkStore.open(self.store) as store:
            store.refs.delete(name)
            store.refs.set(name, ref)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signatures")


@pytest.fixture(scope="module")
def keys(scratch: Path) -> KeyPair:
    return make_keys(scratch, "team")


@pytest.fixture(scope="module")
def stranger(scratch: Path) -> KeyPair:
    return make_keys(scratch, "stranger")


@pytest.fixture(scope="module")
def layout(scratch: Path) -> Path:
    busybox_layout(scratch, tag="v1")
    return busybox_layout(scratch, make_tar(("opt/added", os.urandom(1000))), tag="v2")


@pytest.fixture(scope="module")
def publisher(scratch: Path, layout: Path, keys: KeyPair) -> Iterator[tuple[Host, Origin]]:
    """team/box:v1 was signed, team/other:v1 was not; they are two images."""
    with chunk_server(scratch / "store") as server, host(scratch / "publisher", server.url) as made:
        sign = ("--sign-key", str(keys.private))
        made.run("convert", f"oci:{layout}:v1", "--name", "team/box:v1", *sign)
        made.run("convert", f"oci:{layout}:v2", "--name", "team/other:v1")
        yield made, Origin(server.url, scratch / "store")


@pytest.fixture(scope="module")
def origin(publisher: tuple[Host, Origin]) -> Origin:
    return publisher[1]


@pytest.fixture
def worker(tmp_path: Path, origin: Origin, keys: KeyPair) -> Iterator[Host]:
    """Of a fleet that requires the signature of the team."""
    with host(tmp_path / "worker", origin.url, PVISOR_REQUIRE_SIGNATURE=str(keys.public)) as made:
        yield made


def test_a_signed_image_is_run_and_an_unsigned_one_is_not(worker: Host, keys: KeyPair, stranger: KeyPair) -> None:
    assert worker.run("run", "team/box:v1", *RUN).stdout == b"started\n"
    assert worker.run("run", "box:v1", *RUN).stdout == b"started\n"  # the end of a name that is here
    text = worker.error("run", "team/other:v1", *RUN, code=125)
    assert "team/other:v1" in text and "is not signed" in text and "pvisor image sign team/other:v1" in text
    for lazy in ((), ("--lazy",)):
        assert "is not signed" in worker.error("pull", *lazy, "team/other:v1")
        assert worker.json("pull", *lazy, "team/box:v1")["name"] == "team/box:v1"
    assert [found["name"] for found in worker.json("image", "ls")] == ["team/box:v1"]
    # The option wins over the environment, and any of several keys is enough.
    option = ("--require-signature", str(stranger.public))
    assert "is not signed by a required key" in worker.error("run", *option, "team/box:v1", *RUN, code=125)
    worker.run("run", *option, "--require-signature", str(keys.public), "team/box:v1", *RUN)


def test_who_requires_nothing_runs_anything(tmp_path: Path, origin: Origin, keys: KeyPair) -> None:
    """And then this host's own images are as strictly looked at as those of a server."""
    with host(tmp_path / "open", origin.url) as made:
        for name in ("team/box:v1", "team/other:v1"):
            made.run("run", name, *RUN)
        required = ("--require-signature", str(keys.public))
        made.run("run", *required, "team/box:v1", *RUN)
        box = made.json("image", "inspect", "team/box:v1")
        made.run("run", *required, box["id"], *RUN)
        made.run("run", *required, box["id"][:12], *RUN)
        other = made.json("image", "inspect", "team/other:v1")["id"]
        for name in ("team/other:v1", other, other[:12]):
            assert "is not signed" in made.error("run", *required, name, *RUN, code=125)
        # A name of this host that moved: the signature was of what it stood for.
        made.run("image", "tag", box["id"], "mine:v1")
        made.run("image", "tag", "team/other:v1", "team/box:v1")
        assert "is not signed" in made.error("run", *required, "team/box:v1", *RUN, code=125)
        for command in (("run", *required, "mine:v1", *RUN), ("run", *required, box["id"], *RUN)):
            assert "is not signed" in made.error(*command, code=125)
        made.run("image", "sign", "mine:v1", "--key", str(keys.private))
        made.run("run", *required, "mine:v1", *RUN)
        made.run("run", *required, box["id"], *RUN)


def test_a_server_that_moves_or_renames_a_signed_image(worker: Host, tmp_path: Path, origin: Origin) -> None:
    good, evil = origin.ref("team/box:v1"), origin.ref("team/other:v1")
    try:
        origin.set("team/box:v1", dataclasses.replace(evil, signatures=good.signatures))
        origin.set("team/renamed:v1", good)
        for command in (("run", "team/box:v1", *RUN), ("pull", "team/box:v1"), ("pull", "--lazy", "team/renamed:v1")):
            text = worker.error(*command, code=125 if command[0] == "run" else 1)
            assert "the name was moved to another image" in text
        for name in ("team/box:v1", "team/renamed:v1"):
            assert "was moved" in worker.error("run", name, *RUN, code=125)
        assert worker.json("image", "ls") == []
        text = worker.error("pull", "--lazy", "renamed:v1")
        assert "a signature is of a whole name" in text and "team/renamed:v1" in text
    finally:
        origin.set("team/box:v1", good)
    worker.run("pull", "--lazy", "team/box:v1")
    try:
        origin.set("team/box:v1", dataclasses.replace(evil, signatures=good.signatures))
        assert "was moved" in worker.error("pull", "--lazy", "team/box:v1")
        # The refused image did not take the name of the good one.
        assert worker.json("image", "inspect", "team/box:v1")["id"] == str(good.record)
        worker.run("run", "team/box:v1", *RUN)
        assert "was moved" in worker.error("pull", str(evil.record))
    finally:
        origin.set("team/box:v1", good)


def test_an_image_that_is_signed_later(
    tmp_path: Path, publisher: tuple[Host, Origin], keys: KeyPair, stranger: KeyPair
) -> None:
    """A host that has it learns of the signature by pulling it again, lazily or all of it."""
    made, origin = publisher
    made.run("convert", str(f"dir:{keys.private.parent / 'busybox-root'}"), "--name", "late:v1")
    image = made.json("image", "inspect", "late:v1")["id"]
    required = ("--require-signature", str(keys.public))
    with host(tmp_path / "first", origin.url) as lazy, host(tmp_path / "second", origin.url) as whole:
        lazy.run("run", "late:v1", *RUN)
        whole.run("pull", "late:v1")
        assert "is not signed" in lazy.error("pull", "--lazy", *required, "late:v1")
        signed = made.json("image", "sign", "late:v1", "--key", str(keys.private), "--server", origin.url)
        assert signed["id"] == image and signed["server"] == origin.url
        assert "is not signed" in lazy.error("run", *required, "late:v1", *RUN, code=125)
        lazy.run("pull", "--lazy", *required, "late:v1")
        whole.run("pull", *required, "late:v1")
        for worker in (lazy, whole):
            worker.run("run", *required, "late:v1", *RUN)
            assert [one["key"] for one in worker.json("image", "inspect", "late:v1")["signatures"]] == [signed["key"]]
        # A second signature stands beside the first, and both stay when the image is published again.
        made.run("image", "sign", "late:v1", "--key", str(stranger.private), "--server", origin.url)
        made.run("convert", str(f"dir:{keys.private.parent / 'busybox-root'}"), "--name", "late:v1")
        assert len(origin.ref("late:v1").signatures) == 2
        assert len(next(one for one in made.json("image", "ls", "--server", origin.url))["signatures"]) == 2


def test_what_is_signed_at_a_server_is_what_is_here(
    tmp_path: Path, publisher: tuple[Host, Origin], keys: KeyPair
) -> None:
    made, origin = publisher
    sign = ("image", "sign", "--key", str(keys.private), "--server", origin.url)
    good, evil = origin.ref("team/box:v1"), origin.ref("team/other:v1")
    try:
        origin.set("team/box:v1", evil)
        assert "is signed here only" in made.error(*sign, "team/box:v1")
        assert origin.ref("team/box:v1").signatures == ()
    finally:
        origin.set("team/box:v1", good)
    with host(tmp_path / "empty") as empty:
        assert "not box:v1" in empty.error(*sign, "box:v1")
        signed = empty.json(*sign, "team/box:v1")
        assert signed["id"] == str(good.record) and "no image" in empty.error(*sign, "absent:v1")
        assert "no image" in empty.error("image", "sign", "--key", str(keys.private), "team/box:v1")
        text = empty.error(*sign[:2], "--key", str(keys.public), "team/box:v1")
        assert "is no private key" in text and "openssl genpkey" in text


def test_a_registry_image_that_the_server_converts(tmp_path: Path, layout: Path, origin: Origin, keys: KeyPair) -> None:
    with run_registry() as registry, host(tmp_path / "client", origin.url) as made:
        registry.push(f"oci:{layout}:v1", "box:v1")
        source = registry.source("box:v1")
        required = ("--require-signature", str(keys.public))
        assert "is not signed" in made.error("run", *required, source, *RUN, code=125)
        made.run("convert", source, "--sign-key", str(keys.private))
        made.run("run", *required, source, *RUN)
        with host(tmp_path / "alone") as alone:
            text = alone.error("run", *required, f"oci:{layout}:v1", *RUN, code=125)
            assert "is a source: it has none" in text


def test_a_requirement_that_can_not_be_read_is_none_that_is_met(worker: Host, tmp_path: Path, keys: KeyPair) -> None:
    worker.run("pull", "--lazy", "team/box:v1")
    text = worker.error("run", "--require-signature", str(tmp_path / "absent"), "team/box:v1", *RUN, code=125)
    assert "No such file" in text
    text = worker.error("run", "--require-signature", str(keys.private), "team/box:v1", *RUN, code=125)
    assert "is no Ed25519 public key" in text
    for command, code in ((("run", "team/box:v1", *RUN), 125), (("pull", "team/box:v1"), 1)):
        fleet = dataclasses.replace(worker, extra={"PVISOR_REQUIRE_SIGNATURE": str(tmp_path / "absent")})
        assert "No such file" in fleet.error(*command, code=code)
        fleet = dataclasses.replace(worker, extra={"PVISOR_REQUIRE_SIGNATURE": ":"})
        assert "names no key" in fleet.error(*command, code=2)


def test_every_way_to_open_an_image_asks_for_it(worker: Host, tmp_path: Path, origin: Origin) -> None:
    (tmp_path / "mnt").mkdir()
    with host(tmp_path / "plain", origin.url) as plain:
        plain.run("run", "--stage", "kept", "team/other:v1", *RUN)
        strict = dataclasses.replace(plain, extra=worker.extra)
        assert "is not signed" in strict.error("stage", "exec", "kept", *RUN, code=125)
        assert "is not signed" in strict.error("mount", "team/other:v1", str(tmp_path / "mnt"))
        assert "is not signed" in strict.error("vm", "run", "team/other:v1", *RUN, code=125)
        plain.run("stage", "exec", "kept", *RUN)


def test_what_a_server_takes_for_a_signature(origin: Origin, keys: KeyPair) -> None:
    import http.client
    import json

    ref = origin.ref("team/box:v1")
    held = [signature.to_json() for signature in ref.signatures]
    connection = http.client.HTTPConnection(origin.url.removeprefix("http://"), timeout=20)
    for wrong in ("text", [1], [{}], held * 9, [{**held[0], "signature": "AAAA"}]):
        body = json.dumps({"id": str(ref.record), "signatures": wrong})
        connection.request("PUT", "/v1/images/team/box:v1", body)
        answer = connection.getresponse()
        assert answer.status == 400 and b"signature" in answer.read()
    assert origin.ref("team/box:v1") == ref
    # A cache on the way must not go on with the answer from before: the tag is of the signatures, too.
    with HttpUpstream(origin.url) as upstream:
        assert upstream.image("team/box:v1").signatures == ref.signatures
    connection.request("GET", "/v1/images/team/box:v1", headers={"If-None-Match": f'"{ref.record}.0000000000000000"'})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read()
    connection.request("GET", "/v1/images/team/box:v1", headers={"If-None-Match": str(answer.headers["ETag"])})
    assert connection.getresponse().status == 304
    connection.close()


def test_a_local_image_is_sent_with_its_signatures(tmp_path: Path, layout: Path, keys: KeyPair, worker: Host) -> None:
    """By the name that it has here, and by no more chunks than the server lacks."""
    with chunk_server(tmp_path / "other") as server, host(tmp_path / "builder") as builder:
        builder.run("convert", f"oci:{layout}:v1", "--name", "team/local:v1")
        builder.run("image", "tag", "team/local:v1", "team/renamed:v1")
        builder.run("image", "sign", "team/renamed:v1", "--key", str(keys.private))
        sent = builder.json("image", "push", "renamed:v1", "--server", server.url)
        assert sent["name"] == "team/renamed:v1"
        assert sent["pushed_chunks"] > 0
        assert builder.json("image", "push", "renamed:v1", "--server", server.url) == {**sent, "pushed_chunks": 0}
        with HttpUpstream(server.url) as upstream:
            there = {image.name: image for image in upstream.images()}
        assert [str(image.id) for image in there.values()] == [sent["id"]]
        assert len(there["team/renamed:v1"].signatures) == 1
        assert "no image" in builder.error("image", "push", "nothing:v1", "--server", server.url)
        builder.run("image", "rm", "team/renamed:v1", "--server", server.url)
        report = builder.json("store", "gc", "--server", server.url)
        assert report["removed_chunks"] > 0
        assert report["freed_bytes"] > 0
        builder.run("image", "push", "renamed:v1", "--server", server.url)
        assert worker.run("run", "--server", server.url, "team/renamed:v1", *RUN).stdout == b"started\n"
