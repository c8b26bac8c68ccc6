"""Requests for chunks that are answered without aiohttp: the same bytes as with it, whatever is asked and however it
arrives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from imaged.chunkstore.store import ChunkStore
from imaged.frame import Frame
from imaged.ids import ChunkId
from imaged.serving.tokens import Scope, Token
from tests.support.bothpaths import BothPaths, both_paths

CHUNKS = [bytes([number]) * 4096 + number.to_bytes(4, "big") * 9000 for number in range(1, 9)]
IDS = [ChunkId.of(data) for data in CHUNKS]
ABSENT = ChunkId.of(b"absent")
HOST = b"Host: server:7878\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fast") / "store"
    with ChunkStore.open(root) as opened:
        for data in CHUNKS:
            opened.put(data)
    return root


@pytest.fixture(scope="module")
def servers(store: Path) -> Iterator[BothPaths]:
    with both_paths(store) as running:
        yield running


def get(path: object, headers: bytes = HOST, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return f"{method} {path} {version}\r\n".encode() + headers + b"\r\n"


def one(chunk: ChunkId, headers: bytes = HOST, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return get(f"/v1/chunks/{chunk}", headers, method, version)


def batch(body: bytes, headers: bytes = HOST, kind: str = "application/octet-stream") -> bytes:
    head = f"POST /v1/chunks/batch HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + headers + b"\r\n" + body


FAST = {
    "a chunk": one(IDS[0]),
    "a chunk, headers of ours": one(IDS[1], HOST + b"User-Agent: pvisor\r\nAccept-Encoding: identity\r\n"),
    "a chunk, kept alive": one(IDS[3], HOST + b"Connection: Keep-Alive\r\n"),
    "a batch": batch(b"".join(IDS)),
    "a batch of one twice": batch(IDS[4] * 2),
    "a long batch": batch(b"".join(IDS) * 32),
}
SLOW = {
    "nothing": b"",
    "absent": one(ABSENT),
    "no host": one(IDS[2], b""),
    "no id": get("/v1/chunks/xyz"),
    "upper case": get(f"/v1/chunks/{str(IDS[0]).upper()}"),
    "longer": get(f"/v1/chunks/{IDS[0]}0"),
    "query": get(f"/v1/chunks/{IDS[0]}?a=b"),
    "absolute": get(f"http://server/v1/chunks/{IDS[0]}"),
    "escaped": get(f"/v1/chunks/%61{str(IDS[0])[1:]}"),
    "head": one(IDS[0], method="HEAD"),
    "put": one(IDS[0], method="PUT"),
    "old": one(IDS[0], version="HTTP/1.0"),
    "old, kept": one(IDS[0], HOST + b"Connection: keep-alive\r\n", version="HTTP/1.0"),
    "odd version": one(IDS[0], version="HTTP/1.2"),
    "known": one(IDS[0], HOST + f'If-None-Match: "{IDS[0]}"\r\n'.encode()),
    "any known": one(IDS[0], HOST + b"If-None-Match: *\r\n"),
    "other known": one(IDS[0], HOST + f'If-None-Match: "{IDS[1]}"\r\n'.encode()),
    "no cache": one(IDS[0], HOST + b"Cache-Control: no-cache\r\n"),
    "with a body": one(IDS[0], HOST + b"Content-Length: 3\r\n") + b"abc",
    "with an empty body": one(IDS[0], HOST + b"Content-Length: 0\r\n"),
    "chunked body": one(IDS[0], HOST + b"Transfer-Encoding: chunked\r\n") + b"3\r\nabc\r\n0\r\n\r\n",
    "two hosts": one(IDS[0], HOST + HOST),
    "folded": one(IDS[0], HOST + b"X: a\r\n b\r\n"),
    "space in a name": one(IDS[0], HOST + b"X : a\r\n"),
    "a line that is no header": one(IDS[0], HOST + b"what\r\n"),
    "bare line feeds": one(IDS[0]).replace(b"\r\n", b"\n"),
    "zero byte": one(IDS[0], HOST + b"X: \0\r\n"),
    "high bytes": one(IDS[0], HOST + b"X: \xc3\xbc\r\n"),
    "close": one(IDS[0], HOST + b"Connection: close\r\n"),
    "not HTTP": b"\x16\x03\x01\x00\xa5",
    "batch with one absent": batch(IDS[0] + ABSENT),
    "batch of half an id": batch(IDS[0] + b"x"),
    "empty batch": batch(b""),
    "batch as JSON": batch(f'{{"ids": ["{IDS[0]}"]}}'.encode(), kind="application/json"),
    "batch of odd kind": batch(IDS[0], kind="application/octet-stream; a=b"),
    "batch over the fast limit": batch(IDS[0] * 300),
    "batch over the limit": batch(IDS[0] * 5000),
    "batch expecting": batch(IDS[0], HOST + b"Expect: 100-continue\r\n"),
    "batch no cache": batch(IDS[0] * 20, HOST + b"Cache-Control: no-cache\r\n"),
    "batch with two lengths": batch(IDS[0], HOST + b"Content-Length: 5\r\n"),
    "batch with a signed length": batch(IDS[0]).replace(b"Length: 32", b"Length: +32"),
    "other post": get("/v1/chunks/missing", HOST + b"Content-Length: 0\r\n", "POST"),
}


ENDING = {
    "old", "odd version", "close", "not HTTP", "space in a name", "a line that is no header", "bare line feeds",
    "zero byte", "folded", "no host", "two hosts", "batch with two lengths", "batch with a signed length",
}  # fmt: skip
"""After these a connection ends, some with a text that depends on how much had come."""


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_answers_are_those_of_the_slow_path(servers: BothPaths, name: str) -> None:
    request = FAST.get(name, SLOW.get(name, b""))
    before = servers.answered_fast
    parts = [request] if name in ENDING else [request, LAST]
    answer = servers.ask(servers.fast, parts)
    assert answer == servers.ask(servers.slow, parts)
    assert answer.startswith(b"HTTP/1.")
    # Sent together they may arrive together, and are then not this path's.
    if name in SLOW:
        assert servers.answered_fast == before


@pytest.mark.parametrize("name", FAST)
def test_the_fast_path_is_taken(servers: BothPaths, name: str) -> None:
    before = servers.answered_fast
    with socket.create_connection(("127.0.0.1", servers.fast), timeout=20) as client:
        for _ in range(3):
            client.sendall(FAST[name])
            read_answer(client)
    assert servers.answered_fast == before + 3


def read_answer(client: socket.socket) -> bytes:
    """One answer with a Content-Length, body and all."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += client.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        data = client.recv(1 << 20)
        assert data
        body += data
    return head + b"\r\n\r\n" + body


