"""A server as who operates it sees it: several processes, their end, readiness, metrics, logs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from imaged.chunkstore.store import ChunkStore
from imaged.frame import Frame
from imaged.ids import ChunkId
from tests.support.chunkserver import ROOT, ChunkServer, ask, chunk_server
from tests.support.command import ARGV as COMMAND

pytestmark = pytest.mark.network
DATA = [number.to_bytes(4, "big") * 16384 for number in range(1, 65)]
IDS = [ChunkId.of(data) for data in DATA]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("operations") / "store"
    with ChunkStore.open(root) as opened:
        for data in DATA:
            opened.put(data)
    return root


@pytest.fixture(scope="module")
def several(store: Path) -> Iterator[ChunkServer]:
    with chunk_server(store, workers=2) as running:
        yield running


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def status(server: ChunkServer, path: str) -> int:
    """0 when nobody answers."""
    try:
        return ask(server, "GET", path)[0]
    except OSError:
        return 0


def metrics(server: ChunkServer) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value."""
    code, headers, text = ask(server, "GET", "/metrics")
    assert code == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(found: dict[str, dict[tuple[tuple[str, str], ...], float]], name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for key, value in found.get(name, {}).items() if wanted <= set(key))


def test_several_processes_answer_and_share_their_numbers(several: ChunkServer) -> None:
    assert len(children(several.process.pid)) == 2
    before = total(metrics(several), "pvisor_http_requests_total", route="/v1/chunks/{id}", status="200")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", several.port)))
                   for _ in range(16)]  # fmt: skip
        for client in clients:
            client.connect()
        for chunk in IDS[:4]:
            for client in clients:
                client.request("GET", f"/v1/chunks/{chunk}")
                assert Frame.parse(client.getresponse().read()).id == chunk
        assert total(metrics(several), "pvisor_processes") == 2

        def told() -> bool:
            """A process tells the others each second."""
            found = metrics(several)
            after = total(found, "pvisor_http_requests_total", route="/v1/chunks/{id}", status="200")
            return after == before + 64 and total(found, "pvisor_http_connections") >= 16

        wait_until(told, "the numbers of both processes")
    found = metrics(several)
    seconds = found["pvisor_http_request_seconds_bucket"]
    key = tuple(sorted({"method": "GET", "route": "/v1/chunks/{id}", "le": "+Inf"}.items()))
    assert seconds[key] >= 64
    assert total(found, "pvisor_store_chunks") == len(DATA)


def test_what_one_process_stored_the_other_has(several: ChunkServer) -> None:
    new = [Frame.of(os.urandom(4096)) for _ in range(8)]
    for frame in new:
        assert ask(several, "PUT", "/v1/chunks", frame.pack())[0] == 200
        for _ in range(6):
            assert ask(several, "GET", f"/v1/chunks/{frame.id}")[0] == 200


def test_a_process_that_dies_is_started_again(several: ChunkServer) -> None:
    before = children(several.process.pid)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(set(children(several.process.pid)) - {before[0]}) == 2, "another process")
    wait_until(lambda: all(status(several, "/readyz") == 200 for _ in range(4)), "answers")
    assert total(metrics(several), "pvisor_http_requests_total") > 0


def test_without_the_supervisor_the_others_end(store: Path, tmp_path: Path) -> None:
    with chunk_server(store, workers=2, environ={"TMPDIR": str(tmp_path)}) as server:
        pids = children(server.process.pid)
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids), "the end")
    assert not list(tmp_path.iterdir())


def test_a_store_that_can_not_be_opened_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    with pytest.raises(AssertionError, match="ended with status 1"), chunk_server(tmp_path / "store", workers=2):
        pass


@pytest.mark.parametrize("workers", [1, 2])
def test_readyz_says_no_before_connections_are_refused(store: Path, tmp_path: Path, workers: int) -> None:
    with chunk_server(store, workers=workers, drain_s=600, environ={"TMPDIR": str(tmp_path)}) as server:
        pids = children(server.process.pid)
        assert status(server, "/readyz") == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(status(server, "/readyz") == 503 for _ in range(2 * workers)), "a no")
        assert status(server, f"/v1/chunks/{IDS[0]}") == 200
        assert server.stop() == 0
        assert status(server, "/healthz") == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not list(tmp_path.iterdir())


