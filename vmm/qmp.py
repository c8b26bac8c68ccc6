"""A QMP connection: commands to a running QEMU and what it answers, each wait raced with the end of the process.

Our own client, because `qemu.qmp` is asyncio: importing it takes 80 ms of CPU, as long as QEMU takes from its start
until the guest of a snapshot runs, and a listener there waits for ever for a QEMU that died. QMP is lines of JSON:
https://www.qemu.org/docs/master/interop/qmp-spec.html
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from fuse import protocol
from vmm.errors import QemuError, QemuTimeoutError
from vmm.process import Process

_RECEIVE_BYTES = 1 << 16
_KEPT_EVENTS = 1000
_END_S = 5.0


class Monitor:
    """QEMU's control connection. QEMU serves one at a time, the next waits for its greeting. One thread at a time.

    A command that was under way when its connection was closed is answered to the next connection: ids of commands tell
    whose they are.

    `version` is the package of this QEMU build, else its version ("7.2.22").
    """

    def __init__(self, path: Path, process: Process, *, timeout_s: float) -> None:
        """Connect and negotiate. QemuError when QEMU has ended, QemuTimeoutError when another has the monitor."""
        self._process = process
        self._buffer = bytearray()
        self._events: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        self._own, self._sequence = os.urandom(4).hex(), 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            try:
                with protocol.address(path) as address:
                    self._socket.connect(address)
            except (ConnectionRefusedError, FileNotFoundError, TimeoutError, BlockingIOError) as error:
                raise self._no_monitor(path, error) from error
            self._socket.setblocking(False)
            self.version = _version(self._receive_own(time.monotonic() + timeout_s, "its greeting"))
            self.execute("qmp_capabilities", timeout_s=timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def execute(self, command: str, arguments: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
        """Run one command and return its answer. QemuError with QEMU's own words when it refuses.

        After any other exception, be it that the caller was interrupted, the connection is closed; what was asked may
        still happen.
        """
        try:
            answer = self._ask(command, arguments or {}, time.monotonic() + timeout_s)
        except BaseException:
            self._socket.close()
            raise
        if "error" in answer:
            raise QemuError(f"QEMU refused {command}: {answer['error'].get('desc', answer['error'])}")
        return answer["return"]

    def _ask(self, command: str, arguments: dict[str, Any], deadline: float) -> dict[str, Any]:
        self._sequence += 1
        asked = f"{self._own}-{self._sequence}"
        message = {"execute": command, "arguments": arguments, "id": asked}
        self._send(json.dumps(message).encode() + b"\n", deadline, command)
        while True:
            answer = self._receive_own(deadline, f"an answer to {command}")
            if "event" in answer:
                self._events.append(answer)
            elif answer.get("id") != asked:
                raise QemuError(f"QEMU answered {answer!r} to {command}, which is not what was asked")
            else:
                return answer

    def event(self, name: str, *, timeout_s: float) -> dict[str, Any]:
        """The data of the next event of this name, of those that came since the connection was made."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self._events:
                event = self._events.popleft()
                if event["event"] == name:
                    return dict(event.get("data", {}))
            answer = self._receive(deadline, f"the event {name}")
            if "event" in answer:
                self._events.append(answer)

    @property
    def closed(self) -> bool:
        """Whether this connection is of no more use: QEMU ended or did not answer, or `close` was called."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes, deadline: float, command: str) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                self._poll(select.POLLOUT, deadline, f"QEMU to take {command}")
            except (BrokenPipeError, ConnectionResetError):
                raise self._hung_up() from None

    def _receive_own(self, deadline: float, what: str) -> dict[str, Any]:
        """The next message that is not an answer to a command of an earlier connection."""
        while True:
            message = self._receive(deadline, what)
            if "id" not in message or str(message["id"]).startswith(self._own):
                return message

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        """The next message. What QEMU said before it ended is still read."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.strip():
                    return _message(bytes(line))
                continue
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                self._poll(select.POLLIN, deadline, what)
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                raise self._hung_up()
            self._buffer += data

    def _poll(self, event: int, deadline: float, what: str) -> None:
        """Until the socket is ready; QemuError when the process ends, QemuTimeoutError at the deadline."""
        poll = select.poll()
        poll.register(self._socket, event)
        poll.register(self._process, select.POLLIN)
        rest_ms = max(0.0, deadline - time.monotonic()) * 1000
        ready = {fd for fd, _ in poll.poll(rest_ms)}
        if self._socket.fileno() in ready:
            return
        if ready:
            ending = self._process.ending()
            raise QemuError("QEMU ended") if ending is None else ending.error()
        self._socket.close()
        raise QemuTimeoutError(
            f"QEMU (pid {self._process.pid}) lives and gave no sign while {what} was awaited",
            hint="another command may be working on this VM, or the chunk server it reads from does not answer",
        )

    def _hung_up(self) -> QemuError:
        """QEMU closes its monitor just before it ends: then that is the cause."""
        self._socket.close()
        try:
            return self._process.wait(_END_S).error()
        except QemuTimeoutError:
            return QemuError(f"QEMU (pid {self._process.pid}) closed its monitor and lives")

    def _no_monitor(self, path: Path, error: OSError) -> QemuError:
        ending = self._process.ending()
        if ending is not None:
            return ending.error()
        if isinstance(error, TimeoutError | BlockingIOError):
            return QemuTimeoutError(f"QEMU (pid {self._process.pid}): too many commands wait at {path}")
        hint = "files of this VM are gone: `pvisor vm rm` ends it" if isinstance(error, FileNotFoundError) else ""
        text = f"QEMU (pid {self._process.pid}) lives and has no monitor at {path}: {error.strerror}"
        return QemuError(text, hint=hint)


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise QemuError(f"QEMU's monitor sent what is not JSON: {line[:200]!r}") from error
    if not isinstance(message, dict):
        raise QemuError(f"QEMU's monitor sent what is no object: {line[:200]!r}")
    return message


def _version(greeting: dict[str, Any]) -> str:
    try:
        version = greeting["QMP"]["version"]
        numbers = version["qemu"]
        return str(version.get("package") or f"{numbers['major']}.{numbers['minor']}.{numbers['micro']}")
    except (KeyError, TypeError) as error:
        raise QemuError(f"QEMU's monitor greets with {greeting!r}") from error
