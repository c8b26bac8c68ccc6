"""The monitor connection against a made-up QEMU: answers, events, refusals, and ends at any point."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vmm.errors import QemuError, QemuTimeoutError
from vmm.process import Process
from vmm.qmp import Monitor

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 22}, "package": "Debian 1:7.2"}}}
LONG_S = 60.0
Reply = Callable[[dict[str, Any], socket.socket], None]


def send(connection: socket.socket, *messages: dict[str, Any]) -> None:
    connection.sendall(b"".join(json.dumps(message).encode() + b"\r\n" for message in messages))


def answer(request: dict[str, Any], value: Any) -> dict[str, Any]:
    return {"return": value, "id": request["id"]}


class FakeQemu:
    """A process that lives, and a thread that answers at its monitor socket."""

    def __init__(self, directory: Path) -> None:
        self.process = Process.spawn(["/bin/sleep", "600"], directory, inherit=())
        self.path = directory / "qmp.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.thread: threading.Thread | None = None

    def serve(
        self, reply: Reply, *, greeting: dict[str, Any] = GREETING, before: Sequence[dict[str, Any]] = ()
    ) -> None:
        def run() -> None:
            connection, _ = self.listener.accept()
            with connection, connection.makefile("rb") as lines:
                send(connection, *before, greeting)
                for line in lines:
                    request = json.loads(line)
                    if request["execute"] == "qmp_capabilities":
                        send(connection, answer(request, {}))
                        continue
                    reply(request, connection)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def connect(self, timeout_s: float = LONG_S) -> Monitor:
        return Monitor(self.path, self.process, timeout_s=timeout_s)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeQemu]:
    made = FakeQemu(tmp_path)
    yield made
    made.process.kill()
    made.process.close()
    made.listener.close()


def test_an_answer_is_returned_and_events_before_it_are_kept(fake: FakeQemu) -> None:
    def reply(request: dict[str, Any], connection: socket.socket) -> None:
        send(
            connection,
            {"event": "STOP", "data": {"n": 1}},
            {"event": "RESUME"},
            answer(request, [request["arguments"]]),
        )

    fake.serve(reply)
    monitor = fake.connect()
    assert monitor.version == "Debian 1:7.2"
    assert monitor.execute("do", {"a": "ä"}, timeout_s=LONG_S) == [{"a": "ä"}]
    assert monitor.event("RESUME", timeout_s=LONG_S) == {}
    monitor.close()


def test_a_later_event_is_awaited(fake: FakeQemu) -> None:
    def reply(request: dict[str, Any], connection: socket.socket) -> None:
        send(connection, answer(request, {}), {"event": "A"}, {"event": "MIGRATION", "data": {"status": "completed"}})

    fake.serve(reply)
    monitor = fake.connect()
    monitor.execute("do", timeout_s=LONG_S)
    assert monitor.event("MIGRATION", timeout_s=LONG_S) == {"status": "completed"}
    with pytest.raises(QemuTimeoutError, match="the event NEVER"):
        monitor.event("NEVER", timeout_s=0.05)


def test_a_refusal_has_the_words_of_qemu(fake: FakeQemu) -> None:
    def reply(request: dict[str, Any], connection: socket.socket) -> None:
        send(connection, {"error": {"class": "GenericError", "desc": "No space left"}, "id": request["id"]})

    fake.serve(reply)
    monitor = fake.connect()
    with pytest.raises(QemuError, match="QEMU refused save: No space left"):
        monitor.execute("save", timeout_s=LONG_S)


def test_an_answer_in_pieces_is_one(fake: FakeQemu) -> None:
    def reply(request: dict[str, Any], connection: socket.socket) -> None:
        for byte in json.dumps(answer(request, "x" * 100)).encode() + b"\r\n":
            connection.sendall(bytes([byte]))

    fake.serve(reply)
    assert fake.connect().execute("do", timeout_s=LONG_S) == "x" * 100


def test_an_interrupt_ends_the_connection(fake: FakeQemu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asked is answered to nobody here."""
    asked = threading.Event()
    fake.serve(lambda request, connection: asked.set())
    monitor = fake.connect()

    def interrupted(*arguments: Any) -> None:
        assert asked.wait(LONG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(Monitor, "_poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        monitor.execute("stop", timeout_s=LONG_S)
    assert monitor.closed


def test_the_answer_to_a_command_of_an_earlier_connection_is_none(fake: FakeQemu) -> None:
    """QEMU gives it to whoever is connected when the command is done, before or after the greeting."""
    late = {"return": "of another", "id": "0badcafe-2"}

    def reply(request: dict[str, Any], connection: socket.socket) -> None:
        send(connection, late, {"error": {"desc": "of another, too"}, "id": 3}, answer(request, "own"))

    fake.serve(reply, before=[late])
    monitor = fake.connect()
    assert (monitor.version, monitor.execute("cont", timeout_s=LONG_S)) == ("Debian 1:7.2", "own")
    assert monitor.execute("stop", timeout_s=LONG_S) == "own"


def test_no_answer_is_a_timeout_that_says_what_was_awaited(fake: FakeQemu) -> None:
    fake.serve(lambda request, connection: None)
    monitor = fake.connect()
    with pytest.raises(QemuTimeoutError, match="an answer to stop"):
        monitor.execute("stop", timeout_s=0.05)


def test_another_command_at_the_monitor_is_a_timeout(fake: FakeQemu) -> None:
    with pytest.raises(QemuTimeoutError, match="its greeting") as caught:
        fake.connect(timeout_s=0.05)
    assert "another command" in caught.value.hint


def test_a_killed_qemu_ends_the_wait(fake: FakeQemu) -> None:
    fake.serve(lambda request, connection: os.kill(fake.process.pid, 9))
    monitor = fake.connect()
    with pytest.raises(QemuError, match=r"signal 9 \(SIGKILL\)") as caught:
        monitor.execute("stop", timeout_s=LONG_S)
    assert not isinstance(caught.value, QemuTimeoutError)


def test_a_hang_up_waits_for_the_cause(fake: FakeQemu) -> None:
    def reply(request: dict[str, Any], connection: socket.socket) -> None:
        connection.shutdown(socket.SHUT_RDWR)
        os.kill(fake.process.pid, 11)

    fake.serve(reply)
    monitor = fake.connect()
    with pytest.raises(QemuError, match=r"signal 11 \(SIGSEGV\)"):
        monitor.execute("stop", timeout_s=LONG_S)


def test_no_monitor_of_a_dead_qemu_has_the_cause(fake: FakeQemu) -> None:
    fake.listener.close()
    fake.process.kill()
    with pytest.raises(QemuError, match=r"signal 9"):
        fake.connect()


def test_no_monitor_of_a_living_qemu_is_said(fake: FakeQemu) -> None:
    fake.listener.close()
    with pytest.raises(QemuError, match="lives and has no monitor"):
        fake.connect()


@pytest.mark.parametrize("raw", [b"no json\n", b"[1]\n", b'{"hello": 1}\n'])
def test_nonsense_is_an_error(fake: FakeQemu, raw: bytes) -> None:
    def run() -> None:
        connection, _ = fake.listener.accept()
        with connection:
            connection.sendall(raw)
            connection.recv(1000)

    threading.Thread(target=run, daemon=True).start()
    with pytest.raises(QemuError, match="monitor"):
        fake.connect()


def test_a_build_without_a_package_text_has_its_version(fake: FakeQemu) -> None:
    version = {"qemu": {"major": 9, "minor": 1, "micro": 0}, "package": ""}
    fake.serve(lambda request, connection: None, greeting={"QMP": {"version": version}})
    assert fake.connect().version == "9.1.0"
