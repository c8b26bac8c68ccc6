"""Requests that nobody would send, over a real server: no 500, nothing stored that is not what it says."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from imaged.chunkstore.fsck import check
from imaged.chunkstore.store import ChunkStore
from imaged.frame import CHUNK_LIMIT_BYTES, FRAME_TYPE, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.serving.access import ROUTES, Need
from imaged.serving.openapi import document
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.synthetic import Synthetic, add_image
from tests.support.tokens import Tokens, write_tokens

EXAMPLES = 8
UPLOADS = 150
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return write_tokens(tmp_path_factory.mktemp("fuzz") / "tokens")


@pytest.fixture(scope="module")
def home(tokens: Tokens) -> Path:
    return tokens.path.parent


@pytest.fixture(scope="module")
def image(home: Path) -> Synthetic:
    with ChunkStore.open(home / "store") as store:
        return add_image(store, "a/app:v1", chunks=4)


@pytest.fixture(scope="module")
def server(home: Path, image: Synthetic, tokens: Tokens) -> Iterator[ChunkServer]:
    with chunk_server(home / "store", token_file=str(tokens.path)) as running:
        yield running
    with ChunkStore.open(home / "store") as store:
        assert store.missing(list(reachable(store, image.id))) == []
    assert check(home / "store").errors == []


@pytest.fixture(scope="module")
def session(tokens: Tokens) -> Iterator[requests.Session]:
    with requests.Session() as opened:
        yield opened


schemathesis.serializer.alias(FRAME_TYPE, "application/octet-stream")
OPERATIONS = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(document()).get_all_operations()
    # A collection for each request would be all that the server does, and there is nothing in one that could be wrong.
    if found.ok().path != "/v1/gc"
}


@pytest.mark.parametrize("label", OPERATIONS)
def test_whatever_is_asked_gets_an_answer_that_is_described(
    server: ChunkServer, session: requests.Session, tokens: Tokens, label: str
) -> None:
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=OPERATIONS[label].as_strategy())
    def ask_it(case: schemathesis.Case) -> None:
        for who in ("admin", "a-admin"):
            response = case.call(base_url=server.url, session=session, headers=tokens.bearer(who), timeout=20)
            case.validate_response(response, checks=CHECKS)

    ask_it()


def mutations(frames: bytes, count: int) -> Iterator[bytes]:
    """Frames with bytes changed, parts doubled, dropped and cut, and bytes that never were frames."""
    chance = random.Random(1)
    for number in range(count):
        raw = bytearray(frames)
        kind = number % 6
        for _ in range(chance.randint(1, 4)):
            at, length = chance.randrange(len(raw)), chance.randint(1, 60)
            if kind == 0:
                raw[at] = chance.randrange(256)
            elif kind == 1:
                raw[at : at + length] = chance.randbytes(length)
            elif kind == 2:
                del raw[at : at + length]
            elif kind == 3:
                raw[at:at] = raw[at : at + length]
            elif kind == 4:
                del raw[max(at, 1) :]
            else:
                raw[:] = chance.randbytes(length * 50)
        yield bytes(raw)


@pytest.mark.parametrize("who", ["write", "b-write"])
def test_random_uploads_store_nothing_but_what_they_say(
    server: ChunkServer, home: Path, tokens: Tokens, who: str
) -> None:
    parts = [random.Random(n).randbytes(3000) * 2 for n in range(3)]
    frames = b"".join(Frame.of(part).pack() for part in parts)
    for raw in mutations(frames, UPLOADS):
        status, _, answer = ask(server, "PUT", "/v1/chunks", raw, **tokens.bearer(who))
        assert status in (200, 400), answer


@pytest.mark.parametrize("who", ["write", "b-write"])
def test_a_chunk_that_is_not_what_it_says_is_refused(server: ChunkServer, tokens: Tokens, who: str) -> None:
    data, other = b"honest " * 1000, b"lying! " * 1000
    chunk = ChunkId.of(data)
    honest = Frame.of(other)
    lies = [
        Frame(FrameHeader(chunk, Codec.RAW, len(other), len(other)), other),
        Frame(FrameHeader(chunk, Codec.ZSTD, len(other), len(honest.payload)), honest.payload),
        Frame(FrameHeader(chunk, Codec.ZSTD, len(data) + 1, len(honest.payload)), honest.payload),
        Frame(FrameHeader(chunk, Codec.ZSTD, 1, len(other)), other),
        Frame(FrameHeader(chunk, Codec.ZSTD, CHUNK_LIMIT_BYTES, 4), b"\x28\xb5\x2f\xfd"),
    ]
    for lie in lies:
        status, _, answer = ask(server, "PUT", "/v1/chunks", lie.pack(), **tokens.bearer(who))
        assert status == 400, answer
        assert ask(server, "GET", f"/v1/chunks/{chunk}", **tokens.bearer(who))[0] == 404


@pytest.mark.parametrize(
    "raw",
    [
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/images HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /v1/images HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /v1/chunks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/images HTTP/1.1\r\n" + b"X-Many: x\r\n" * 500 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/images HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"a" * 70_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: ChunkServer, raw: bytes) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except OSError as error:  # hung up on before all of it was sent
            assert isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN, error
    assert answer == b"" or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
    assert ask(server, "GET", "/healthz")[0] == 200


def test_a_body_over_the_limit_is_refused_wherever_there_is_one(server: ChunkServer, tokens: Tokens) -> None:
    body = b"[" * (5 << 20)
    for (method, path), need in ROUTES.items():
        if method == "GET" or need is Need.PAGE or path in ("/v1/chunks", "/v1/gc"):
            continue
        where = path.replace("{name}", "a.x").replace("{id}", "0" * 20)
        status, _, answer = ask(server, method, where, body, **tokens.bearer("admin"), Content_Type="application/json")
        assert status in ((200, 404) if method == "DELETE" else (413,)), (method, path, status, answer)
