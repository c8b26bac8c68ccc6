"""The HTTP client against answers written by hand, in any cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from imaged.errors import InvalidNameError
from imaged.fetching.httpcall import Call, HttpBrokenError
from imaged.fetching.httppool import ConnectionPool

BODY = bytes(range(256)) * 40
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 10240\r\nX-A: b: c\r\n\r\n" + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    b"100;x=y\r\n" + BODY[:256] + b"\r\n2700\r\n" + BODY[256:] + b"\r\n0\r\nTrailer: x\r\n\r\n"
)
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\n" + BODY


@contextlib.contextmanager
def answering(*answers: bytes | list[bytes]) -> Iterator[tuple[ConnectionPool, list[bytes]]]:
    """A server that gives these answers, one a request, a list on one connection; what it was sent is noted."""
    requests: list[bytes] = []

    def run() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                for part in answer if isinstance(answer, list) else [answer]:
                    head = b""
                    while not head.endswith(b"\r\n\r\n"):
                        data = connection.recv(65536)
                        if not data:
                            break
                        head += data
                    requests.append(head)
                    for start in range(0, len(part), step):
                        connection.sendall(part[start : start + step])

    step = 1000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        pool = ConnectionPool(f"http://127.0.0.1:{listener.getsockname()[1]}/base/", timeout_s=5)
        yield pool, requests
        pool.close()
        thread.join(10)
        assert not thread.is_alive()


def get(pool: ConnectionPool, step: int = 777) -> bytes:
    with pool.request("GET", "/x", None, {"A": "b"}) as answer:
        parts = []
        while part := answer.read(step):
            parts.append(part)
        answer.finish()
    return b"".join(parts)


@pytest.mark.parametrize("raw", [LENGTH, CHUNKED, TO_THE_END, b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH])
@pytest.mark.parametrize("step", [1, 255, 256, 257, 100_000])
def test_bodies_of_every_kind(raw: bytes, step: int) -> None:
    with answering(raw) as (pool, requests):
        assert get(pool, step) == BODY
        assert requests[0].startswith(b"GET /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nA: b\r\n" in requests[0]


def test_a_connection_is_used_again_and_a_lost_one_replaced() -> None:
    with answering([LENGTH, CHUNKED, LENGTH], LENGTH) as (pool, requests):
        for _ in range(4):
            assert get(pool) == BODY
        assert len(requests) >= 4


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"1" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        LENGTH[:-1],
        CHUNKED[:-1],
        CHUNKED[:-20],
        CHUNKED[:5000],
        CHUNKED.replace(b"2700", b"zz"),
        CHUNKED.replace(b"2700", b"-5"),
        CHUNKED.replace(b"2700", b"0x27"),
        CHUNKED.replace(b"2700", b"2_7"),
        CHUNKED.replace(b"2700", b"1" * 900),
        CHUNKED.replace(b"2700", b"26ff"),
    ],
)
def test_broken_answers(raw: bytes) -> None:
    with answering(raw) as (pool, _), pytest.raises(HttpBrokenError):
        get(pool)


def test_more_than_asked_for_is_noticed() -> None:
    with answering(LENGTH) as (pool, _), pytest.raises(HttpBrokenError, match="after the end"):  # noqa: SIM117
        with pool.request("GET", "/x", None, {}) as answer:
            answer.read(100)
            answer.finish()


def test_an_answer_without_a_body_and_one_not_read() -> None:
    none = b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"
    with answering([none, LENGTH], LENGTH) as (pool, _):
        with pool.request("GET", "/x", None, {}) as answer:
            assert (answer.status, answer.is_over, answer.header("etag")) == (304, True, "x")
        with pool.request("GET", "/x", None, {}) as answer:
            assert answer.read(5) == BODY[:5]
        assert get(pool) == BODY


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pool = ConnectionPool(f"http://127.0.0.1:{port}", timeout_s=1)
    with pytest.raises(HttpBrokenError, match="refused"):
        get(pool)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "http://",
        "http://x:99999",
        "http://x:0",
        "x:80",
        "http://a..b",
        f"http://{'a' * 64}.test",
        "http://[::1",
        "http://a b",
        "http://a\0b",
        "http://a\ud800b",
        "http://a/\ud800",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InvalidNameError, match="is not an http"):
        ConnectionPool(url, timeout_s=1)


@pytest.mark.parametrize(
    ("url", "address", "host"),
    [
        ("http://b\u00fccher:80", ("xn--bcher-kva", 80), "xn--bcher-kva:80"),
        ("http://b\u00fccher.test/", ("xn--bcher-kva.test", 80), "xn--bcher-kva.test"),
        ("https://user:word@Host.test", ("host.test", 443), "host.test"),
        ("http://[::1]:7878", ("::1", 7878), "[::1]:7878"),
        ("http://[fe80::1%eth0]", ("fe80::1%eth0", 80), "[fe80::1%eth0]"),
        ("http://under_score.:7878", ("under_score.", 7878), "under_score.:7878"),
    ],
)
def test_hosts_as_they_are_asked_for(url: str, address: tuple[str, int], host: str) -> None:
    pool = ConnectionPool(url, timeout_s=1)
    assert pool._address == address
    assert f"\r\nHost: {host}\r\n" in pool._tail


def test_a_prefix_is_sent_as_ascii() -> None:
    with answering(LENGTH) as (pool, requests):
        port = pool._address[1]
        odd = ConnectionPool(f"http://127.0.0.1:{port}/b\u00fc cher/%2F/", timeout_s=5)
        assert get(odd) == BODY
        odd.close()
        assert requests[0].startswith(b"GET /b%C3%BC%20cher/%2F/x HTTP/1.1\r\n")


def cancelled_soon(call: Call, *, when: threading.Event) -> threading.Thread:
    def run() -> None:
        assert when.wait(20)
        call.cancel()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("sent", [b"", LENGTH[:40], LENGTH[:5000]], ids=["nothing", "half a head", "half a body"])
def test_another_thread_ends_a_request_that_hangs(sent: bytes) -> None:
    call, asked, over = Call(), threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(sent)
            asked.set()
            over.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        ender = cancelled_soon(call, when=asked)
        pool = ConnectionPool(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=60)
        try:
            with pytest.raises(HttpBrokenError), pool.request("GET", "/", None, {}, call=call) as answer:
                answer.read(len(BODY))
            assert call.received_bytes <= len(sent)
            assert bool(call.first_byte_s) == bool(call.received_bytes)
        finally:
            over.set()
            server.join()
            ender.join()
            pool.close()


def test_another_thread_ends_a_request_that_can_not_connect() -> None:
    """A listener whose queue is full answers no further connection."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        begun = threading.Event()

        class Told(Call):
            def attach(self, used: socket.socket) -> None:
                super().attach(used)
                begun.set()

        call = Told()
        ender = cancelled_soon(call, when=begun)
        pool = ConnectionPool(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=60)
        with pytest.raises(HttpBrokenError), pool.request("GET", "/", None, {}, call=call):
            raise AssertionError("answered")
        ender.join()


