"""The daemon's side of the control socket."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from fuse import protocol, rundir
from fuse.errors import NodeError
from imaged.config import Config
from imaged.errors import FormatError, PvisorError
from imaged.fetching.credentials import KNOWN

log = logging.getLogger(__name__)
_THREADS = 16
_WAITING_THREADS = 64
_BACKLOG = 256
_REQUEST_S = 30.0

Operation = Callable[[dict[str, Any]], dict[str, Any] | None]


class ControlServer:
    """Answers requests until `close`. Each operation runs in a thread of a bounded pool.

    `operations` wait for no other host. What one of them answers with None, or is none of them, `waiting` does, on
    threads of its own: so that a server that hangs holds up only those who need it.
    """

    def __init__(
        self, config: Config, operations: Mapping[str, Operation], waiting: Mapping[str, Operation] | None = None
    ) -> None:
        self._config = config
        self._operations = operations
        self._waiting = waiting or {}
        self._path = rundir.socket_path(config)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="control")
        self._waiting_pool = ThreadPoolExecutor(_WAITING_THREADS, thread_name_prefix="control-waiting")
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)

    def bind(self) -> None:
        """Take the address, in place of a daemon that died. NodeError. Nobody can connect before `start`."""
        try:
            self._path.unlink(missing_ok=True)
            with protocol.address(self._path) as address:
                self._socket.bind(address)
            self._path.chmod(0o600)
        except OSError as error:
            hint = "remove what is there, or set PVISOR_RUN to another directory"
            raise NodeError(f"can not make the control socket {self._path}: {error.strerror}", hint=hint) from error

    def start(self) -> None:
        """Accept requests."""
        self._socket.listen(_BACKLOG)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests; those that run are left to end with the process."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for pool in (self._pool, self._waiting_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                log.info("control socket closed: %s", error)
                return
            try:
                self._pool.submit(self._serve, connection)
            except RuntimeError:
                connection.close()
                return

    def _serve(self, connection: socket.socket) -> None:
        with ExitStack() as held:
            held.enter_context(connection)
            connection.settimeout(_REQUEST_S)
            try:
                request = protocol.receive_line(connection)
            except (FormatError, OSError) as error:
                # A command that only looks whether the daemon is there closes at once.
                log.debug("control request: %s", error)
                return
            if not self._answer(connection, request, self._operations):
                kept = held.pop_all()
                try:
                    self._waiting_pool.submit(self._wait, kept, connection, request)
                except RuntimeError:
                    kept.close()

    def _wait(self, held: ExitStack, connection: socket.socket, request: dict[str, Any]) -> None:
        with held:
            self._answer(connection, request, self._waiting)

    def _answer(self, connection: socket.socket, request: dict[str, Any], operations: Mapping[str, Operation]) -> bool:
        """Whether these operations have an answer, which is then sent."""
        answer = self._result(request, operations)
        if answer is None:
            return False
        try:
            protocol.send_line(connection, answer)
        except OSError as error:
            log.info("a command went away before its answer: %s", error)
        return True

    def _result(self, request: dict[str, Any], operations: Mapping[str, Operation]) -> dict[str, Any] | None:
        credentials = request.pop("credentials", None)
        try:
            self._check(request)
            if credentials is not None:
                KNOWN.learn(str(credentials["servers"]), str(credentials["token"]))
            operation = operations.get(request["op"])
            result = operation(request) if operation is not None else None
            return None if result is None else {"ok": True, "result": result}
        except PvisorError as error:
            log.info("%s: %s", request.get("op"), error.message)
            return {"ok": False, "error": error.message, "hint": error.hint}
        except Exception as error:
            log.exception("request %r failed", request.get("op"))
            return {
                "ok": False,
                "error": f"node daemon: {type(error).__name__}: {error}",
                "hint": f"see {rundir.log_path(self._config)}",
            }

    def _check(self, request: dict[str, Any]) -> None:
        home = str(self._config.home)
        pid = os.getpid()
        if request.get("protocol") != protocol.PROTOCOL:
            raise NodeError(
                f"the node daemon (pid {pid}) speaks protocol {protocol.PROTOCOL}, this command "
                f"{request.get('protocol')}: they are of different versions of pVisor",
                hint="`pvisor node stop`, then try again",
            )
        if request.get("op") not in (*self._operations, *self._waiting):
            raise NodeError(
                f"the node daemon (pid {pid}) knows no operation {request.get('op')!r}: it is of another version",
                hint="`pvisor node stop`, then try again",
            )
        if request["op"] != "status" and request.get("home") != home:
            raise NodeError(
                f"the node daemon (pid {pid}) uses PVISOR_HOME {home}, this command {request.get('home')}",
                hint="set PVISOR_HOME alike, or give this command a PVISOR_RUN of its own",
            )