REQUESTS = [request for name, request in (FAST | SLOW).items() if name not in ENDING]


@hypothesis.given(data=st.data())
@hypothesis.settings(
    max_examples=80, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_sequence_in_any_pieces(servers: BothPaths, data: st.DataObject) -> None:
    """Pipelined, split anywhere, fast and slow mixed: never another byte, never in another order."""
    sent = b"".join(data.draw(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5))) + LAST
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    parts = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert servers.ask(servers.fast, parts) == servers.ask(servers.slow, parts)


def test_a_fast_answer_after_a_slow_one_and_the_other_way_round(servers: BothPaths) -> None:
    before = servers.answered_fast
    with socket.create_connection(("127.0.0.1", servers.fast), timeout=20) as client:
        for request in (FAST["a chunk"], SLOW["batch as JSON"], FAST["a batch"], SLOW["absent"], FAST["a chunk"]):
            client.sendall(request)
            read_answer(client)
    assert servers.answered_fast == before + 3


def test_a_batch_request_in_two_pieces(servers: BothPaths) -> None:
    request = FAST["a long batch"]
    before = servers.answered_fast
    with socket.create_connection(("127.0.0.1", servers.fast), timeout=20) as client:
        client.sendall(request[:200])
        client.sendall(request[200:])
        whole = read_answer(client)
        client.sendall(request)
        assert read_answer(client).partition(b"\r\n\r\n")[2] == whole.partition(b"\r\n\r\n")[2]
    assert servers.answered_fast >= before + 1


def test_a_client_that_reads_late_gets_all_in_order(servers: BothPaths) -> None:
    """More than the buffers of the sockets hold: what comes behind waits, and is answered behind."""
    request = FAST["a long batch"]
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(20)
        client.connect(("127.0.0.1", servers.fast))
        client.sendall(request)
        client.sendall(request)
        client.sendall(FAST["a chunk"])
        expected = b"".join(frame_of(chunk) for chunk in IDS * 32)
        buffered = b""
        for _ in range(2):
            while b"\r\n\r\n" not in buffered:
                buffered += client.recv(4096)
            buffered = buffered.partition(b"\r\n\r\n")[2]
            while len(buffered) < len(expected):
                buffered += client.recv(1 << 16)
            assert buffered.startswith(expected)
            buffered = buffered[len(expected) :]
        while not buffered.endswith(frame_of(IDS[0])):
            buffered += client.recv(1 << 16)


def frame_of(chunk: ChunkId) -> bytes:
    return Frame.of(CHUNKS[IDS.index(chunk)]).pack()


def test_clients_that_leave_half_way_cost_nothing(servers: BothPaths) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", servers.fast), timeout=20) as client:
            client.sendall(FAST["a long batch"] * 2)
            client.recv(100)
    assert servers.ask(servers.fast, [FAST["a chunk"], LAST]) == servers.ask(servers.slow, [FAST["a chunk"], LAST])


def test_tokens_are_asked_for(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    secret, token = Token.new(Scope.READ, namespace=None)
    stranger, of_team = Token.new(Scope.READ, namespace="team")
    file.write_text(f"{token.line()}\n{of_team.line()}\n")
    file.chmod(0o600)
    with both_paths(store, token_file=str(file)) as servers:
        for given, fast in ((secret, True), (stranger, False), ("wrong", False), ("", False)):
            header = HOST + (f"Authorization: Bearer {given}\r\n".encode() if given else b"")
            for request in (one(IDS[0], header), batch(b"".join(IDS), header)):
                before = servers.answered_fast
                answers = []
                for port in (servers.fast, servers.slow):
                    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                        client.sendall(request)
                        answers.append(read_answer(client))
                assert servers.answered_fast == before + fast
                ours, theirs = (answer.partition(b"\r\n\r\n") for answer in answers)
                assert (ours[0].split(b"\r\n")[0], ours[2]) == (theirs[0].split(b"\r\n")[0], theirs[2])


def test_what_is_uploaded_meanwhile_and_what_is_damaged(tmp_path: Path) -> None:
    """A batch that was found once is looked up again when the store has changed."""
    root = tmp_path / "store"
    with ChunkStore.open(root) as opened:
        for data in CHUNKS[:2]:
            opened.put(data)
        opened.flush()
        with both_paths(root) as servers:
            request = batch(b"".join(IDS[:2]))
            first = servers.ask(servers.fast, [request, LAST])
            opened.put(CHUNKS[2])
            opened.flush()
            location = opened.index.find(IDS[1])
            assert location is not None
            opened.index.drop([(IDS[1], location)], forget_memos=False)
            assert servers.ask(servers.fast, [request, LAST]) == servers.ask(servers.slow, [request, LAST]) != first
