"""The node daemon's token: it comes with commands, reaches the configured server only, and is shown nowhere."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from imaged.serving.tokenfile import add_token, revoke_token
from imaged.serving.tokens import Scope, Token, TokenFile
from tests.support.chunkserver import ask, chunk_server
from tests.support.command import Host, busybox_layout, host
from tests.support.oci import make_tar
from tests.support.stage_process import processes_with
from tests.support.tokens import write_tokens

pytestmark = [pytest.mark.root, pytest.mark.fuse]


def test_the_daemon_takes_the_token_of_the_latest_command(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    chance = random.Random(1)
    # A read may bring some of what lies next to it: the last one is out of reach.
    files = [(f"file{n}", chance.randbytes(300_000)) for n in range(20)]
    layout = busybox_layout(tmp_path, make_tar(*files))
    Host(tmp_path / "origin").run("convert", f"oci:{layout}:v1", "--name", "a/box:1")
    first, second = tokens.secrets["a-read"], Token.new(Scope.READ, namespace="a")
    with (
        chunk_server(tmp_path / "origin/home/store", token_file=str(tokens.path)) as server,
        host(tmp_path / "worker", server.url, PVISOR_TOKEN=first) as worker,
    ):
        Host(worker.root, server.url).error("pull", "--lazy", "box:1")
        shown = worker.run("run", "box:1", "--", "sh", "-c", "env; cat /proc/*/environ; md5sum /file0").stdout
        token = TokenFile(tokens.path).find(first)
        assert token is not None
        revoke_token(tokens.path, token.id)
        add_token(tokens.path, second[1])
        deadline = time.monotonic() + 20
        while ask(server, "GET", "/v1/images", Authorization=f"Bearer {first}")[0] == 200:
            assert time.monotonic() < deadline
        # What is here goes on without a server; the rest takes a token that counts.
        assert worker.run("run", "a/box:1", "--", "sh", "-c", "md5sum /file0").stdout
        failed = worker.run("run", "a/box:1", "--", "sh", "-c", "md5sum /file19", code=1)
        assert b"Input/output error" in failed.stderr
        renewed = Host(worker.root, server.url, {"PVISOR_TOKEN": second[0]})
        assert renewed.run("run", "a/box:1", "--", "sh", "-c", "md5sum /file1 /file19").stdout
        shown += failed.stderr + json.dumps(renewed.json("node", "status")).encode()
        assert [processes_with(secret) for secret in (first, second[0])] == [[], []]
        shown += (worker.root / "run/node.log").read_bytes()
        for secret in (first, second[0]):
            assert secret.encode() not in shown


def test_a_remembered_server_gets_no_token(tmp_path: Path) -> None:
    """An image remembers where it came from. That may be anybody's server: it is asked, and shown nothing."""
    tokens = write_tokens(tmp_path / "tokens")
    Host(tmp_path / "origin").run("convert", f"oci:{busybox_layout(tmp_path)}:v1", "--name", "box:1")
    store, worker = tmp_path / "origin/home/store", tmp_path / "worker"
    with chunk_server(store) as other:
        Host(worker, other.url).run("pull", "--lazy", "box:1")
    # The same address takes a token now, and the command is one of another server.
    with chunk_server(store, port=other.port, token_file=str(tokens.path)) as gated:
        told = {"PVISOR_TOKEN": tokens.secrets["read"]}
        export = ("image", "export", "box:1", str(tmp_path / "exported"))
        refused = Host(worker, "http://127.0.0.1:9", told).run(*export, code=1)
        assert b"takes a token, and the request has none" in refused.stderr
        Host(worker, gated.url, told).run(*export)
