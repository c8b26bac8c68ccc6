from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse import node, protocol, rundir
from fuse.control import ControlServer
from fuse.errors import NodeError
from fuse.starter import start
from imaged.config import Config
from imaged.errors import NotFoundError


def refuse(request: dict[str, Any]) -> dict[str, Any]:
    raise NotFoundError(f"no image {request['name']}", hint="pull it")


def status(request: dict[str, Any]) -> dict[str, Any]:
    return {"pid": 7, "images": {}}


@pytest.fixture(params=["short", "long" * 40])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """Also with a directory whose name leaves no room for a socket address."""
    made = Config(home=tmp_path / "home", run=tmp_path / request.param / "run")
    rundir.make(made)
    return made


@pytest.fixture
def server(config: Config) -> Iterator[ControlServer]:
    started = ControlServer(config, {"status": status, "open": refuse})
    started.bind()
    started.start()
    yield started
    started.close()


def test_a_command_gets_the_result(config: Config, server: ControlServer) -> None:
    connected = node.connect(config)
    assert connected is not None
    assert connected.status() == {"pid": 7, "images": {}}


def test_a_command_gets_error_and_hint(config: Config, server: ControlServer) -> None:
    with pytest.raises(NodeError) as caught:
        node.Node(config).open_image("debian")
    assert (caught.value.message, caught.value.hint) == ("no image debian", "pull it")


def test_no_daemon_is_no_node(config: Config) -> None:
    assert node.connect(config) is None


def test_a_dead_daemon_is_no_node_and_is_replaced(config: Config) -> None:
    with socket.socket(socket.AF_UNIX) as dead, protocol.address(rundir.socket_path(config)) as address:
        dead.bind(address)
    assert node.connect(config) is None
    server = ControlServer(config, {"status": status})
    server.bind()
    server.start()
    assert node.Node(config).status()["pid"] == 7
    server.close()
    assert node.connect(config) is None


def test_another_home_is_refused_clearly(config: Config, server: ControlServer) -> None:
    other = Config(home=config.home / "other", run=config.run)
    with pytest.raises(NodeError, match=r"uses PVISOR_HOME .*, this command .*other"):
        node.Node(other).open_image("debian")
    assert node.Node(other).status()["pid"] == 7


def test_another_version_is_refused_clearly(
    config: Config, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []

    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            with protocol.address(rundir.socket_path(config)) as address:
                connection.connect(address)
            protocol.send_line(connection, {"op": "status", "protocol": 99, "home": ""})
            answers.append(protocol.receive_line(connection))

    ask()
    assert "different versions" in answers[0]["error"]
    assert "node stop" in answers[0]["hint"]
    monkeypatch.setattr("fuse.control.protocol.PROTOCOL", 1)
    older = {"op": "pull", "protocol": 2, "home": ""}
    said = server._result(older, {})
    assert said is not None
    assert "different versions" in said["error"], "before it says that it knows no such operation"


@pytest.mark.parametrize("junk", [b"", b"\n", b"not json\n", b"[1]\n", b'{"op": "status"'])
def test_junk_does_not_disturb_the_server(config: Config, server: ControlServer, junk: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        with protocol.address(rundir.socket_path(config)) as address:
            connection.connect(address)
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert node.Node(config).status()["pid"] == 7


def test_unknown_operations_are_refused(config: Config, server: ControlServer) -> None:
    with pytest.raises(NodeError, match="no operation 'dance'"):
        node.Node(config)._ask("dance", 5.0)


def test_a_daemon_that_does_not_answer_is_reported(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hang(request: dict[str, Any]) -> dict[str, Any]:
        gate.wait(10)
        return {}

    server = ControlServer(config, {"status": hang})
    server.bind()
    server.start()
    monkeypatch.setattr(node, "_STATUS_S", 0.1)
    with pytest.raises(NodeError, match="does not answer within 0 s"):
        node.Node(config).status()
    gate.set()
    server.close()


def test_many_commands_at_once(config: Config, server: ControlServer) -> None:
    results = []
    threads = [threading.Thread(target=lambda: results.append(node.Node(config).status()["pid"])) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [7] * 50


def test_a_lock_that_stays_taken_names_its_holder(config: Config) -> None:
    with rundir.starting(config):
        path = config.run / "node.lock"
        with path.open("rb+") as file, pytest.raises(NodeError, match=r"locked by \d+ for 0 s"):
            rundir.lock(file.fileno(), path, wait_s=0.05)


def test_the_hot_path_imports_only_the_standard_library() -> None:
    import subprocess
    import sys

    code = "import sys, fuse.node, fuse.imagemount; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"lmdb", "zstandard", "blake3", "aiohttp", "urllib3", "mfusepy", "msgpack", "subprocess", "asyncio"}
    assert heavy.isdisjoint(output)


def test_without_root_the_reason_is_said(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NodeError, match="needs root") as caught:
        start(config)
    assert "sudo" in caught.value.hint


def test_those_who_wait_for_a_server_hold_up_nobody_else(config: Config) -> None:
    """However many they are; and what is here is opened without waiting."""
    gate, waiting = threading.Event(), threading.Semaphore(0)

    def hang(request: dict[str, Any]) -> dict[str, Any]:
        waiting.release()
        gate.wait(60)
        return {"id": request["name"]}

    def here(request: dict[str, Any]) -> dict[str, Any] | None:
        return {"id": "local"} if request["name"] == "local" else None

    server = ControlServer(config, {"status": status, "open": here}, {"open": hang, "pull": hang})
    server.bind()
    server.start()
    results: list[str] = []

    def ask(operation: str, number: int) -> None:
        results.append(node.Node(config)._ask(operation, 60.0, name=str(number))["id"])

    threads = [threading.Thread(target=ask, args=(("open", "pull")[n % 2], n), daemon=True) for n in range(100)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        assert waiting.acquire(timeout=30)
    assert node.Node(config).status()["pid"] == 7
    assert node.Node(config)._ask("open", 60.0, name="local") == {"id": "local"}
    assert results == []
    gate.set()
    for thread in threads:
        thread.join(60)
    assert sorted(results, key=int) == [str(number) for number in range(100)]
    server.close()