def test_a_call_that_is_over_ends_nothing() -> None:
    """Its connection may carry another request by then."""
    with answering([LENGTH, LENGTH]) as (pool, requests):
        first = Call()
        for call in (first, Call()):
            with pool.request("GET", "/", None, {}, call=call) as answer:
                first.cancel() if call is not first else None
                assert answer.read(len(BODY)) == BODY
            assert call.received_bytes == len(LENGTH)
            assert call.sent_s <= call.first_byte_s <= call.heard_s
        assert len(requests) == 2


def test_a_cancelled_call_asks_nothing() -> None:
    with answering(LENGTH) as (pool, requests):
        call = Call()
        call.cancel()
        with pytest.raises(HttpBrokenError, match="given up"), pool.request("GET", "/", None, {}, call=call):
            pass
        assert requests == []
        with pool.request("GET", "/", None, {}) as answer:
            assert answer.read(len(BODY)) == BODY


def test_a_fresh_call_uses_no_idle_connection() -> None:
    with answering(LENGTH, LENGTH) as (pool, _):
        for _ in range(2):
            with pool.request("GET", "/", None, {}, call=Call(fresh=True)) as answer:
                assert answer.read(len(BODY)) == BODY


def test_an_answer_that_takes_too_long_breaks_off() -> None:
    call = Call(longest_s=-1.0)
    with answering(LENGTH) as (pool, _), pytest.raises(HttpBrokenError, match="more than"):
        pool.request("GET", "/x", None, {}, call=call).__enter__()