def test_an_answer_under_way_is_finished(store: Path) -> None:
    with chunk_server(store) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(20)
        client.connect(("127.0.0.1", server.port))
        body = b"".join(IDS) * 4
        head = "POST /v1/chunks/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = client.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(server, "/healthz") == 0, "no new connections")
        while data := client.recv(1 << 16):
            answer += data
        assert server.process.wait(20) == 0
    whole = answer.partition(b"\r\n\r\n")[2]
    expected = b"".join(Frame.of(data).pack() for data in DATA) * 4
    assert whole == expected


def test_logs_are_json_and_tell_no_secrets(store: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output, chunk_server(store, stderr=output, log_format="json", log_requests=True) as server:
        secret = {"Authorization": "Bearer sesame-open", "X_Request_Id": "from-balancer.1"}
        assert ask(server, "GET", f"/v1/chunks/{IDS[0]}", **secret)[0] == 200
        assert ask(server, "GET", "/v1/images?token=sesame-open", **secret)[0] == 200
        code, headers, _ = ask(server, "GET", "/v1/images/none", **secret)
        assert (code, headers["x-request-id"]) == (404, "from-balancer.1")
        code, headers, _ = ask(server, "GET", "/v1/images/none", X_Request_Id="no good id")
        assert (code, len(headers["x-request-id"])) == (404, 12)
        assert "x-request-id" not in ask(server, "GET", "/healthz", **secret)[1]
        for method, path, refused, more in (
            ("GET", "/nothing/here", 404, {}),
            ("PATCH", "/v1/gc", 405, {}),
            ("POST", "/v1/chunks/missing", 413, {}),
            ("POST", "/v1/leases", 415, {"Content_Encoding": "gzip"}),
        ):
            body = b"x" * (5 << 20) if refused == 413 else b"{}" if more else None
            code, headers, _ = ask(server, method, path, body, **secret, **more)
            assert (code, headers["x-request-id"]) == (refused, "from-balancer.1")
        server.stop()
    text = log.read_text()
    assert "sesame" not in text
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    answered = {line["path"]: line for line in lines if "path" in line}
    assert {f"/v1/chunks/{IDS[0]}", "/v1/images", "/v1/images/none"} <= answered.keys()
    chunk = answered[f"/v1/chunks/{IDS[0]}"]
    assert (chunk["method"], chunk["status"], chunk["peer"], chunk["level"]) == ("GET", 200, "127.0.0.1", "info")
    assert chunk["sent_bytes"] > Frame.of(DATA[0]).stored_bytes
    assert chunk["seconds"] >= 0
    assert {line.get("request_id") for line in lines if line.get("path") == "/v1/images/none"} >= {"from-balancer.1"}
    for path in ("/nothing/here", "/v1/gc", "/v1/chunks/missing", "/v1/leases"):
        assert answered[path]["request_id"] == "from-balancer.1"
    assert "request_id" not in answered["/healthz"]


def test_the_command_takes_the_options(store: Path) -> None:
    argv = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--store", str(store), "--workers=2", "--drain=0", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        client.request("GET", "/readyz?for=reads")
        assert client.getresponse().status == 200
        client.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.fixture
def little(tmp_path: Path) -> Iterator[Path]:
    """A place for temporary files that has no room for the numbers of one process."""
    place = tmp_path / "little"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_without_room_for_numbers_requests_are_answered(store: Path, little: Path) -> None:
    """They lie in mapped files: a page that can not be had would end the process by a signal."""
    with chunk_server(store, workers=2, environ={"TMPDIR": str(little)}) as server:
        before = children(server.process.pid)
        with contextlib.suppress(OSError), (little / "rest").open("wb") as rest:
            while True:
                rest.write(b"\1" * 4096)
                rest.flush()
        for path in (
            "/healthz",
            f"/v1/chunks/{IDS[0]}",
            "/v1/images",
            "/v1/images/none:1",
            "/v1/jobs",
            "/",
            "/metrics",
        ):
            for _ in range(4):
                assert status(server, path) in (200, 404), path
        assert children(server.process.pid) == before
